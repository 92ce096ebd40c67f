"""Imports go one way. The table below is the order; every file of the package has a place in it."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first. A module imports from strictly lower layers only. A folder such as
# "normjax.reporting" stands for every module in it that has no place of its own: those may import
# each other, without cycles.
LAYERS = (
    ("normjax", "normjax.errors", "normjax.data.scratch", "normjax.regular_files",
     "normjax.data.accounts", "normjax.data.tensorflow_free", "normjax.runs.signals",
     "normjax.runs.streams", "normjax.rounding"),
    ("normjax.data.cache_folder", "normjax.named_files", "normjax.runs.files", "normjax.traced"),
    ("normjax.configs", "normjax.registry", "normjax.equation", "normjax.norm_derivatives",
     "normjax.runs.machine", "normjax.runs.experiment",
     "normjax.data.philox", "normjax.data.text_files", "normjax.data.tfds_text",
     "normjax.data.vocabulary", "normjax.diagnostics.definitions"),
    ("normjax.norm_functions",),
    ("normjax.plugins", "normjax.runs.edge", "normjax.spectra", "normjax.norms",
     "normjax.nonlinearities", "normjax.initializers", "normjax.data.plays", "normjax.data.tasks",
     "normjax.data.token_cache", "normjax.data.windows", "normjax.diagnostics.bands",
     "normjax.runs.run_folder", "normjax.runs.segments"),
    ("normjax.mixing", "normjax.joins", "normjax.alternating", "normjax.predictions"),
    ("normjax.placement", "normjax.data", "normjax.training.optimizer",
     "normjax.training.extremes"),
    ("normjax.placements",),
    ("normjax.decoder_config",),
    ("normjax.layers",),
    ("normjax.decoder",),
    ("normjax.jacobians", "normjax.theory", "normjax.training.train", "normjax.foreign"),
    ("normjax.training.cohorts", "normjax.runs.grid", "normjax.diagnostics"),
    ("normjax.training", "normjax.reporting", "normjax.runs.progress",
     "normjax.runs.provenance"),
    ("normjax.runs", "normjax.diagnostics.autopsy"),
    ("normjax.runs.runner",),
    ("experiments",),
    ("launch",),
)  # fmt: skip
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
FOLDERS = (
    *("normjax.data.tasks", "normjax.data", "normjax.training", "normjax.runs"),
    *("normjax.reporting", "normjax.spectra", "normjax.jacobians", "normjax.theory"),
    *("normjax.diagnostics", "normjax.predictions", "normjax.foreign", "experiments"),
)
# These read what a run has left behind, on any machine: no accelerator library is needed there.
WITHOUT_JAX = (
    *("normjax.runs.files", "normjax.runs.run_folder", "normjax.runs.segments"),
    *("normjax.diagnostics." + name for name in (
        "bands", "definitions", "events", "evidence", "log", "autopsy_record",
        "self_test", "verdict",
    )),
    "normjax.reporting",
    "normjax.errors",
    "normjax.predictions",
    *(f"experiments.{name}" for name in (
        *(f"mechanisms.{part}" for part in ("answers", "data", "figures", "page", "verdicts")),
        "stability.data", "stability.figures", "stability.page",
        "spectrum.data", "spectrum.figures", "spectrum.page",
        "ladder.data", "ladder.page", "ladder.sequential", "published.page", "published.result",
    )),
)  # fmt: skip
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")


def files():
    """Every module of the program by its dotted name."""
    found = {"launch": ROOT / "launch.py"}
    for package in ("normjax", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts)] = path
    return found


MODULES = files()


def imports(name):
    """Dotted names that a module imports anywhere, inside functions as well."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def own_imports(name):
    """Of those, the ones from this program, as names of modules."""
    return sorted({i for i in imports(name) if i in MODULES and i != name})


def place(name):
    """The entry of the table that a module falls under."""
    if name in RANK:
        return name
    for folder in FOLDERS:
        if name == folder or name.startswith(folder + "."):
            return folder
    if name not in RANK:
        below = ", ".join(own_imports(name)) or "nothing of ours"
        pytest.fail(
            f"{name} has no place in the order of imports: add it to LAYERS in"
            f" {Path(__file__).name}, in a layer above everything it imports ({below})"
        )
    return name


@pytest.mark.parametrize("name", MODULES)
def test_imports_come_from_lower_layers(name):
    here = place(name)
    for imported in own_imports(name):
        there = place(imported)
        if here == there and here in FOLDERS:
            continue  # cycles within a folder are looked for below
        assert RANK[there] < RANK[here], (
            f"{name} (layer {RANK[here]}) imports {imported} (layer {RANK[there]}): imports go to"
            " strictly lower layers; move what both need further down"
        )


def test_the_table_names_only_what_exists():
    prefixes = {".".join(name.split(".")[:n]) for name in MODULES for n in (1, 2, 3)}
    gone = set(RANK) - prefixes
    assert not gone, f"remove {', '.join(sorted(gone))} from LAYERS: no such file"
    assert len(RANK) == sum(len(layer) for layer in LAYERS), "a name stands in two layers"


def test_there_are_no_cycles():
    graph = {name: own_imports(name) for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


def test_the_package_never_imports_its_users():
    for name in MODULES:
        if name.startswith("normjax"):
            tops = {imported.split(".")[0] for imported in imports(name)}
            assert not tops & {"experiments", "launch", "tests"}, name


def test_no_file_imports_tensorflow():
    for name in MODULES:
        assert "tensorflow" not in {imported.split(".")[0] for imported in imports(name)}, name


def test_reports_and_run_logs_name_no_jax():
    """Not directly, and not through anything of ours that they import."""
    for start in (n for n in MODULES if any(n == w or n.startswith(w + ".") for w in WITHOUT_JAX)):
        seen, pending = set(), [start]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            heavy = {imported.split(".")[0] for imported in imports(name)} & set(HEAVY)
            assert not heavy, f"{start} reaches {name}, which imports {', '.join(sorted(heavy))}"
            pending += own_imports(name)


def test_reports_and_run_logs_load_no_jax():
    """The same in a fresh process, other people's libraries included."""
    reporting = [n for n in MODULES if n.startswith("normjax.reporting.")]
    lines = [
        f"import {name}"
        for name in ("normjax.reporting.report", "normjax.runs.run_folder", *reporting)
    ]
    lines += ["import sys", f"print([m for m in {(*HEAVY, 'tensorflow')!r} if m in sys.modules])"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_nothing_loads_tensorflow():
    lines = [f"import {name}" for name in MODULES if name not in ("launch",)]
    lines += ["import sys", "print('tensorflow' in sys.modules)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_a_module_without_a_place_is_told_where_to_go(monkeypatch):
    monkeypatch.setitem(MODULES, "normjax.gauges", ROOT / "normjax" / "errors.py")
    with pytest.raises(pytest.fail.Exception, match=r"normjax\.gauges .* add it to LAYERS in"):
        place("normjax.gauges")
