"""What a change of the configuration means: in words, in the equation, in the decoder.

The vocabulary of the report. It repeats the placements' structure without their code because a
report must be readable where JAX is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normjax.reporting.results import Cell, Results


@dataclass(frozen=True)
class Scheme:
    """Which of N, Q and P are a norm, and the factors a, b and c where they are not 1."""

    read: bool = False
    output: bool = False
    stream: bool = False
    final_norm: bool = False
    a: str = ""
    b: str = ""
    c: str = ""


SCHEMES = {
    "pre": Scheme(read=True, final_norm=True),
    "post": Scheme(stream=True),
    "none": Scheme(),
    "sandwich": Scheme(read=True, output=True, final_norm=True),
    "branch_output": Scheme(output=True, final_norm=True),
    "deepnorm": Scheme(stream=True, a="a"),
    "layernorm_scaling": Scheme(read=True, final_norm=True, c="c"),
    "skipinit": Scheme(b="b"),
    "layerscale": Scheme(read=True, final_norm=True, b="b"),
}

PARTS = (
    (
        "Token embedding",
        "turns each {unit} into a vector. These vectors, one per place in the text, are the "
        "residual stream h that all blocks read and write.",
    ),
    (
        "Positions",
        "tell the model where a {unit} stands. Without them attention sees earlier text as a bag; "
        "only the causal mask (nobody looks ahead) still betrays some order.",
    ),
    (
        "Attention",
        "is the only part that moves information between places: each place gathers what is useful "
        "from the places before it. Without it the next {unit} is guessed from the present one.",
    ),
    (
        "MLP",
        "works on each place by itself: two or three matrices with a nonlinearity between them. It "
        "usually holds most of the parameters.",
    ),
    (
        "Normalization",
        "rescales a vector to a fixed size, so that a branch sees inputs of one scale whatever the "
        "depth. Where it stands decides what the gradient passes through on its way back.",
    ),
    (
        "Residual connection",
        "adds a branch's output to its input instead of replacing it. Signal and gradient have a "
        "direct path through all blocks; without it every block must pass everything on itself.",
    ),
    (
        "Output head",
        "turns each final vector into one score per {unit} of the vocabulary; softmax makes "
        "probabilities of them.",
    ),
)

_ACTIONS = {
    ("model.attention", "none"): "removing attention",
    ("model.mlp", "none"): "removing the MLP",
    ("model.positions", "none"): "removing positions",
    ("model.placement", "none"): "removing normalization",
    ("model.placement", "post"): "normalizing after the addition",
    ("model.placement", "pre"): "normalizing before each branch",
    ("model.placement", "sandwich"): "normalizing before and after each branch",
    ("model.placement", "branch_output"): "normalizing only the output of each branch",
    ("model.placement", "deepnorm"): "using DeepNorm",
    ("model.norm", "none"): "removing normalization",
    ("model.norm", "identity"): "removing normalization",
    ("model.residual", False): "removing residual connections",
}

_EFFECTS = {
    ("model.attention", "none"): "the attention sub-layer is left out; F is the MLP only",
    ("model.mlp", "none"): "the MLP sub-layer is left out; F is attention only",
    ("model.positions", "none"): "the equation stays; attention gets no positions",
    ("model.norm", "none"): "N, Q and P are all the identity",
    ("model.norm", "identity"): "N, Q and P are all the identity",
}


def lookup(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of a nested configuration.

    >>> lookup({"model": {"depth": 4}}, "model.depth")
    4
    """
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def effective(results: Results, cell: Cell) -> dict[str, Any]:
    """Return a cell's changes without its place on the x axis and without what is no change."""
    x_name = results.x["name"] if results.x else None
    config = results.plan.get("config") or {}
    return {
        path: value
        for path, value in cell.changes.items()
        if path.rsplit(".", 1)[-1] != x_name and lookup(config, path, _ABSENT) != value
    }


_ABSENT = object()


def series_changes(results: Results) -> dict[str, dict[str, Any]]:
    """Return the effective changes of each series (of its first cell)."""
    first: dict[str, dict[str, Any]] = {}
    for cell in results.cells:
        first.setdefault(cell.series, effective(results, cell))
    return first


def action(changes: Mapping[str, Any]) -> str | None:
    """Return what a set of changes does, as a gerund; None where a change has no known wording.

    >>> action({"model.attention": "none"})
    'removing attention'
    """
    phrases = [_ACTIONS.get((path, value)) for path, value in _hashable(changes)]
    if not phrases or None in phrases:
        return None
    return " and ".join(phrase for phrase in phrases if phrase)


def _hashable(changes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(k, tuple(v) if isinstance(v, list) else v) for k, v in changes.items()]


def removes(changes: Mapping[str, Any], what: str) -> bool:
    """Whether the only thing done is removing ``normalization`` or ``residual connections``."""
    return action(changes) == f"removing {what}"


def change_text(changes: Mapping[str, Any]) -> str:
    """Return changes as ``model.mlp = none``, comma-separated."""
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in changes.items()}
    return ", ".join(f"{path} = {value}" for path, value in shown.items())


def equation(placement: str, residual: bool = True) -> str | None:
    """Return the equation of a sub-layer for a placement; None for an unknown one.

    >>> equation("pre")
    'h′ = h + F(Norm(h))'
    >>> equation("post", residual=False)
    'h′ = Norm(F(h))'
    """
    scheme = SCHEMES.get(placement)
    if scheme is None:
        return None
    read = "Norm(h)" if scheme.read else "h"
    branch = f"F({scheme.c} {read})" if scheme.c else f"F({read})"
    if scheme.output:
        branch = f"Norm({branch})"
    if scheme.b:
        branch = f"{scheme.b} {branch}"
    total = f"{scheme.a} h + {branch}".strip() if residual else branch
    return f"h′ = Norm({total})" if scheme.stream else f"h′ = {total}"


def effect(results: Results, changes: Mapping[str, Any]) -> str:
    """Return what a variant changes in the equation of a sub-layer, as a phrase."""
    config = results.plan.get("config") or {}
    notes = [_EFFECTS[pair] for pair in _hashable(changes) if pair in _EFFECTS]
    if "model.placement" in changes or "model.residual" in changes or not changes:
        placement = changes.get("model.placement", lookup(config, "model.placement", ""))
        residual = bool(changes.get("model.residual", lookup(config, "model.residual", True)))
        form = equation(str(placement), residual)
        if form:
            notes.insert(0, form)
    known = {path for path, _ in _EFFECTS} | {"model.placement", "model.residual"}
    rest = {path: value for path, value in changes.items() if path not in known}
    if rest:
        notes.append(change_text(rest))
    return "; ".join(notes) if notes else change_text(changes)
