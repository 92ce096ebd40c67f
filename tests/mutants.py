"""Mistakes made on purpose: does a test notice each? A seeded sample of small changes, a score.

    python -m tests.mutants                                 56 changes, as `make mutants`
    python -m tests.mutants --modules norms,theory --count 20 --seed 3 --minutes 30

A change puts one operator, comparison or function in place of another (`min` for `max`), negates a
condition, drops an `abs`, `sqrt`, a sign or a transpose, takes another number. Each is made in a
copy of the tree, and the tests of its group, with the examples in the changed file, run there in a
process of their own until the first one fails. It counts as noticed where one fails, or where they
take `PATIENCE` times as long as usual. What survives is printed with its place: either the change
means the same, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COPIED = ("normjax", "experiments", "tests")
PATIENCE = 4
SLACK = 30.0
"""Seconds that a run of tests may take beyond ``PATIENCE`` times its usual time."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Files that are changed together, and the tests that should notice, the quickest first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


STATED = "tests/test_stated_errors.py"
GROUPS = {
    "norms": Group(
        _in("normjax", "norms", "norm_functions", "norm_derivatives"),
        _in("tests", "test_jacobians", "test_norms", "test_norm_catalogue"),
    ),
    "placements": Group(
        _in("normjax", "placements", "equation", "mixing"),
        _in("tests", "test_placements", "test_jacobians", "test_blocks"),
    ),
    "jacobians": Group(
        (*_in("normjax/jacobians", "closed_forms", "radial", "branch_jacobians", "verification",
              "views"), *_in("normjax/diagnostics", "identities", "radial")),
        (*_in("tests", "test_jacobians", "test_radial", "test_blocks"), STATED),
    ),
    "spectra": Group(
        _in("normjax/spectra", "bidiagonal", "krylov", "stochastic", "secular", "norm_spectra",
            "dense", "depth_products", "spectrum"),
        (*_in("tests", "test_depth_products", "test_spectrum", "test_norm_spectra", "test_dense",
              "test_krylov"), STATED),
    ),
    "theory": Group(
        _in("normjax/theory", "random_matrices", "matrix_products", "product_density", "two_layer",
            "free_factors", "layer_scale", "sublayer_theory"),
        _in("tests", "test_random_matrices", "test_sublayer_theory"),
    ),
    "statistics": Group(
        _in("normjax/reporting", "statistics", "rank_correlation", "interval_score", "effects"),
        (*_in("tests", "test_statistics", "test_prediction_score", "test_report_words"), STATED),
    ),
    "verdicts": Group(
        ("experiments/mechanisms/verdicts.py",), (STATED, "tests/test_mechanisms.py")
    ),
}  # fmt: skip

# --- what is changed ------------------------------------------------------------------------------

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
REVERSED: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
OTHERS = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "argmax": "argmin",
    "argmin": "argmax", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "sin": "cos",
    "cos": "sin", "zeros": "ones", "ones": "zeros", "floor": "ceil", "ceil": "floor",
}  # fmt: skip
DROPPED = (
    *("abs", "sqrt", "log", "exp", "expm1", "log1p", "cumsum", "sort", "sorted", "clip", "square"),
    *("stop_gradient", "conj", "sign", "flip", "cbrt"),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a file: another text, and what it is in a line."""

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}\n      - {self.before}\n      + {self.after}"


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node; a copy is made of what is changed, the rest shared.

    Texts and their formats are never changed, so messages are not either.
    """

    def other(**fields: object) -> ast.AST:
        return type(node)(**{**dict(ast.iter_fields(node)), **fields})

    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield other(op=OPERATORS[type(op)]())
        case ast.Compare(ops=[op]):
            for table in (OPERATORS, REVERSED):
                if type(op) in table:
                    yield other(ops=[table[type(op)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield other(test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1 if abs(value) < 16 else 2 * value)
        case ast.Constant(value=float() as value):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Call(args=[first, *_]) if _name(node) in DROPPED:
            yield first
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OTHERS:
            yield other(func=ast.Attribute(value, OTHERS[name], ast.Load()))
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" as name)):
            yield other(func=ast.Name(OTHERS[name], ast.Load()))
        case ast.Attribute(value=value, attr="T"):
            yield value
        case ast.Call(args=[_, first, second]) if _name(node) == "where":
            yield first
            yield second
        case ast.Return(value=ast.Tuple() as value) if len(value.elts) == 2:
            yield other(value=ast.Tuple(value.elts[::-1], ast.Load()))
        case ast.Continue() | ast.Break():
            yield ast.Pass()


def _skipped(node: ast.AST) -> bool:
    """Whether a part of a file is none of the mathematics: texts, what is raised, checks of zip."""
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "frozen", "dtype")
    return isinstance(
        node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.arguments
    )


def _places(
    node: ast.AST, guarded: bool = False
) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield (parent, field, index, child) of all that may be changed.

    A condition under which something is only refused is a matter of input, not of mathematics.
    """
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "slice", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or _skipped(child):
                continue
            refuses = isinstance(child, ast.If) and isinstance(child.body[0], ast.Raise)
            if not refuses and not (guarded and field == "test"):
                yield node, field, index, child
            if not (isinstance(node, ast.If) and field == "test" and guarded):
                yield from _places(child, refuses)


def changes(file: str, text: str, only: Container[int] | None = None) -> Iterator[Change]:
    """Yield every change of a file, or those of some numbers: most of the time is writing one."""
    tree, lines = ast.parse(text), text.splitlines()
    for number, (parent, field, index, child, found) in enumerate(_ways(tree)):
        if only is not None and number not in only:
            continue
        _put(parent, field, index, found)
        changed = ast.unparse(tree)
        _put(parent, field, index, child)
        first = child.lineno
        shown = " ".join(line.strip() for line in lines[first - 1 : child.end_lineno])
        yield Change(
            file, first, shown[:160], f"{_short(child)}  ->  {_short(found)}", changed + "\n"
        )


def _ways(tree: ast.AST) -> Iterator[tuple[Any, str, int | None, Any, ast.AST]]:
    """Yield where each change of a tree is, and what it puts there."""
    for parent, field, index, child in _places(tree):
        if hasattr(child, "lineno"):
            for found in replacements(child):
                yield parent, field, index, child, found


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:90]


def sample(tree: Path, files: Sequence[str], count: int, seed: str) -> list[Change]:
    """Return changes drawn without order from all of the files, no two of them in one line."""
    texts = {file: (tree / file).read_text() for file in files}
    every = [
        (file, child.lineno, number) for file, text in texts.items()
        for number, (_, _, _, child, _) in enumerate(_ways(ast.parse(text)))
    ]  # fmt: skip
    random.Random(seed).shuffle(every)
    chosen = list({each[:2]: each for each in reversed(every)}.values())[::-1][:count]
    made = {}
    for file, text in texts.items():
        own = sorted(number for of, _, number in chosen if of == file)
        made |= zip([(file, n) for n in own], changes(file, text, own), strict=True)
    return [made[file, number] for file, _, number in chosen]


# --- what notices ---------------------------------------------------------------------------------


def run(tree: Path, tests: Sequence[str], limit: float | None) -> tuple[int | None, float]:
    """Return the exit code of the tests in a tree, None where the limit passed, and the seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, *tests], cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)},
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return code, time.monotonic() - start


def judged(tree: Path, group: Group, change: Change, usual: float) -> str:
    """Return "noticed", "too slow" or "survived"; anything else the tests end with is an error."""
    path = tree / change.file
    right = path.read_text()
    path.write_text(change.source)
    try:
        code, _ = run(tree, (change.file, *group.tests), PATIENCE * usual + SLACK)
    finally:
        path.write_text(right)
    # 1: a test failed; 2, 4: the tests could not be collected; negative: the process died.
    return "too slow" if code is None else "survived" if code == 0 else "noticed"


def tried(
    tree: Path, name: str, count: int, seed: int, ends: float, say: Callable[[str], None]
) -> tuple[int, list[Change]]:
    """Return how many changes of a group were tried, and those that nothing noticed."""
    group, survivors, n = GROUPS[name], [], 0
    code, usual = run(tree, (*group.files, *group.tests), None)
    if code != 0:
        raise SystemExit(f"{name}: its tests end with {code} as the files are; nothing to compare")
    slow = 0
    for change in sample(tree, group.files, count, f"{seed}/{name}"):
        if time.monotonic() > ends:
            break
        verdict, n = judged(tree, group, change, usual), n + 1
        slow += verdict == "too slow"
        if verdict == "survived":
            survivors.append(change)
            say(f"  survived: {change}")
    say(f"{name:12} {n - len(survivors):3} of {n:3} noticed, {slow} by time; tests {usual:.0f} s")
    return n, survivors


def main() -> None:
    """Try a sample of every group, print what survived and the score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modules", default=",".join(GROUPS), help="groups, with commas")
    parser.add_argument("--count", type=int, default=8, help="changes a group")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--minutes", type=float, default=600.0, help="no change is begun after it")
    given = parser.parse_args()
    names = given.modules.split(",")
    if wrong := [name for name in names if name not in GROUPS]:
        parser.error(f"--modules={','.join(wrong)}: must be of {', '.join(GROUPS)}")
    start = time.monotonic()
    total, left = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        for part in COPIED:
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for name in names:
            n, survivors = tried(
                tree, name, given.count, given.seed, start + 60 * given.minutes,
                lambda text: print(text, flush=True),
            )  # fmt: skip
            total, left = total + n, left + len(survivors)
    minutes = (time.monotonic() - start) / 60
    print(f"score {total - left} of {total}, seed {given.seed}, {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
