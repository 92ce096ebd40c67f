"""The claims: all hold, at more than one size; what is broken is found; files, page, exit codes."""

import csv
import dataclasses
import io
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import (
    attention_claims,
    block_claims,
    depth_claims,
    experiment,
    norm_claims,
    page,
    setting,
    taylor,
    vectors,
)
from experiments.claims.claim import EPS, Check, Claim, Tolerance, digits, exact, rounding
from experiments.claims.setting import ClaimsConfig, Point
from normjax import decoder, equation, layers, norms, placements
from normjax.errors import UserError
from normjax.runs import measuring

SMALL = Point(seed=3, width=8, heads=2, tokens=3)
IDS = [f"A{n}" for n in range(1, 24)]


@pytest.fixture(scope="module")
def computed():
    """Every claim at a small size, once for all tests that only read them."""
    return experiment.compute(ClaimsConfig(SMALL))


def failing(function, point=SMALL):
    """Parts that do not hold, of a claim computed now.

    Programs traced before must not be used while something is replaced, nor the other way round.
    """
    compiled = function not in (*vectors.CLAIMS, *norm_claims.CLAIMS)
    if compiled:
        jax.clear_caches()
    try:
        claim = measuring.in_64_bits(function, point)
    finally:
        if compiled:
            jax.clear_caches()
    return [name for name, check in claim.parts() if not check.holds]


# --- the claims -----------------------------------------------------------------------------------


def test_every_claim_is_there_and_holds(computed):
    assert [claim.id for claim in computed] == IDS == list(experiment.IDS)
    wrong = [(name, check) for claim in computed for name, check in claim.parts()
             if not check.holds]  # fmt: skip
    assert not wrong
    assert all(claim.checks and claim.statement.endswith((".", ")")) for claim in computed)


def test_parts_have_ids_of_their_own(computed):
    names = [name for claim in computed for name, _ in claim.parts()]
    assert len(set(names)) == len(names) > 90
    assert {name.rstrip("abcdefghijklmnop") for name in names} == set(IDS)


def test_every_tolerance_is_small_and_has_a_reason(computed):
    """Exact claims hold to rounding: 1e-8 of the numbers compared, approximate ones to 10 %."""
    for claim in computed:
        for name, check in claim.parts():
            assert len(check.tolerance.reason) > 10, name
            size = max(1.0, float(np.max(np.abs(check.expected))))
            approximate = name in ("A6b", "A6d", "A10b", "A13b", "A13e", "A13f", "A15b", "A15c")
            single = name == "A2c"
            limit = 0.1 if approximate else 1e-4 if single else 1e-8
            assert check.tolerance.value <= limit * size, name
            if check.relation == "equal" and not approximate:
                assert check.tolerance.value == 0 or check.tolerance.value >= EPS * 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [Point(1, 4, 1, 2), Point(2, 4, 2, 4), Point(4, 16, 2, 16), Point(5), Point(8, 32, 4, 8)],
)
def test_the_claims_hold_at_other_sizes_and_seeds(point):
    for claim in experiment.compute(ClaimsConfig(point)):
        assert not [part for part in claim.parts() if not part[1].holds]


def test_the_probe_reads_the_softmax_that_numpy_computes(x64):
    """Logits and probabilities of the attention module by loops over positions and pairs."""
    probe = attention_claims.AttentionProbe(SMALL, qk_norm=False)
    x = setting.stream(SMALL)
    heads, width = SMALL.heads, SMALL.width // SMALL.heads
    assert heads > 1
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        q, k = (x @ np.asarray(probe.params[n]["kernel"])[:, own] for n in ("query", "key"))
        half = width // 2
        for z in (q, k):
            for t in range(SMALL.tokens):
                for i in range(half):
                    a = t * 10000.0 ** (-i / half)
                    first, second = z[t, i], z[t, i + half]
                    z[t, i] = first * math.cos(a) - second * math.sin(a)
                    z[t, i + half] = second * math.cos(a) + first * math.sin(a)
        rows = [[q[t] @ k[s] / width**0.5 for s in range(t + 1)] for t in range(SMALL.tokens)]
        close = {"rtol": 0, "atol": 1e-12}
        np.testing.assert_allclose(probe.logits(x)[head], np.concatenate(rows), **close)
        for t, row in enumerate(rows):
            e = np.exp(row)
            padded = np.pad(e / e.sum(), (0, SMALL.tokens - t - 1))
            np.testing.assert_allclose(probe.probabilities(x)[head, t], padded, **close)


def test_more_positions_than_features_of_a_head_are_read_in_turns(x64):
    """Seven positions, heads of two features: every row of every head is a distribution."""
    probe = attention_claims.AttentionProbe(Point(width=8, heads=4, tokens=7), qk_norm=False)
    found = probe.probabilities(setting.stream(Point(width=8, heads=4, tokens=7)))
    assert found.shape == (4, 7, 7) and np.max(np.abs(np.triu(found, 1))) < 1e-13
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-13)


@pytest.mark.parametrize("placement", ["none", "pre"])
def test_the_pinned_branch_is_the_matrix(placement):
    """Sixteen layers of x + F(N(x)) by NumPy, for a matrix without any structure."""
    M = np.random.default_rng(0).normal(size=(SMALL.width, SMALL.width)) / 10
    states = depth_claims.linear_stack(SMALL, M, placement)
    h = states[0]
    assert set(np.unique(h)) == {-1.0, 1.0}
    for after in states[1:]:
        read = h / np.sqrt(np.mean(h**2, axis=1, keepdims=True)) if placement == "pre" else h
        h = h + read @ M
        np.testing.assert_allclose(after, h, rtol=1e-13, atol=1e-13 * np.abs(h).max())


# --- what is broken is found ----------------------------------------------------------------------


def _table_with(monkeypatch, change):
    for name in ("rmsnorm", "rmsnorm_plain"):
        row = norms.NORMS[name]
        broken = dataclasses.replace(row, function=lambda x, *a, f=row.function, **k:
                                     change(f, x, *a, **k))  # fmt: skip
        monkeypatch.setitem(norms.NORMS, name, broken)


def _eps_outside(f, x, gain=None, *, eps):
    root = jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + eps
    return x / root * (1 if gain is None else gain)


def _sum_for_mean(f, x, gain=None, *, eps):
    return f(x, gain, eps=eps) / x.shape[-1] ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "broken", "sound"),
    [
        (_eps_outside, {"A2", "A4", "A20", "A23"}, {"A3", "A5", "A17"}),
        (_sum_for_mean, {"A2", "A3", "A17", "A20", "A23"}, {"A4", "A5"}),
    ],
)
def test_another_norm_fails_the_claims_on_its_formula(monkeypatch, change, broken, sound):
    _table_with(monkeypatch, change)
    found = {name.rstrip("abcdefg") for f in norm_claims.CLAIMS for name in failing(f)}
    assert found == broken, found
    assert not found & sound


@pytest.mark.slow
def test_a_norm_that_subtracts_the_mean_is_not_rms_norm(monkeypatch):
    _table_with(monkeypatch, lambda f, x, *a, **k: f(x - jnp.mean(x, -1, keepdims=True), *a, **k))
    assert failing(norm_claims.definition) == ["A2a", "A2b", "A2c"]
    assert failing(norm_claims.plain_jacobian) == ["A17"]
    # Such a norm is blind to scale too: J_N u = 0 holds, only its size with eps is another.
    assert failing(norm_claims.radial_direction) == ["A20c", "A20d"]


class _Altered:
    """An algebra that does one thing wrong and hands on all else."""

    def __init__(self, algebra):
        self.right = algebra

    def __getattr__(self, name):
        return getattr(self.right, name)


class _WithoutResidual(_Altered):
    def plus(self, kept, written):
        return written


class _SlightlyScaled(_Altered):
    def plus(self, kept, written):
        return self.right.plus(kept, (1 + 1e-10) * written)


def _with_algebra(monkeypatch, altered):
    """The decoder folds with another algebra; nothing compiled before is used."""
    monkeypatch.setattr(decoder, "fold", lambda row, x, own: equation.fold(row, x, altered(own)))
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("altered", [_WithoutResidual, _SlightlyScaled])
def test_another_block_fails_the_claims_on_its_jacobian(monkeypatch, altered):
    """A factor of 1 + 1e-10 on the branch is found too: the tolerances are those of rounding."""
    _with_algebra(monkeypatch, altered)
    assert {"A7a", "A7b"} <= set(failing(block_claims.pre_norm))
    assert {"A8a", "A8b"} <= set(failing(block_claims.post_norm))
    assert {"A9a", "A9b"} <= set(failing(block_claims.no_norm))
    assert {"A10a", "A10c"} <= set(failing(depth_claims.proportional))
    assert {"A11a", "A11b"} <= set(failing(depth_claims.constant))
    found = failing(block_claims.radial_step)
    if altered is _WithoutResidual:  # J u is zero then; a factor on the branch does nothing to it
        assert {"A22a", "A22b"} <= set(found)
    else:
        assert found == ["A22c"], found  # the closed form has the factor 1


def test_a_block_with_a_branch_hardly_too_large_fails(monkeypatch):
    _with_algebra(monkeypatch, _SlightlyScaled)
    assert failing(block_claims.no_norm) == ["A9a", "A9b"]


@pytest.mark.slow
def test_norms_in_the_wrong_place_fail(monkeypatch):
    own = equation.Sublayer(branch_norm=equation.MODEL_NORM)
    row = dataclasses.replace(placements.PLACEMENTS["pre"], attention=own)
    monkeypatch.setitem(placements.PLACEMENTS, "pre", row)
    assert {"A7a", "A7b"} <= set(failing(block_claims.pre_norm))


def test_attention_with_biases_or_another_scale_fails(monkeypatch):
    original = setting.decoder_parts

    def biased(point, *args, **changes):
        parts = original(point, *args, **changes | {"bias": True})
        layer = parts.layer(1)
        branch = layer[0]["attention"]["branch"]
        for name in ("query", "key"):
            branch[name]["bias"] = branch[name]["bias"] + 0.1
        return parts

    monkeypatch.setattr(attention_claims, "decoder_parts", biased)
    monkeypatch.setattr(
        attention_claims.AttentionProbe,
        "probabilities",
        lambda self, x: np.zeros((2, len(x), len(x))),
    )
    found = failing(attention_claims.attention_and_scale)
    assert {"A6e", "A6f", "A6g", "A6h", "A6i", "A6k"} <= set(found)
    assert not {"A6a", "A6b", "A6c", "A6d"} & set(found)


def test_a_scale_by_the_width_in_place_of_the_width_of_a_head_fails(monkeypatch):
    """Logits over sqrt(D) are right with one head only; of two, each has half the features."""

    def narrowed(q):
        return right(q / SMALL.heads**0.5)

    right = layers._heads_first
    monkeypatch.setattr(layers, "_heads_first", narrowed)
    assert failing(attention_claims.attention_and_scale) == ["A6g"]


@pytest.mark.slow
def test_a_cap_on_the_logits_breaks_the_softmax_of_a_hundred_times_the_logits(monkeypatch):
    original = setting.decoder_parts
    monkeypatch.setattr(
        attention_claims, "decoder_parts",
        lambda point, *args, **changes: original(
            point, *args, **changes | {"attention_softcap": 1.0}),
    )  # fmt: skip
    assert "A6g" in failing(attention_claims.attention_and_scale)


BROKEN = {
    "length_and_direction": ("length", lambda h: jnp.sum(jnp.abs(h)), {"A1a", "A1d"}),
    "change_of_length": ("length", lambda h: jnp.sum(h * h), {"A14"}),
    "perpendicular_step": ("length", lambda h: 5 + jnp.sum(h * h) - 25, {"A15a", "A15b", "A15e"}),
    "change_of_direction": ("direction", lambda h: h / jnp.sum(h * h), {"A16"}),
    "shadow": ("split", lambda u, v: (v[0], list(u), list(v)), {"A18a", "A18b", "A18c", "A18e"}),
    "projections": ("rms_norm", lambda x, eps: x / jnp.max(jnp.abs(x)), {"A19b", "A19d", "A19e"}),
    "chord": ("direction", lambda h: h, {"A21a", "A21b", "A21d"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_length_direction_or_projection_fails(monkeypatch, name):
    piece, wrong, parts = BROKEN[name]
    monkeypatch.setattr(vectors, piece, wrong)
    assert parts <= set(failing(getattr(vectors, name)))


@pytest.mark.slow
def test_a_wrong_derivative_leaves_a_remainder_of_slope_one(monkeypatch):
    right = taylor.derivatives

    def halved(f, order):
        chain = right(f, order)
        return lambda t: [y if n != 1 else y / 2 for n, y in enumerate(chain(t))]

    monkeypatch.setattr(taylor, "derivatives", halved)
    found = failing(taylor.first_order)
    assert {"A13e", "A13f"} <= set(found)
    assert not {"A13a", "A13b", "A13c", "A13d"} & set(found)


def test_pinned_branches_of_another_size_fail(monkeypatch):
    right = depth_claims.linear_stack
    monkeypatch.setattr(
        depth_claims, "linear_stack", lambda point, M, placement: right(point, 1.001 * M, placement)
    )
    assert failing(depth_claims.proportional) == ["A10a", "A10b", "A10c"]
    assert failing(depth_claims.constant) == ["A11a", "A11b"]
    assert {f"A12{x}" for x in "abcdef"} <= set(failing(depth_claims.four_fates))


# --- how a number is judged -----------------------------------------------------------------------


def test_a_check_holds_up_to_its_tolerance_and_no_further():
    near = Tolerance(0.25, "a quarter")
    assert Check("", 1.0, 1.25, near).holds and not Check("", 1.0, 1.2500001, near).holds
    assert not Check("", [1.0, 1.0], [1.0, 2.0], near).holds
    for bad in (math.nan, math.inf):
        assert not Check("", 1.0, bad, near).holds
        assert not Check("", bad, bad, near).holds
    zero = exact("0")
    assert not Check("", 1.0, 1.0, zero, "above").holds
    assert Check("", 1.0, 1 + 2 * EPS, zero, "above").holds
    assert not Check("", 1.0, math.nan, zero, "above").holds
    assert Check("", 1.0, 1 - EPS, zero, "below").holds
    assert not Check("", 1.0, 1.0, zero, "below").holds
    with pytest.raises(ValueError, match=r"measured of shape \(2,\) for expected \(\)"):
        Check("length", 1.0, [1.0, 2.0], zero)


def test_a_large_array_shows_its_worst_entry():
    expected = np.arange(12.0).reshape(3, 4)
    measured = expected.copy()
    measured[1, 2] += 0.5
    check = Check("array", expected, measured, rounding(1, 1.0, "none"))
    assert check.shown() == ([6.0], [6.5]) and check.error == 0.5
    assert check.words == "array (worst of 12 entries)"
    measured[2, 0] = math.nan
    shown = Check("array", expected, measured, digits(1)).shown()
    assert shown[0] == [8.0] and math.isnan(shown[1][0])
    assert not Claim("A1", "Nothing.", ()).holds


def test_rounding_by_float32_is_that_of_float64(x64):
    """A sum of 1000 numbers: what float64 loses against exact summation is below the tolerance."""
    x = np.random.default_rng(0).normal(size=(50, 1000))
    run = np.cumsum(x, axis=1)[:, -1]
    narrow = np.cumsum(x.astype(np.float32), axis=1, dtype=np.float32)[:, -1]
    lost = np.max(np.abs(run - np.array([math.fsum(row) for row in x])))
    tolerance = block_claims.echo(run, narrow, "a sum").value
    assert 0 < lost <= tolerance <= 1000 * lost


# --- files, page and command line -----------------------------------------------------------------


def test_the_csv_reads_back(computed):
    rows = list(csv.DictReader(io.StringIO(page.CHECKS.csv(page.rows(computed)))))
    parts = [part for claim in computed for part in claim.parts()]
    assert list(rows[0]) == ["id", "claim", "expected", "measured", "tolerance", "holds"]
    assert [row["id"] for row in rows] == [name for name, _ in parts]
    for row, (_, check) in zip(rows, parts, strict=True):
        sign = {"equal": "", "above": ">", "below": "<"}[check.relation]
        wanted = [float(v) for v in row["expected"].removeprefix(sign).split()]
        found = [float(v) for v in row["measured"].split()]
        assert (wanted, found) == check.shown()
        assert float(row["tolerance"]) == check.tolerance.value
        # The row alone decides as the program did.
        gaps = np.subtract(found, wanted)
        held = {"": np.abs(gaps) <= float(row["tolerance"]), ">": gaps > 0, "<": gaps < 0}[sign]
        assert bool(np.all(held)) == (row["holds"] == "yes") is check.holds


def test_the_text_fits_a_terminal(computed):
    lines = page.text(computed).splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for claim in computed:
        assert f"\n{claim.id}  " in text
        for name, _ in claim.parts():
            assert f"\n {name} " in text
    assert lines[-1].startswith("All 23 claims hold, in ")
    assert "NO" not in text.split()


def broken(claims):
    """The claims with one number off in A7."""
    changed = []
    for claim in claims:
        if claim.id == "A7":
            first = claim.checks[0]
            off = dataclasses.replace(first, measured=first.measured + 1e-3)
            claim = dataclasses.replace(claim, checks=(off, *claim.checks[1:]))
        changed.append(claim)
    return changed


def test_the_text_and_the_page_name_what_fails(computed):
    claims = broken(computed)
    text = page.text(claims)
    assert "1 of 23 claims does not hold: A7 (comparisons A7a)." in text
    assert text.split().count("NO") == 1
    html = page.render(claims, [], {})
    assert "1 of 23 claims does not hold: A7" in html
    assert html.count("<b>no</b>") == 1 and '<a class="fails" href="#A7">A7 fails' in html


def test_the_page_shows_every_row_with_its_reason(computed):
    with_figures = [(figure, "<svg ></svg>") for figure in page.figures(computed)]
    html = page.render(computed, with_figures, {"Command": "python <launch>.py"})
    assert "<script" not in html and "python &lt;launch&gt;.py" in html
    for claim in computed:
        assert f'id="{claim.id}"' in html
        for name, _ in claim.parts():
            assert f">{name}</td>" in html
    assert {figure.name for figure, _ in with_figures} == set(page.FIGURES)


def test_figures_hold_the_closed_forms(computed):
    drawn = {figure.name: figure for figure in page.figures(computed)}
    compounds = [row for row in drawn["stream-size"].rows if row[0].startswith("compounds")]
    assert [round(row[2], 12) for row in compounds] == [round(1.1**n, 12) for n in range(17)]
    adds = [row[2] for row in drawn["stream-size"].rows if row[0].startswith("adds")]
    np.testing.assert_allclose(adds, 1 + 0.1 * np.arange(17), rtol=1e-13)


@pytest.fixture
def call(tmp_path, monkeypatch, command):
    """Run the experiment in an empty folder, as ``command`` does."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "--experiment=claims")


@pytest.mark.parametrize("fails", [False, True])
def test_the_command_writes_its_files_and_tells_by_its_exit_code(
    call, tmp_path, monkeypatch, computed, fails
):
    claims = broken(computed) if fails else computed
    monkeypatch.setattr(experiment, "compute", lambda config: claims)
    code, out, err = call("--workdir=here")
    assert (code, err) == (int(fails), "")
    assert out.endswith("report: here/claims.html\n")
    assert ("does not hold: A7" in out) is fails
    folder = tmp_path / "here"
    assert (folder / "claims.csv").read_text() == page.CHECKS.csv(page.rows(claims))
    html = (folder / "claims.html").read_text()
    for name in page.FIGURES:
        for ending in ("png", "svg", "csv"):
            assert (folder / "figures" / f"{name}.{ending}").stat().st_size > 100
            assert f'href="figures/{name}.{ending}"' in html


@pytest.mark.slow
def test_the_command_as_it_is(call, tmp_path):
    code, out, err = call("--workdir=here", "--config.point.seed=11")
    assert (code, err) == (0, "") and "All 23 claims hold" in out


def test_the_exit_code_of_a_broken_norm_is_one(call, monkeypatch):
    """Through the whole command, on the claims that are quick to compute."""
    monkeypatch.setattr(experiment, "GROUPS", (norm_claims,))
    _table_with(monkeypatch, _sum_for_mean)
    code, out, err = call("--workdir=here")
    assert (code, err) == (1, "")
    assert "5 of 7 claims do not hold: A2, A3, A17, A20, A23" in out


def test_dry_run_says_what_would_be_computed_and_writes_nothing(call, tmp_path):
    code, out, err = call("--dry_run", "--config.point.width=32")
    assert (code, err) == (0, "") and "23 claims" in out and "32 features" in out
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "--config.point.seed=-1": ["seed=-1", "from 0"],
    "--config.point.width=2": ["width=2", "from 4 to 64"],
    "--config.point.width=65": ["width=65", "from 4 to 64"],
    "--config.point.heads=0": ["heads=0", "from 1"],
    "--config.point.heads=3": ["heads=3", "16 features", "for example 8"],
    "--config.point.tokens=1": ["tokens=1", "from 2 to 16"],
    "--config.point.widht=8": ["widht", "did you mean 'config.point.width'?"],
    "--preset=defalt": ["=defalt", "did you mean 'default'?"],
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(call, tmp_path, flag):
    for more in ((), ("--dry_run",)):
        code, out, err = call(flag, "--workdir=here", *more)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert all(word in err for word in MISTAKES[flag]), err
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_do_not_fit_together_are_refused():
    with pytest.raises(UserError, match=r"tokens=8: must be at most the width 4"):
        setting.check(ClaimsConfig(Point(width=4, heads=1, tokens=8)))
    with pytest.raises(UserError, match="take an even width"):
        setting.check(ClaimsConfig(Point(width=5, heads=1, tokens=2)))
    for preset in experiment.PRESETS:
        setting.check(experiment.get_config(preset))
