"""What a change of the configuration means: in words, in the equation, in the decoder.

The vocabulary of the report. What a placement or a norm is comes from the rows that the run folder
recorded (``DecoderConfig.record``), folded into words: no JAX, and nothing here knows one by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from normjax.equation import FACTORS, SLOTS, fold
from normjax.reporting.results import PlannedArm, Results

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
    ("model.residual", False): "removing residual connections",
    ("model.qk_norm", True): "normalizing queries and keys",
    ("model.qk_norm", False): "leaving queries and keys as they are",
    ("model.qk_norm_over", "head"): "taking the norm of queries and keys head by head",
    ("model.qk_norm_over", "heads"): "taking the norm of queries and keys over all heads",
    ("model.final_norm", "off"): "removing the final norm",
    ("model.final_norm", "on"): "keeping the final norm",
}

_EFFECTS = {
    ("model.attention", "none"): "the attention sub-layer is left out; F is the MLP only",
    ("model.mlp", "none"): "the MLP sub-layer is left out; F is attention only",
    ("model.positions", "none"): "the equation stays; attention gets no positions",
    ("model.final_norm", "off"): "the equation stays; the output layer reads h as it is",
    ("model.final_norm", "on"): "the output layer reads Norm(h)",
}
_ROWS = ("placement", "norm")
"""Fields of the model whose values are rows, with words and colours of their own."""

_RECORDED = {*SLOTS, *FACTORS, "read"}
"""What a branch's record must hold for its equation to be said."""

Rows = Mapping[str, Any]


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


def effective(results: Results, arm: PlannedArm) -> dict[str, Any]:
    """Return an arm's changes without its place on the x axis and without what is no change."""
    x_name = results.x["name"] if results.x else None
    config = results.plan.get("config") or {}
    return {
        path: value
        for path, value in arm.changes.items()
        if path.rsplit(".", 1)[-1] != x_name and lookup(config, path, _ABSENT) != value
    }


_ABSENT = object()


def series_changes(results: Results) -> dict[str, dict[str, Any]]:
    """Return the effective changes of each series (of its first arm)."""
    first: dict[str, dict[str, Any]] = {}
    for arm in results.arms:
        first.setdefault(arm.series, effective(results, arm))
    return first


def action(changes: Mapping[str, Any], rows: Rows) -> str | None:
    """Return what a set of changes does, as a gerund; None where a change has no known wording.

    >>> action({"model.attention": "none"}, {})
    'removing attention'
    """
    phrases: list[str | None] = []
    for path, value in changes.items():
        _, _, field = path.rpartition(".")
        shown = {"shown": lookup(rows, f"{field}.shown")} if field in _ROWS else {}
        said, title = (lookup(shown, f"shown.{name}") for name in ("action", "title"))
        own = said or (f"using {title}" if title else None)
        phrases.append(str(own) if own else _ACTIONS.get((path, _hashable(value))))
    if not phrases or None in phrases:
        return None
    return " and ".join(phrase for phrase in phrases if phrase)


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, (list, dict)) else value


def removes(changes: Mapping[str, Any], rows: Rows, what: str) -> bool:
    """Whether the only thing done is removing ``normalization`` or ``residual connections``."""
    return action(changes, rows) == f"removing {what}"


def change_text(changes: Mapping[str, Any]) -> str:
    """Return changes as ``model.mlp = none``, comma-separated."""
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in changes.items()}
    return ", ".join(f"{path} = {value}" for path, value in shown.items())


# --- the equation in words ------------------------------------------------------------------------


class _Words:
    """The algebra of words for ``equation.fold``: texts."""

    def norm(self, slot: str, norm: Any, x: str) -> str:
        return f"{_norm_word(norm)}({x})" if norm is not None else x

    def branch(self, x: str) -> str:
        return f"F({x})"

    def join(self, join: Any, x: str, read: str) -> str:
        return x if join is None else f"{join['word']}({x}, {read})"

    def times(self, name: str, factor: Any, x: str) -> str:
        return x if factor == 1 else f"{FACTORS[name]} {x}"

    def mix(self, name: str, weights: Any, state: str, x: str) -> str:
        if isinstance(weights, Mapping) and "word" in weights:
            return f"{weights['word']}({x})" if name == "read" else f"{weights['word']} {x}"
        if name == "read" or (name == "keep" and weights == 0):
            return x if name == "read" else ""
        return self.times(name, weights, x)

    def plus(self, kept: str, written: str) -> str:
        return f"{kept} + {written}" if kept else written


class _JacobianWords(_Words):
    """The same for the Jacobian; "" is the identity."""

    def norm(self, slot: str, norm: Any, x: str) -> str:
        return _product("DNorm", x) if norm is not None else x

    def branch(self, x: str) -> str:
        return _product("DF", x)

    def join(self, join: Any, x: str, read: str) -> str:
        if join is None:
            return x
        word = f"D{join['word']}"
        return f"({_product(f'{word}₁', x)} + {_product(f'{word}₂', read)})"

    def times(self, name: str, factor: Any, x: str) -> str:
        return x if factor == 1 else f"{FACTORS[name]} {x or 'I'}"

    def mix(self, name: str, weights: Any, state: str, x: str) -> str:
        if isinstance(weights, Mapping) and "word" in weights:
            return _product(f"D{weights['word']}", x)  # with what moves the weights, if any
        return super().mix(name, weights, state, x)

    def plus(self, kept: str, written: str) -> str:
        return f"{kept or 'I'} + {written}"


def _product(left: str, right: str) -> str:
    inner = f"({right})" if " + " in right else right
    return f"{left} · {inner}" if right else left


def _norm_word(norm: Any) -> str:
    return str((lookup(norm, "shown.title") if isinstance(norm, Mapping) else None) or "Norm")


def branch_rows(rows: Rows, branch: str) -> list[SimpleNamespace]:
    """Return what every block puts into the equation for a branch, "attention" or "mlp".

    Factors that differ between blocks stay as they are recorded: they have one letter.
    """
    own = lookup(rows, f"placement.{branch}")
    if not isinstance(own, Mapping) or not set(own) >= _RECORDED:
        return []
    own = {"join": None, **own}  # folders of older versions record none
    listed = {k: blocks for k in SLOTS if isinstance(blocks := lookup(own, f"{k}.blocks"), list)}
    return [
        SimpleNamespace(**{**own, **{k: blocks[block] for k, blocks in listed.items()}})
        for block in range(min(map(len, listed.values()), default=1))
    ]


def _said(rows: Rows, branch: str, algebra: _Words, state: str) -> str | None:
    """Return a branch's equation; where blocks differ, each form with the blocks that have it."""
    texts = [fold(row, state, algebra) for row in branch_rows(rows, branch)]
    if len(set(texts)) <= 1:
        return texts[0] if texts else None
    spans: list[list[Any]] = []
    for block, text in enumerate(texts, start=1):
        if spans and spans[-1][2] == text:
            spans[-1][1] = block
        else:
            spans.append([block, block, text])
    blocks = [f"{a}" if a == b else f"{a} to {b}" for a, b, _ in spans]
    return "; ".join(
        f"{span[2]} (block {where})" if span[0] == span[1] else f"{span[2]} (blocks {where})"
        for span, where in zip(spans, blocks, strict=True)
    )


def equation(rows: Rows) -> str | None:
    """Return the equation of a sub-layer from recorded rows; None where none are recorded.

    >>> none = {"read": None, "scale": 1, "keep": 1, "write": 1} | dict.fromkeys(SLOTS)
    >>> pre = none | {"pre_norm": "model"}
    >>> equation({"placement": {"attention": pre, "mlp": pre}})
    'h′ = h + F(Norm(h))'
    """
    return _both(rows, _Words(), "H" if lookup(rows, "placement.streams") else "h", "′ = ")


def jacobian(rows: Rows) -> str | None:
    """Return the Jacobian of a sub-layer in words, such as ``J = I + DF · DNorm``."""
    return _both(rows, _JacobianWords(), "", "J = ")


def _both(rows: Rows, algebra: _Words, state: str, sign: str) -> str | None:
    attention, mlp = (_said(rows, branch, algebra, state) for branch in ("attention", "mlp"))
    if attention is None or mlp is None:
        return None
    attention, mlp = f"{state}{sign}{attention}", f"{state}{sign}{mlp}"
    return attention if attention == mlp else f"attention: {attention}; MLP: {mlp}"


def effect(results: Results, changes: Mapping[str, Any], rows: Rows) -> str:
    """Return what a variant changes in the equation of a sub-layer, as a phrase."""
    known = [
        (path, value) for path, value in changes.items() if (path, _hashable(value)) in _EFFECTS
    ]
    notes = [_EFFECTS[path, _hashable(value)] for path, value in known]
    said = {path for path, _ in known}
    if "model.norm" in changes and lookup(rows, "norm.shown.action"):
        notes.append("N, Q and P are all the identity")
        said.add("model.norm")
    if "model.placement" in changes or "model.residual" in changes or not changes:
        form = equation(rows)
        notes[:0] = [form] if form else []
        said |= {"model.placement", "model.residual"} if form else set()
    rest = {path: value for path, value in changes.items() if path not in said}
    if rest:
        notes.append(change_text(rest))
    return "; ".join(notes) if notes else change_text(changes)


def colours(results: Results) -> dict[str, str]:
    """Return the colour of each series that has one of its own, the same on every page."""
    return {arm.series: arm.colour for arm in results.arms if arm.colour}
