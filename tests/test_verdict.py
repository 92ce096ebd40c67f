"""Runs judged: a planted fault is named with its place and step; a healthy run is let alone."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import run_folders

from normjax import configs
from normjax.diagnostics import bands, definitions, log, verdict
from normjax.diagnostics.bands import VerdictConfig
from normjax.diagnostics.events import DRIFT, IDLE, NON_FINITE, SKIPPED, SPIKE
from normjax.diagnostics.evidence import Evidence, Series, gather
from normjax.errors import UserError
from normjax.runs import grid
from normjax.runs.grid import Arm, ExperimentConfig
from normjax.runs.run_folder import RunWriter

L, S, H = 4, 2, 3
STEPS = (0, 1, 3, 10, 30, 100, 300, 999)
NORM, KERNEL = "mlp.pre_norm", "attention.branch.query.kernel"


def healthy(seed=0):
    """Samples of a run without fault: every diagnostic near a usual value, with some noise."""
    rng = np.random.default_rng(seed)
    usual = {
        "residual/rms_before": 1.0, "residual/rms_after": 1.2, "read/rms": 1.0, "branch/rms": 0.5,
        "branch/stream_ratio": 0.4, "residual/token_similarity": 0.3, "gradient/stream_rms": 0.02,
        "attention/logit_max": 8.0, "attention/logit_std": 1.0, "attention/collision_share": 0.6,
        "mlp/activation_rms": 0.4, "mlp/dead_share": 0.01, "loss/value": 2.5, "gradient/norm": 0.8,
        "loss/slope": -0.1, f"gain/max[{NORM}]": 1.4, f"gain/min[{NORM}]": 0.6,
        f"gradient/parameter_rms[{KERNEL}]": 1e-3, f"update/parameter_ratio[{KERNEL}]": 2e-3,
        "update/block_ratio": 2e-3,
    }  # fmt: skip
    size = {"layer": L, "sublayer": S, "head": H}
    samples = []
    for step in STEPS:
        values = {}
        for name, value in usual.items():
            axes = definitions.diagnostic(name).axes
            shape = () if axes == () else tuple(size[axis] for axis in axes)
            values[name] = np.asarray(value * np.exp(0.02 * rng.standard_normal(shape)))
        samples.append((step, values))
    return samples


def judged(samples, config=VerdictConfig(), **more):  # noqa: B008
    return verdict.judge(Evidence(gather(samples), state="done", **more), config)


def plant(samples, name, where, value, since=0, until=10**9):
    """Set a place of a diagnostic from one step to another."""
    for step, values in samples:
        if since <= step <= until:
            values[name][where] = value(step) if callable(value) else value
    return samples


def test_a_healthy_run_is_called_so():
    for seed in range(5):
        found = judged(healthy(seed))
        assert (found.state, found.events) == ("well behaved", ())
        # Samples do not tell what a part does at all steps, nor a loss without references.
        assert found.sentence.startswith("Well behaved. Not judged: written / stream (every step)")
        assert "whether it learned (the unigram loss of the test text)" in found.unjudged


@pytest.mark.parametrize(
    ("last", "state", "says"),
    [(1.9, "well behaved", False), (2.01, "well behaved", True), (2.9, "not learning", False)],
)
def test_a_loss_is_held_against_both_references(last, state, says):
    """Below the unigram loss a run learned; not below the bigram loss, it is said how little."""
    at = np.array([0, 500, 1000])
    found = judged(
        healthy(), steps=1000, references={"unigram": 2.8, "bigram": 2.05},
        metrics={"validation/loss": Series("validation/loss", at, np.array([3.5, last, last])),
                 "test/loss": Series("test/loss", at[-1:], np.array([last]))},
    )  # fmt: skip
    assert found.state == state
    assert ("which token follows which" in found.sentence) is says


# fault: (diagnostic, index, value, since, expected step, layer, sub-layer, head, factor)
FAULTS = {
    "a scaled branch": ("branch/stream_ratio", (2, 1), 6000.0, 0, 0, 3, "mlp", None, 20.0),
    "a runaway gain": (
        f"gain/max[{NORM}]", (1,), lambda step: 1 + step / 10, 0, 100, 2, None, None, 1.1,
    ),
    "entropy collapse": ("attention/collision_share", (3, 1), 1e-8, 30, 30, 4, None, 2, 10.0),
    "rank collapse": ("residual/token_similarity", (1, 0), 0.999, 100, 100, 2, "attention", None,
                      0.999 / 0.99),
    "logits grow": ("attention/logit_max", (0, 2), lambda step: 8.0 + 10.0 * step, 0, 100, 1, None,
                    3, 1.008),
    "the stream overflows": ("residual/rms_before", (3, 1), 3e4, 300, 300, 4, "mlp", None, 3.0),
    "the stream vanishes": (
        "residual/rms_before", (3, 0), 1e-7, 300, 300, 4, "attention", None, 10.0,
    ),
    "steps too large": ("update/block_ratio", (1, 0), 0.6, 3, 3, 2, "attention", None, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_drift_is_named_first(fault):
    name, where, value, since, step, layer, sublayer, head, factor = FAULTS[fault]
    found = judged(plant(healthy(), name, where, value, since))
    first = found.first
    assert (found.state, first.kind) == ("drifting", DRIFT)
    assert (first.diagnostic, first.step) == (name, step)
    assert (first.layer, first.sublayer, first.head) == (layer, sublayer, head)
    if factor is not None:
        assert first.factor == pytest.approx(factor, rel=1e-12)
    assert first.reason
    for word in (verdict.title(name), f"step {step}", f"block {layer}"):
        assert word in found.sentence


def test_a_branch_may_be_compared_with_the_median_of_the_other_layers():
    samples = plant(healthy(), "branch/rms", (2, 1), 5000.0)
    others = [samples[0][1]["branch/rms"][i, 1] for i in (0, 1, 3)]
    first = judged(samples, VerdictConfig(bands=("branch/rms::100:layers",))).first
    assert first.factor == pytest.approx(5000 / np.median(others) / 100, rel=1e-12)


def test_a_stream_that_shrinks_after_the_warmup_drifts():
    samples = healthy()
    for step, values in samples:
        values["residual/rms_after"][1, 0] = 4.0 if step < 300 else 0.2
    first = judged(samples, warmup=10).first
    assert (first.diagnostic, first.step, first.layer) == ("residual/rms_after", 300, 2)
    assert first.below and first.factor == pytest.approx(2.0, rel=1e-12)


def test_units_that_are_dead_are_an_idle_part():
    found = judged(plant(healthy(), "mlp/dead_share", (2,), 0.95, 10))
    assert (found.state, found.first.kind, found.first.layer) == ("idle part", IDLE, 3)


def test_one_sample_outside_is_enough():
    found = judged(plant(healthy(), "attention/logit_max", (1, 0), 5e3, 10, 30))
    assert found.state == "drifting"
    (event,) = found.events
    assert (event.kind, event.step, event.until) == (DRIFT, 10, 30)
    assert (event.layer, event.head, event.factor) == (2, 1, 5.0)


def test_more_samples_never_improve_a_verdict():
    """Whatever is measured: the states of nested sets of samples only become graver."""
    grave = [state for state in verdict.STATES if state != "unknown"]
    rng = np.random.default_rng(0)
    for seed in range(60):
        samples = healthy(seed)
        for _ in range(rng.integers(0, 4)):
            step, values = samples[rng.integers(len(samples))]
            name = rng.choice([n for n in values if n != "loss/slope"])
            at = tuple(rng.integers(n) for n in values[name].shape)
            values[name][at] *= rng.choice([np.nan, 1e-8, 1e-3, 0.05, 20.0, 1e3, 1e8])
        states = []
        for count in range(1, len(samples) + 1):
            order = np.random.default_rng(seed).permutation(len(samples))
            some = [samples[i] for i in sorted(order[:count])]
            states.append(grave.index(judged(some, warmup=2).state))
        assert states == sorted(states), (seed, states)


def test_growth_is_measured_from_the_end_of_the_warmup():
    samples = healthy()
    for step, values in samples:
        values["gradient/norm"][...] = {0: 500.0, 1: 400.0, 3: 100.0}.get(step, 0.5)
        if step == 999:
            values["gradient/norm"][...] = 75.0
    # Against its first value it only falls; against those after warm-up it is 150 times as large.
    first = judged(samples, warmup=10).first
    assert (first.diagnostic, first.step) == ("gradient/norm", 999)
    assert first.factor == pytest.approx(1.5, rel=1e-12)
    found = judged(samples, warmup=2000)
    assert found.events == ()
    assert "gradient norm (the end of the warm-up and a later step)" in found.unjudged


def test_the_smaller_step_is_first_then_the_order_of_computation():
    samples = plant(healthy(), "mlp/dead_share", (0,), 0.95, 10)
    samples = plant(samples, f"gain/max[{NORM}]", (3,), 50.0, 30)
    assert judged(samples).first.diagnostic == "mlp/dead_share"
    samples = healthy()
    faults = [
        (f"gain/max[{NORM}]", (3,), 50.0), ("branch/stream_ratio", (0, 0), 900.0),
        ("attention/logit_max", (1, 0), 2e3), ("attention/logit_max", (2, 0), 2e3),
        ("branch/stream_ratio", (2, 1), 900.0), ("gradient/stream_rms", (2, 0), 1e6),
        ("gradient/stream_rms", (0, 1), 1e6), ("update/block_ratio", (0, 0), 1.0),
    ]  # fmt: skip
    for name, where, value in reversed(faults):
        plant(samples, name, where, value, 10)
    found = judged(samples, VerdictConfig(bands=("gradient/stream_rms::1000:layers",)))
    assert [e.diagnostic for e in found.events] == [
        f"gain/max[{NORM}]", "branch/stream_ratio", "attention/logit_max", "gradient/stream_rms",
        "update/block_ratio",
    ]  # fmt: skip
    # Forward the layer nearest the input comes first, backward the one nearest the output.
    assert [e.layer for e in found.events] == [4, 1, 2, 3, 1]
    assert found.events[1].places == 2 and found.events[2].of == L * H


def test_a_spike_of_the_evaluations_is_unstable():
    norms = [1.0, 1.1, 0.9, 400.0, 1.0]
    series = Series("gradient/norm", np.arange(5) * 100, np.array(norms))
    found = judged(healthy(), metrics={"gradient/norm": series})
    assert (found.state, found.first.kind, found.first.step) == ("unstable", SPIKE, 300)
    assert found.first.factor == 400.0 and "running median" in found.sentence
    # What rises at the end has not come back: no spike.
    series = Series("gradient/norm", np.arange(4) * 100, np.array(norms[:4]))
    assert judged(healthy(), metrics={"gradient/norm": series}).state == "well behaved"


def test_a_nan_in_one_layer_is_an_event_of_its_own():
    samples = plant(healthy(), "residual/rms_after", (2, 0), np.nan, 30, 30)
    found = judged(samples)
    (event,) = found.events
    assert (found.state, event.kind, event.diagnostic) == (
        "unstable",
        NON_FINITE,
        "residual/rms_after",
    )
    assert (event.step, event.layer, event.sublayer, event.value) == (30, 3, "attention", None)
    assert (event.places, event.of, event.until) == (1, L * S, 30)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_sample_that_is_not_finite_changes_no_other_event(bad):
    samples = plant(healthy(), "attention/collision_share", (3, 1), 1e-8, 30)
    samples = plant(samples, f"gain/max[{NORM}]", (1,), lambda step: 1 + step / 10)
    samples = plant(samples, "branch/stream_ratio", (2, 1), 5000.0)
    others = judged(samples).events
    assert len(others) == 3
    # A whole step is lost: not the first one of any event, nor the one it is measured against.
    for _, values in (sample for sample in samples if sample[0] == 3):
        for value in values.values():
            value[...] = bad
    found = judged(samples)
    assert [e for e in found.events if e.kind != NON_FINITE] == list(others)
    lost = {e.diagnostic for e in found.events if e.kind == NON_FINITE}
    free = ("update/parameter_ratio", "branch/stream_ratio")
    assert lost == {name for name in samples[0][1] if not name.startswith(free)}


def test_a_diagnostic_without_any_number_is_reported():
    found = judged(plant(healthy(), "mlp/dead_share", ..., np.nan))
    (event,) = found.events
    assert event.kind == NON_FINITE and "no finite value" in event.reason
    assert "no finite value" in found.sentence


def test_an_infinite_update_ratio_says_that_a_parameter_is_zero():
    name = "update/parameter_ratio[mlp.pre_norm.gain]"
    samples = healthy()
    for step, values in samples:
        values[name] = np.full(L, np.inf if step == 0 else 0.01)
    assert judged(samples).events == ()


# --- folders --------------------------------------------------------------------------------------


def folder(path, samples=(), state="done", losses=(), **status):
    """A run folder with diagnostics, metrics and a status."""
    lines = [
        {"step": step, "train/loss": loss, "validation/loss": loss, "gradient/norm": norm,
         "update/skipped": skipped} for step, loss, norm, skipped in losses
    ]  # fmt: skip
    if lines:
        lines[-1]["test/loss"] = lines[-1]["validation/loss"]
    config = {"model": {"attention": "softmax", "mlp": "gelu"}, "train": {"warmup_steps": 2}}
    run_folders.write(path, lines, record=config, samples=samples, state=state, **status)
    return path


def test_what_is_missing_is_no_evidence(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        found = verdict.judge_run(path)
        assert (found.state, found.basis, found.events) == ("unknown", "nothing", ())


def test_judged_from_losses_alone_it_says_so(tmp_path):
    losses = [(step, 3.0 - step / 500, 1.0, 0) for step in range(0, 600, 100)]
    found = verdict.judge_run(folder(tmp_path / "a", losses=losses))
    assert (found.state, found.basis) == ("well behaved", "metrics")
    assert "no diagnostics were measured" in found.sentence
    # A gradient norm of 300 times the median for once, then three updates that were skipped.
    losses[3] = (300, 2.4, 300.0, 0)
    losses[4:] = [(400, 2.2, 1.0, 3), (500, 2.0, 1.0, 3)]
    found = verdict.judge_run(folder(tmp_path / "b", losses=losses))
    assert found.state == "unstable"
    assert [(e.kind, e.step) for e in found.events] == [
        (DRIFT, 300), (SPIKE, 300), (SKIPPED, 400),
    ]  # fmt: skip
    assert found.events[1].factor == 300.0 and "3 updates" in found.events[2].reason


def test_diverged_is_what_the_status_says(tmp_path):
    samples = plant(healthy(), "attention/logit_max", (1, 0), 5e4, 100)
    for step, values in samples:
        if step > 300:
            for value in values.values():
                value[...] = np.nan
    path = folder(tmp_path, samples, "diverged", diverged_at=250)
    found = verdict.judge_run(path)
    assert found.state == "diverged"
    assert (found.first.diagnostic, found.first.step, found.first.layer) == (
        "attention/logit_max", 100, 2,
    )  # fmt: skip
    assert found.sentence.startswith("Diverged at step 250: first largest logit at step 100")


def test_no_finite_loss_at_the_end_is_a_divergence(tmp_path):
    losses = [(0, 4.0, None, 0), (100, 3.0, 1.0, 0), (200, None, None, 0)]
    path = folder(tmp_path, losses=losses, steps=200)
    assert verdict.judge_run(path).state == "diverged"


def test_the_written_diagnostics_give_the_same_verdict(tmp_path):
    samples = plant(healthy(), "attention/collision_share", (3, 1), 1e-8, 30)
    path = folder(tmp_path, samples)
    found = verdict.judge_run(path)
    assert found.events == judged(samples).events
    verdict.write(path, found)
    record = json.loads((path / verdict.FILE).read_text())
    assert record["state"] == "drifting" and record["basis"] == "diagnostics"
    assert record["events"][0]["layer"] == 4 and record["events"][0]["head"] == 2
    assert found == verdict.judge_run(path)


def test_damaged_lines_are_passed_over(tmp_path):
    samples = plant(healthy(), "attention/collision_share", (3, 1), 1e-8, 30)
    path = folder(tmp_path, samples)
    expected = verdict.judge_run(path)
    foreign = ({"step": 2, "values": {"residual/rms_after": [[1.0, 2.0], [3.0]]}},
               {"step": 5, "values": {"residual/rms_after": [1.0, 2.0], "of/the_future": 3}},
               {"step": 7})  # fmt: skip
    run = RunWriter(path)
    for line in foreign:
        run.append(log.FILE, line)
    run.commit()
    with open(path / log.FILE, "a") as file:
        file.write('nonsense\n{"step": 2000, "va')
    assert verdict.judge_run(path) == expected
    content = bytearray((path / log.FILE).read_bytes())
    content[len(content) - 60] ^= 1  # in a line of no value: the others still count
    (path / log.FILE).write_bytes(content)
    assert verdict.judge_run(path).events == expected.events


def test_a_sublayer_axis_of_one(tmp_path):
    samples = [(s, {"residual/token_similarity": np.full((3, 1), 0.999)}) for s in (0, 1)]
    path = folder(tmp_path, samples)
    run_folders.write(path, record={"model": {"attention": "none", "mlp": "gelu"}})
    first = verdict.judge_run(path).first
    assert (first.layer, first.sublayer, first.places) == (1, "mlp", 3)


# --- bands ----------------------------------------------------------------------------------------


def test_bands_can_be_changed():
    samples = healthy()
    assert judged(samples, VerdictConfig(bands=("attention/logit_max::5",))).state == "drifting"
    wide = VerdictConfig(bands=("attention/collision_share::",))
    planted = plant(healthy(), "attention/collision_share", (3, 1), 1e-8, 30)
    assert judged(planted, wide).state == "well behaved"
    growth = VerdictConfig(bands=("residual/rms_after::3:start",))
    first = judged(plant(samples, "residual/rms_after", (1, 0), 6.0, 300), growth).first
    assert (first.step, first.layer, first.against) == (300, 2, "start")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention/logit_max", "must be name:low:high"),
        ("attention/logit_max:1:2:start:3", "must be name:low:high"),
        ("attention/logitmax::5", "did you mean 'attention/logit_max'?"),
        ("zzz::5", "there is no diagnostic zzz"),
        ("loss/value:a:5", "bounds must be numbers"),
        ("loss/value:5:1", "low must be below high"),
        ("loss/value:nan:1", "low must be below high"),
        ("loss/value::5:layer", "did you mean 'layers'?"),
    ],
)
def test_a_bad_band_is_one_line(text, words):
    with pytest.raises(UserError) as error:
        bands.adjusted((text,))
    assert str(error.value).startswith(f"config.verdict.bands={text}: ") and words in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_a_grid_refuses_what_cannot_be_judged_by_before_it_runs():
    config = configs.replace(ExperimentConfig(), {"verdict.bands": ("loss/value:5:1",)})
    with pytest.raises(
        UserError, match=r"config\.verdict\.bands=loss/value:5:1: low must be below"
    ):
        grid.check(config, [], 1)
    # How runs are judged is no part of what they are: the same runs, judged anew.
    arms = [Arm("full", "full", "", {})]
    names = [
        [run.id for cohort in grid.plan(each, arms, "text") for run in cohort.runs]
        for each in (config, ExperimentConfig())
    ]
    assert names[0] == names[1]


def test_a_bad_spike_factor_is_one_line():
    with pytest.raises(
        UserError, match=r"config\.verdict\.loss_spike=1\.0: must be above 1 and at most"
    ):
        configs.check(VerdictConfig(loss_spike=1.0), "config.verdict")


def test_every_band_has_a_reason_and_a_source_and_reads_back():
    for band in bands.BANDS:
        assert band.diagnostic in definitions.DIAGNOSTICS and band.reason and band.source
        assert band.against in bands.AGAINST and band.low < band.high
        # Bounded on both sides, unless a reason stands beside it.
        assert bool(band.one_sided) == bool(np.isinf(band.low) or np.isinf(band.high))
        again = bands.parse(band.text)
        own = {name: getattr(band, name) for name in (
            "reason", "source", "kind", "always", "one_sided", "blamed",
        )}  # fmt: skip
        assert dataclasses.replace(again, **own) == band
