"""What every test runs under: a CPU with four devices, no 64-bit mode, quick compiling.

Most of the suite's time is the compiler's. Programs are compiled without most optimizations here
and in the processes that tests start, except in modules that name the fixture ``optimized``, and
in all of them under ``make test-all``.
"""

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Many tests compile the same programs. They share a folder of them, made anew in every run: of both
# workers and of what tests start, as JAX reads these itself. No test depends on it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.mkdtemp(prefix="normjax-programs-")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
import matplotlib
import pytest
from hypothesis import HealthCheck, configuration, settings

matplotlib.use("Agg")
# Under nohup it is ignored, and so it would be in every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_num_cpu_devices", 4)

# Fuzz tests: the same few examples in every run of the ordinary suite; in the long one many others,
# from a seed that is printed. What Hypothesis keeps for itself stays out of the repository.
configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir(), f"normjax-fuzz-{os.geteuid()}"))
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "few", max_examples=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=_SLOW,
)  # fmt: skip
settings.register_profile(
    "many", max_examples=500, deadline=None, database=None, print_blob=True,
    suppress_health_check=_SLOW,
)  # fmt: skip

UNOPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def _set_optimized(on):
    """Choose for this process and its children; compiled programs of the other kind are dropped."""
    os.environ[UNOPTIMIZED] = "0" if on else "1"
    jax.config.update("jax_disable_most_optimizations", not on)
    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--optimized", action="store_true", help="compile everything as users do")


@pytest.hookimpl(tryfirst=True)  # before the plugin of Hypothesis takes the seed
def pytest_configure(config):
    many = config.getoption("optimized")
    _set_optimized(many)
    settings.load_profile("many" if many else "few")
    if many and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config):
    seed = config.getoption("hypothesis_seed")
    return f"fuzz tests again: --optimized --hypothesis-seed={seed}" if seed else None


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


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process; return exit code, output and error output."""
    from absl import flags

    from experiments import cli
    from normjax.runs import machine

    monkeypatch.setattr(machine, "set_up", lambda *_: None)  # the tests have their own devices

    def run(*arguments):
        values = flags.FlagValues()
        cli.define_flags(values)
        argv = ["launch.py", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        capsys.readouterr()
        try:
            cli.parse(values, list(argv))
            code = cli.carry_out(values)
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return run
