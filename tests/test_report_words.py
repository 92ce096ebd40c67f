"""The sentences of a report say what the numbers say, and how sure they are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import report_workdirs

from normjax.equation import MODEL_NORM, Sublayer
from normjax.placement import Placement
from normjax.placements import COMMON, PLACEMENTS
from normjax.reporting import drawing, effects, explanations, findings, loading, trends, wording
from normjax.reporting.results import Results


def _grid(workdir: Path, losses: dict[str, list[float | None]]) -> Results:
    """A grid without an x axis."""
    changes = {name: row[2] for name, row in report_workdirs.ABLATION.items()}
    arms = [report_workdirs.arm(n, n, "", changes.get(n, {"train.batch": 1})) for n in losses]
    return report_workdirs.finals(workdir, arms, losses)


def _sweep(workdir: Path, losses: dict[str, dict[int, list[float | None]]]) -> Results:
    """A grid over depth."""
    arms = [
        report_workdirs.arm(
            f"{name}-{x}", "", "", {"model.depth": x, **report_workdirs.DEPTH[name][0]},
            series=name, x=x,
        )
        for name, points in losses.items() for x in points
    ]  # fmt: skip
    ends = {f"{name}-{x}": each for name, points in losses.items() for x, each in points.items()}
    axis = {"name": "depth", "label": "depth", "scale": "log2"}
    return report_workdirs.finals(workdir, arms, ends, baseline="pre", x=axis)


def _text(results) -> str:
    said = findings.warnings(results)
    said += trends.answer(results)
    return "\n".join(finding.text for finding in said).replace("\u00a0", " ")


FULL = [1.90, 1.92, 1.94]


def crossings(results: Results):
    every = trends.lines(results)
    return trends.crossings(every, trends.compare(results, every))


def _plus(*gaps: float) -> list[float]:
    return [loss + gap for loss, gap in zip(FULL, gaps, strict=True)]


def test_worst_better_and_undecided(tmp_path):
    losses = {
        "full": FULL,
        "no-attention": _plus(0.50, 0.51, 0.52),
        "no-mlp": _plus(0.20, 0.21, 0.22),
        "no-positions": _plus(-0.03, 0.01, 0.03),
        "post-norm": _plus(-0.05, -0.051, -0.049),
    }
    text = _text(_grid(tmp_path, losses))
    assert "Removing attention (no-attention) hurts most: +0.510 ± 0.025 nats." in text
    assert "cost more than another variant: no-attention more than" in text
    assert "Shown to be better than full: post-norm −0.050" in text
    undecided = next(line for line in text.splitlines() if "Not decided against full" in line)
    assert "no-positions" in undecided and "no-mlp" not in undecided
    assert "no proof of equality" in undecided and "--config.grid.seeds=6" in undecided
    assert "10 comparisons are made here" in text and "Holm" in text
    assert "Seen with one initialization" in text and "an order may be theirs" in text
    assert "No run diverged" in text


def test_largest_difference_within_its_noise_is_not_called_a_harm(tmp_path):
    text = _text(_grid(tmp_path, {"full": FULL, "no-mlp": _plus(-0.2, 0.1, 0.4)}))
    assert "hurts most" not in text and "Not decided against full: no-mlp +0.100" in text


def test_nothing_worse(tmp_path):
    text = _text(_grid(tmp_path, {"full": FULL, "no-mlp": _plus(-0.2, -0.21, -0.2)}))
    assert "hurts most" not in text and "Shown to be better than full: no-mlp −0.203" in text


def test_what_is_less_than_the_digits_shown_is_not_called_a_difference(tmp_path):
    text = _text(_grid(tmp_path, {"full": FULL, "no-mlp": _plus(1e-4, 1.0001e-4, 1e-4)}))
    assert "hurts most" not in text and "Not decided against full: no-mlp +0.000" in text


def test_the_worst_is_named_only_where_it_is_shown_to_be_worse_than_each_other(tmp_path):
    close = {"full": FULL, "no-attention": _plus(0.50, 0.51, 0.52),
             "no-mlp": _plus(0.52, 0.50, 0.51)}  # fmt: skip
    text = _text(_grid(tmp_path, close))
    assert "hurts most is not decided between removing attention" in text
    assert "Order not decided: no-attention and no-mlp" in text


def test_survivors_do_not_decide(tmp_path):
    """Two of three diverged: the mean of the third, however low, is no better outcome."""
    results = _grid(tmp_path, {"full": FULL, "no-mlp": [None, None, 1.2],
                               "no-attention": _plus(0.1, 0.1, 0.1)})  # fmt: skip
    ranks = {v.arm.name: v.rank for v in results.variants}
    assert ranks == {"full": 1, "no-attention": 2, "no-mlp": 3}
    text = _text(results)
    assert "better" not in text.replace("counting", "")
    assert "2 of 3 runs diverged" in text


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_outcomes(tmp_path, seed):
    """Relabelling seeds changes nothing, and one more diverged seed never helps."""
    rng = random.Random(seed)

    def losses():
        return [None if rng.random() < 0.3 else rng.gauss(2, 0.2) for _ in range(4)]

    every = {"full": FULL + [1.93], "no-mlp": losses(), "no-attention": losses(),
             "no-norm": losses()}  # fmt: skip

    def ranks(name, ends):
        found = _grid(tmp_path / name, ends)
        kinds = {n: [e.kind for e in own.values()]
                 for n, own in effects.compare(found).by_series.items()}  # fmt: skip
        return {v.arm.name: v.rank for v in found.variants}, kinds

    order = rng.sample(range(4), 4)
    turned = {name: [own[i] for i in order] for name, own in every.items()}
    before, kinds = ranks("a", every)
    assert ranks("b", turned) == (before, kinds)
    worse, _ = ranks("c", every | {"no-mlp": [*every["no-mlp"], None], "full": [*FULL, 1.93, 1.9]})
    others = [n for n in ("no-attention", "no-norm") if before[n] < before["no-mlp"]]
    assert all(worse[n] < worse["no-mlp"] for n in others)


def test_effects_that_turn_with_the_condition(tmp_path):
    """What is worse with one initialization and not with the other is not said of both."""
    arms = [
        report_workdirs.arm(f"{n}-{c}", n, "", report_workdirs.ABLATION[n][2], series=n,
                            condition=f"init {c}", setting={"model.init": c})
        for c in ("gpt2", "fan_in") for n in ("full", "no-norm", "no-mlp")
    ]  # fmt: skip
    results = report_workdirs.finals(tmp_path, arms, {
        "full-gpt2": FULL, "no-norm-gpt2": _plus(0.5, 0.51, 0.49),
        "no-mlp-gpt2": _plus(0.2, 0.21, 0.19),
        "full-fan_in": FULL, "no-norm-fan_in": _plus(0.1, 0.11, 0.09),
        "no-mlp-fan_in": _plus(0.2, 0.21, 0.19),
    })  # fmt: skip
    text = _text(results)
    assert "hurts most is not decided between" in text
    assert "under both conditions (init gpt2, init fan_in)" in text
    assert "In an order that turns with the condition: no-norm and no-mlp" in text
    assert {v.label: v.rank for v in results.variants}["no-norm, init fan_in"] == 2
    assert _at_one_condition_only(tmp_path / "b") == ""


def _at_one_condition_only(folder):
    arms = [report_workdirs.arm(f"full-{c}", "full", "", {}, series="full", condition=c)
            for c in ("a", "b")]  # fmt: skip
    arms.append(report_workdirs.arm("no-mlp-a", "no-mlp", "", {"model.mlp": "none"},
                                    series="no-mlp", condition="a"))  # fmt: skip
    losses = {"full-a": FULL, "full-b": FULL, "no-mlp-a": _plus(0.5, 0.5, 0.5)}
    return effects.compare(report_workdirs.finals(folder, arms, losses)).agreed("no-mlp")


@pytest.mark.parametrize(
    ("residual", "norm", "expected"),
    [
        (_plus(0.5, 0.5, 0.51), _plus(0.1, 0.1, 0.1), "Removing residual connections hurts more"),
        (_plus(0.1, 0.1, 0.1), _plus(0.5, 0.5, 0.51), "Removing normalization hurts more"),
        (_plus(0.1, 0.4, 0.1), _plus(0.2, 0.2, 0.1), "Not decided: removing residual"),
        ([None] * 3, _plus(0.5, 0.5, 0.5), "every run without residual connections diverged"),
        (_plus(0.5, 0.5, 0.5), [None] * 3, "Removing normalization hurts more: every run"),
        ([None] * 3, [None] * 3, "Every run diverged without either"),
        ([None, 2.5, 2.5], _plus(0.1, 0.1, 0.1), "1 of 3 runs diverged, without normalization 0"),
        ([2.5, None, None], _plus(0.1, 0.1, 0.1), "one pair decides nothing"),
    ],
)
def test_residual_or_norm(tmp_path, residual, norm, expected):
    results = _grid(tmp_path, {"full": FULL, "no-residual": residual, "no-norm": norm})
    (finding,) = findings.residual_or_norm(
        results, wording.representatives(results), effects.compare(results).tells_apart
    )
    assert expected in finding.text


def test_residual_or_norm_is_silent_without_both_arms(tmp_path):
    results = _grid(tmp_path, {"full": FULL, "no-norm": FULL})
    assert (
        findings.residual_or_norm(
            results, wording.representatives(results), effects.compare(results).tells_apart
        )
        == []
    )


def test_divergence_is_said_with_seed_and_step(tmp_path):
    text = _text(_grid(tmp_path, {"full": FULL, "no-norm": [None, 2.0, 2.1], "no-mlp": [None] * 3}))
    assert "Every run diverged with removing the MLP (no-mlp)" in text
    assert "no-norm: 1 of 3 (seed 0 at step 7)" in text and "flatter" in text


def test_baseline_that_diverged(tmp_path):
    text = _text(_grid(tmp_path, {"full": [None] * 3, "no-mlp": FULL}))
    assert "no finished run of the baseline (full)" in text


@pytest.mark.parametrize(("seeds", "expected"), [(1, "no interval"), (2, "12.7 standard errors")])
def test_few_seeds_are_said_first(tmp_path, seeds, expected):
    results = _grid(tmp_path, {"full": FULL[:seeds], "no-mlp": [2.5, 2.6][:seeds]})
    assert expected in findings.warnings(results)[0].text
    if seeds == 1:
        assert "without an interval" in _text(results) and "±" not in _text(results)


def test_counting_characters_as_reference(tmp_path):
    text = _text(_grid(tmp_path, {"full": FULL, "no-attention": [3.30, 3.32, 3.31]}))
    line = next(line for line in text.splitlines() if "counting characters" in line)
    assert "no-attention (3.310)" in line and "full" not in line
    assert "3.310 nats on the same text; guessing all alike, 4.431" in text


def test_rates_name_the_edge(tmp_path):
    results = loading.load(report_workdirs.ablation(tmp_path, seeds=2, rates=(0.001, 0.003)))
    text = _text(results)
    assert "full, learning rate 0.003" in text and "edge of what was tried" in text


def test_trend_crossing_and_divergence_along_x(tmp_path):
    results = _sweep(tmp_path, {
        "pre": {2: FULL, 4: FULL, 8: FULL},
        "post": {2: _plus(-0.1, -0.1, -0.11), 4: _plus(-0.1, 0.1, 0.01), 8: _plus(0.3, 0.3, 0.31)},
        "none": {2: _plus(0.02, 0.02, 0.021), 4: _plus(0.1, 0.1, 0.1), 8: [None] * 3},
    })  # fmt: skip
    text = _text(results)
    assert "At depth 8, every run of none diverged" in text
    assert "2 to 8 blocks, " in text and "an order may be theirs" in text
    assert "post lies furthest above pre, by +0.303" in text
    assert "at depth 2 post (1.817)" in text
    assert "It rises from depth 2 to 8, by 0.407" in text
    (crossing,) = (c for c in crossings(results) if "pre" in c[:2])
    assert crossing == ("post", "pre", 2.0, 8.0, True)


def test_crossing_within_noise_is_not_clear(tmp_path):
    post = {2: _plus(-0.3, 0.1, 0.1), 4: _plus(0.3, -0.1, -0.1)}
    results = _sweep(tmp_path, {"pre": {2: FULL, 4: FULL}, "post": post})
    (crossing,) = crossings(results)
    assert not crossing.clear
    assert "within the noise" in _text(results)


ONE_STREAM = [name for name in COMMON if PLACEMENTS[name].streams is None]


def recorded(row):
    """A placement as a page reads it."""
    return {"placement": json.loads(json.dumps(row.record(8)))}


@pytest.mark.parametrize("name", ONE_STREAM)
@pytest.mark.parametrize("residual", [True, False])
def test_printed_equation_computes_the_equation(name, residual):
    """Evaluate the printed text and the equation h' = P(a S(h) + b Q(F(c N(h)))) on numbers."""
    place = PLACEMENTS[name] if residual else PLACEMENTS[name].without_residual()
    h, a, b, c = 1.7, 1.3, 0.7, 0.4

    def norm(v: float) -> float:
        return v / (1 + abs(v))

    def branch(v: float) -> float:
        return 2 * v + 0.1

    text = explanations.equation(recorded(place))
    each = text.split("; ") if "; " in text else [text, text]
    for kind, said in zip(("attention", "mlp"), each, strict=True):
        row = place.of(kind).at(3, 8)

        def maybe(slot: str, v: float, row=row) -> float:
            return v if getattr(row, slot) is None else norm(v)

        def weight(name: str, letter: float, row=row) -> float:
            factor = getattr(row, name)
            return factor if factor in (0, 1) else letter

        out = maybe("branch_norm", branch(weight("scale", c) * maybe("pre_norm", h)))
        total = weight("keep", a) * maybe("skip_norm", h)
        expected = maybe("post_norm", total + (b if row.write != 1 else 1) * out)
        formula = said.split("=", 1)[1].strip()
        for factor in "abc":
            formula = formula.replace(f"{factor} ", f"{factor} * ")
        names = {"Norm": norm, "F": branch, "h": h, "a": a, "b": b, "c": c}
        found = eval(formula, {"__builtins__": {}}, names)
        assert found == pytest.approx(expected, rel=1e-14), said


def test_words_of_streams_and_of_blocks_that_differ():
    said = {name: explanations.equation(recorded(PLACEMENTS[name]))
            for name in ("hyper_connections", "attention_residuals")}  # fmt: skip
    assert said == {
        "hyper_connections": "H′ = A H + b F(Norm(r(H)))",
        "attention_residuals": "H′ = H + append F(Norm(softmax(H)))",
    }
    half = Placement("half", "here", Sublayer(
        pre_norm=MODEL_NORM, post_norm=lambda block, depth: MODEL_NORM if block > 6 else None
    ))  # fmt: skip
    assert explanations.equation(recorded(half)) == (
        "h′ = h + F(Norm(h)) (blocks 1 to 6); Norm(h + F(Norm(h))) (blocks 7 to 8)"
    )


def test_jacobians_in_words():
    streams = explanations.jacobian(recorded(PLACEMENTS["hyper_connections"]))
    assert streams == "J = DA + Db · DF · DNorm · Dr"
    said = {name: explanations.jacobian(recorded(PLACEMENTS[name])) for name in ONE_STREAM[:4]}
    assert said == {
        "pre": "J = I + DF · DNorm", "post": "J = DNorm · (I + DF)", "none": "J = I + DF",
        "sandwich": "J = I + DNorm · DF · DNorm",
    }  # fmt: skip


def test_spread_keeps_order_distance_and_mean():
    rng = random.Random(3)
    for _ in range(50):
        wanted = [rng.gauss(0, 1) for _ in range(rng.randint(1, 9))]
        placed = drawing.spread(wanted, 0.5, -100, 100)
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        gaps = [placed[b] - placed[a] for a, b in zip(order, order[1:], strict=False)]
        assert all(gap >= 0.5 - 1e-9 for gap in gaps)
        assert sum(placed) == pytest.approx(sum(wanted))
    assert drawing.spread([0.0, 5.0], 0.5, -100, 100) == [0.0, 5.0]
    assert drawing.spread([0.1, 0.1, 0.1], 1.0, 0.0, 10.0) == [0.0, 1.0, 2.0]
