"""What every test runs under: a CPU with four devices, strict promotion, no 64-bit mode."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import matplotlib
import pytest

matplotlib.use("Agg")
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(autouse=True)
def _sixty_four_bits_stay_off():
    """No test, and nothing a test calls, may leave 64-bit mode on."""
    yield
    assert not jax.config.jax_enable_x64


@pytest.fixture
def x64():
    """64-bit mode for one test, restored after it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Keep a test away from the user's cache and prepared sets."""
    monkeypatch.setenv("NORMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
