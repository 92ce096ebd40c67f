"""Golden values: numbers of the program as it is, so that a change of its form shows what it moved.

    python -m tests.goldens --write                   rewrite the file of this version of jax
    python -m tests.goldens --write steps claims      only these sections of it

The steps run operation by operation (no jit): the same arithmetic whatever the compiler fuses, and
nothing compiled per row. What is compiled is covered by the sections that are marked slow.
"""

from __future__ import annotations

import argparse
import csv
import functools
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax.decoder import Decoder, DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.jacobians.closed_forms import norm_jacobian, placement_jacobian
from normjax.norms import NORMS
from normjax.placements import COMMON
from normjax.runs import machine
from normjax.theory.sublayer_theory import predict
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python -m tests.goldens --write"
DIGEST = "sha256:"
TOLERANCE = 1e-5
"""Of other processors and versions: relative to the larger of the number and 1."""
BFLOAT16_TOLERANCE = 1e-2
ONLY_EXACT = ("claims", "stability")
"""Not comparable elsewhere: rounding picks the worst entry, and runs that diverge enlarge it."""
COLUMNS: dict[str, str] = {}
"""Columns that have been renamed: old name -> new name."""
LEFT_OUT = re.compile(
    r"run|path|folder|date|started|time_.*|.*seconds.*|sentence|basis|(first_)?diagnostic"
)
"""Columns that differ from run to run, hold run names, which hash their configuration, or words."""
KEYS = ("task", "arm", "variant", "series", "x", "depth", "warmup", "seed", "learning_rate",
        "diagnostic", "step", "block", "layer", "sublayer", "head")  # fmt: skip
"""Rows are ordered by these: the order of the file may be that of run names."""
IN_FULL = ("results", "summary", "mechanisms", "stability", "claims")
VOCABULARY, WINDOW, BATCH = 11, 8, 4


# --- rows of decoders -----------------------------------------------------------------------------

PINNED = ("rmsnorm", "rmsnorm_offset", "rmsnorm_plain", "layernorm", "layernorm_nobias",
          "layernorm_plain", "identity")  # fmt: skip
"""Norms whose numbers are recorded; tests/test_norm_catalogue.py has formulas of the others."""
_PLACED = {f"{p}/rmsnorm": {"placement": p} for p in COMMON}
_NORMED = {f"pre/{n}": {"norm": n} for n in PINNED}
_BRANCH_ONLY = {f"{p}/rmsnorm/no-residual": {"placement": p, "residual": False} for p in COMMON}
_PARTS: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True},
    "softcaps": {"attention_softcap": 1.5, "output_softcap": 2.0},
    "kv_heads": {"kv_heads": 1},
    "swiglu": {"mlp": "swiglu"},
    "relu": {"mlp": "relu"},
    "learned": {"positions": "learned"},
    "scan_layers": {"scan_layers": True},
    "untied": {"tied": False},
    "bias": {"bias": True},
    "bfloat16": {"dtype": "bfloat16", "param_dtype": "bfloat16"},
    "deep-scaling": {"depth": 3, "placement": "layernorm_scaling"},
    "deep-deepnorm": {"depth": 3, "placement": "deepnorm", "scan_layers": True},
}
_TOGETHER = {
    "together": {
        "qk_norm": True, "attention_softcap": 1.5, "output_softcap": 2.0, "kv_heads": 1,
        "mlp": "swiglu", "positions": "learned", "tied": False, "bias": True, "norm": "layernorm",
    },
}  # fmt: skip
_ALL_PAIRS = {f"{p}/{n}": {"placement": p, "norm": n} for p in COMMON for n in PINNED}
_ALWAYS = {
    f"{p}/rmsnorm": {"placement": p} for p in ("pre", "post", "deepnorm", "rezero", "hybridnorm")
}
ROWS = _ALWAYS | _NORMED
MORE_ROWS = {
    k: v
    for k, v in (_PLACED | _BRANCH_ONLY | _ALL_PAIRS | _PARTS | _TOGETHER).items()
    if k not in ROWS
}
MORE_BLOCKS = {
    k: v for k, v in (_PLACED | _BRANCH_ONLY | _TOGETHER | _PARTS).items() if k not in _ALWAYS
}
COMPILED_ROWS = _PLACED | {"pre/layernorm": _NORMED["pre/layernorm"]} | _TOGETHER | {
    k: _PARTS[k] for k in ("scan_layers", "bfloat16")
}  # fmt: skip


def decoder(depth: int = 2, width: int = 16, **changes: Any) -> Decoder:
    """Return a tiny decoder; the MLP is as wide as the stream, to have few shapes to compile."""
    config = DecoderConfig(depth=depth, width=width, heads=2, mlp_width=width, **changes)
    return Decoder(config, VOCABULARY, WINDOW)


OLD = {"pre_norm": "read_norm", "branch_norm": "output_norm", "post_norm": "stream_norm",
       "'write'": "'branch_gain'"}  # fmt: skip
RENAMED = re.compile("|".join(OLD))


def old_name(path: Any) -> str:
    """Return a leaf's path with the names that the parameters had when the file was written."""
    return RENAMED.sub(lambda m: OLD[m[0]], jax.tree_util.keystr(path))


def moved(params: Any, seed: int = 1) -> Any:
    """Return parameters as after some training: no gain is 1 and no bias 0."""
    rng = np.random.default_rng(seed)
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    drawn = {}
    for path, x in sorted(leaves, key=lambda leaf: old_name(leaf[0]).replace("[", "")):
        noise = 0.1 * rng.standard_normal(x.shape).astype("float32")
        drawn[path] = (x + noise).astype(x.dtype)
    return jax.tree.unflatten(tree, [drawn[path] for path, _ in leaves])


def digest(tree: Any) -> str:
    """Return a digest of names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for name, leaf in sorted((old_name(path), np.asarray(x)) for path, x in leaves):
        total.update(f"{name} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
    return DIGEST + total.hexdigest()


def squares(tree: Any) -> float:
    """Return the sum of squares of all leaves: how far a changed digest is off."""
    return math.fsum(float(np.sum(np.float64(x) ** 2)) for x in jax.tree.leaves(tree))


def steps(rows: dict[str, dict[str, Any]], compiled: bool = False) -> dict[str, Any]:
    """Return losses and parameters of one training step and one evaluation of every row."""
    config = TrainConfig(steps=50, warmup_steps=0, batch_size=BATCH)
    hyper = Hyper(np.uint32(3), np.float32(1e-2), np.float32(0.1), np.float32(1))
    shape = (2, BATCH, WINDOW + 1)
    windows = np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.int32)
    weights = np.ones((1, BATCH, WINDOW), np.float32)
    found = {}
    for name, changes in rows.items():
        model = decoder(**changes)
        init, step, evaluate = (
            jax.jit(f) if compiled else f
            for f in (
                partial(train.init_state, model, config), partial(train.train_step, model, config),
                partial(train.evaluate, model),
            )
        )  # fmt: skip
        with jax.disable_jit(not compiled):
            start = init(hyper)
            state = step(start._replace(params=moved(start.params)), hyper, windows[0])
            loss = evaluate(state.params, windows[1:], weights, 1)
        found[name] = {
            "initial": digest(start.params), "initial_squares": squares(start.params),
            "loss": float(state.loss_sum), "gradient_norm": float(state.norm_sum),
            "parameters": digest(state.params), "parameters_squares": squares(state.params),
            "moments": digest(state.moments),
            "evaluation": float(np.float32(loss[0]) / np.float32(weights[0].sum())),
        }  # fmt: skip
    return found


# --- Jacobians and theory -------------------------------------------------------------------------


def seen(x: Any) -> dict[str, Any]:
    """Return an array as a digest, sums and a few entries."""
    x = np.asarray(x, np.float64)
    picked = x.ravel()[:: max(1, x.size // 4)]
    return {
        "digest": digest(x), "sum": float(x.sum()), "absolute": float(np.abs(x).sum()),
        "entries": picked.tolist(),
    }  # fmt: skip


def norm_jacobians() -> dict[str, Any]:
    """Return the closed form of every norm at fixed points, with gain and bias."""
    rng = np.random.default_rng(0)
    points, gain, bias = rng.standard_normal((3, 8)), rng.uniform(0.5, 2, 8), np.arange(8) / 8
    found = {}
    for name in PINNED:
        norm = NORMS[name]
        given = {"gain": gain, "bias": bias}
        parameters = {p.name: given[p.name] for p in norm.parameters}
        for eps in (1e-6, 1e-2):
            found[f"{name}/{eps:g}"] = seen(norm_jacobian(name, points, parameters, eps))
    j, p, q = (rng.standard_normal((2, 5, 5)) for _ in range(3))
    b = rng.standard_normal(5)
    found["placement_jacobian"] = seen(
        placement_jacobian(j, pre_norm=p, branch_norm=q, post_norm=p @ q, a=0.7, b=b, c=0.3)
    )
    return found


@functools.cache
def parameters(**changes: Any) -> Any:
    """Return a tiny decoder's parameters as they start."""
    with jax.disable_jit():
        return decoder(**changes).init(jax.random.key(0))


def block_jacobians(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return closed-form Jacobians of a block and of the whole stack."""
    found = {}
    rng = np.random.default_rng
    for name, changes in rows.items():
        parts = Parts(decoder(**changes), moved(parameters(**changes)))
        h = rng(2).standard_normal((4, parts.config.state_width))
        with jax.disable_jit():
            found[name] = {
                "token": seen(parts.block(2).token_jacobians(h)),
                "sequence": seen(parts.stack(1, 2).sequence_jacobian(h)),
            }
    return found


def theory() -> dict[str, Any]:
    """Return the predicted laws of the sub-layers of every placement at initialization."""
    found: dict[str, Any] = {}
    for name, changes in (_PLACED | _BRANCH_ONLY).items():
        params, config = parameters(**changes), decoder(**changes).config
        for sublayer, position in itertools.product(("attention", "mlp"), (0, 5)):
            said = predict(config, params, 1, sublayer, 0.04, position=position)
            law, row = said.law, {"mean_square": said.mean_square}
            if law is not None:
                row |= {"a": float(law.a), "sigma": law.sigma}
                if law.a or law.sigma:  # else it is a point at zero, without edges
                    row["edges"] = [float(x) for x in law.edges()]
            found[f"{name}/{sublayer}/{position}"] = row
    return found


# --- files of whole experiments -------------------------------------------------------------------


def files(*flags: str, corpus: bool = True) -> dict[str, Any]:
    """Run an experiment in a process of its own and return the columns of its CSV files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
        flags += (f"--config.data.corpus={folder / 'text.txt'}",) if corpus else ()
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), *flags, f"--workdir={folder / 'work'}",
             "--cpu_devices=2", "--compilation_cache=off"],
            env=environment, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"launch.py {' '.join(flags)}: {done.stderr[-2000:]}")
        paths = sorted((folder / "work").rglob("*.csv"))
        return {str(path.relative_to(folder / "work")): columns(path) for path in paths}


def columns(path: Path) -> dict[str, Any]:
    """Return a CSV file by column: the values where the file is a small one, else a digest."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows.sort(key=lambda row: [row[key] for key in KEYS if key in row])
    found = {k: [row[k] for row in rows] for k in (rows[0] if rows else ()) if wanted(k)}
    if path.stem in IN_FULL:
        return found
    return {k: DIGEST + hashlib.sha256("\n".join(v).encode()).hexdigest() for k, v in found.items()}


def wanted(column: str) -> bool:
    """Whether a column's values can be the same in two runs."""
    return not LEFT_OUT.fullmatch(column)


_DIAGNOSTICS = (
    "--preset=smoke",
    "--config.train.diagnostics=on",
    "--config.grid.arms=full,post-norm",
)
_TINY = (
    "--preset=quick", "--config.model.width=8", "--config.train.steps=2", "--config.data.window=6",
    "--config.train.checkpoint_every=1", "--config.train.warmup_steps=1",
    "--config.train.batch_size=2", "--config.train.evaluation_windows=2",
    "--config.train.final_windows=2", "--config.spectrum.placements=pre,post",
    "--config.model.depth=2", "--config.spectrum.depths=1,2", "--config.spectrum.seeds=1",
    "--config.spectrum.sequences=2", "--config.spectrum.tokens=6",
    "--config.spectrum.sequence_tokens=3",
)  # fmt: skip
FAST: dict[str, Callable[[], dict[str, Any]]] = {
    "steps": partial(steps, ROWS),
    "norm_jacobians": norm_jacobians,
    "block_jacobians": partial(block_jacobians, _ALWAYS),
    "theory": theory,
}
SLOW: dict[str, Callable[[], dict[str, Any]]] = {
    "more_steps": partial(steps, MORE_ROWS),
    "more_block_jacobians": partial(block_jacobians, MORE_BLOCKS),
    "compiled_steps": partial(steps, COMPILED_ROWS, compiled=True),
    "ablation": partial(files, "--experiment=ablation", "--preset=smoke"),
    "ablation_diagnostics": partial(files, "--experiment=ablation", *_DIAGNOSTICS),
    "mechanisms": partial(files, "--experiment=mechanisms", "--preset=smoke", corpus=False),
    "stability": partial(files, "--experiment=stability", "--preset=smoke"),
    "spectrum": partial(files, "--experiment=spectrum", *_TINY),
    "claims": partial(files, "--experiment=claims", corpus=False),
}
SECTIONS = FAST | SLOW


# --- the files ------------------------------------------------------------------------------------


def path_of_this_version() -> Path:
    """Return the file of this minor version of jax, on whose compiler the last bits depend."""
    return Path(__file__).with_suffix("") / f"jax-{'.'.join(jax.__version__.split('.')[:2])}.json"


def differences(old: Any, new: Any, exact: bool, where: str = "") -> list[str]:
    """Return one line per value of ``old`` that is missing from ``new`` or another there."""
    if isinstance(old, dict):
        if not isinstance(new, dict):
            return [f"{where}: no longer a table"]
        pairs = [(k, new.get(COLUMNS.get(k, k)), f"{where}/{k}".lstrip("/")) for k in old]
        return [
            line
            for key, value, place in pairs
            for line in (
                differences(old[key], value, exact, place)
                if value is not None
                else [f"{place}: missing"]
            )
        ]
    if isinstance(old, list):
        if len(old) != len(new):
            return [f"{where}: {len(old)} values -> {len(new)}"]
        both = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in both for line in differences(a, b, exact, f"{where}[{i}]")]
    if old == new or (old != old and new != new):
        return []
    try:
        a, b = float(old), float(new)
    except ValueError:
        return [f"{where}: {str(old)[:60]} -> {str(new)[:60]}"] if exact else []
    off = abs(a - b)
    tolerance = BFLOAT16_TOLERANCE if "bfloat16" in where else TOLERANCE
    if not exact and (off <= tolerance * max(1.0, abs(a)) or a == b or (a != a and b != b)):
        return []
    return [f"{where}: {old!r} -> {new!r}, differs by {off:.1e} ({off / (abs(a) or 1):.1e} of it)"]


def write(names: list[str]) -> None:
    """Compute sections and put them into the file of this version."""
    path = path_of_this_version()
    stored = json.loads(path.read_text()) if names and path.exists() else {"sections": {}}
    here = {"jax": jax.__version__, "processor": machine.vector_isa()}
    if names and any(stored.get(k, v) != v for k, v in here.items()):
        sys.exit(f"{path.name} is of another processor or version: rewrite all of it")
    path.parent.mkdir(exist_ok=True)
    for name in names or SECTIONS:
        stored["sections"][name] = SECTIONS[name]()
        stored |= here
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        print(name, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument("--write", nargs="*", choices=[*SECTIONS], required=True, metavar="SECTION")
    chosen = parser.parse_args().write
    jax.config.update("jax_platforms", "cpu")  # as tests/conftest.py has it
    jax.config.update("jax_num_cpu_devices", 4)
    write(chosen)
