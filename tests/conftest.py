"""What every test runs under: a CPU with four devices, no 64-bit mode, quick compiling.

Most of the suite's time is the compiler's. Programs are compiled without most optimizations here
and in the processes that tests start, except in modules that name the fixture ``optimized``, and
in all of them under ``make test-all``.
"""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import matplotlib
import pytest

matplotlib.use("Agg")
# Under nohup it is ignored, and so it would be in every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_num_cpu_devices", 4)

UNOPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def _set_optimized(on):
    """Choose for this process and its children; compiled programs of the other kind are dropped."""
    os.environ[UNOPTIMIZED] = "0" if on else "1"
    jax.config.update("jax_disable_most_optimizations", not on)
    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--optimized", action="store_true", help="compile everything as users do")


def pytest_configure(config):
    _set_optimized(config.getoption("optimized"))


@pytest.fixture(scope="module")
def optimized(pytestconfig):
    """For a module whose numbers depend on what the compiler reorders."""
    _set_optimized(True)
    yield
    _set_optimized(pytestconfig.getoption("optimized"))


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
