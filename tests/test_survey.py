"""Surveys of spectra: what is measured against other routes, what is written, what is refused."""

import json
import shutil
from decimal import Decimal

import jax
import numpy as np
import pytest
import run_folders as folders

from experiments.spectrum import data as survey_data
from experiments.spectrum import experiment
from experiments.spectrum import page as survey_page
from experiments.spectrum.measured import measure
from experiments.spectrum.predicted import Tokens, overlay, predicted_mean_squares
from experiments.spectrum.survey import Condition, survey
from normjax import configs
from normjax.decoder import Decoder, DecoderConfig
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.jacobians.views import token_jacobians
from normjax.runs.experiment import Options
from normjax.runs.run_folder import RunFolder
from normjax.training.trained import TrainedRun, run_folders

EPS = np.finfo(np.float64).eps
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))


def made(placement="pre", gains=True, **changes):
    config = DecoderConfig(depth=2, width=8, heads=2, placement=placement, **changes)
    model = Decoder(config, vocabulary=11, window=6)
    params = model.init(jax.random.key(1))
    if gains:  # norms that are not all alike
        rng = np.random.default_rng(2)
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                x * rng.uniform(0.5, 1.5, x.shape).astype("float32")
                if path[-1].key == "gain"
                else x * 4
            ),
            params,
        )
    return Parts(model, params)


@pytest.mark.parametrize(
    "placement",
    ["pre", "post", *(pytest.param(p, marks=pytest.mark.slow) for p in ("sandwich", "none"))],
)
def test_blocks_and_stack_agree_with_autodiff(placement):
    parts = made(placement)
    found = measure(parts, TOKENS, (0, 5), sequence_length=3)
    h = np.asarray(parts.embed(TOKENS))
    for b in range(2):
        block = token_jacobians(parts.block(1), h[b])[[0, 5]]
        expected = np.linalg.svd(block, compute_uv=False)
        assert np.max(np.abs(found.raw[0, b] - expected)) < 200 * EPS * expected.max()
        # Token Jacobians of a causal stack are the diagonal blocks of the whole one's.
        stack = token_jacobians(parts.stack(1, 2), h[b])[[0, 5]]
        values = np.linalg.svd(stack, compute_uv=False)
        seen = np.exp(found.log_raw[b])
        assert np.max(np.abs(seen - values)) < 2000 * EPS * values.max()
        u = h[b][[0, 5]] / np.linalg.norm(h[b][[0, 5]], axis=-1, keepdims=True)
        after = np.asarray(parts.stack(1, 2)(h[b]))[[0, 5]]
        if placement == "post":
            after = after / np.asarray(parts.layer(2)[0]["mlp"]["post_norm"]["gain"]) ** 2
        v = after / np.linalg.norm(after, axis=-1, keepdims=True)
        eye = np.eye(8)
        inner = (eye - v[..., None] * v[:, None]) @ stack @ (eye - u[..., None] * u[:, None])
        values = np.linalg.svd(inner, compute_uv=False)[:, :-1]
        seen = np.exp(found.log_deflated[b])
        assert np.max(np.abs(seen - values)) < 2000 * EPS * values.max()
    assert found.sequence.shape == (24,)
    np.testing.assert_allclose(
        found.mean_square[0], np.mean(h[:, [0, 5]] ** 2, axis=-1), rtol=8 * EPS
    )


def test_identities_hold_where_the_placement_has_them():
    for placement, count in (("pre", 2), ("post", 1), ("none", 0), ("branch_output", 0)):
        defects = measure(made(placement), TOKENS, (5,), identities=True).defects
        assert len(defects) == count
        assert all(value < 1e-12 for value in defects.values()), defects


def test_a_norm_on_the_stream_hides_in_the_raw_condition_only():
    for eps in (1e-4, 1e-8):
        found = measure(made("post", norm_eps=eps), TOKENS, (5,))
        assert np.median(found.raw[..., 0] / found.raw[..., -1]) > 0.01 / eps
        assert np.median(found.deflated[..., 0] / found.deflated[..., -1]) < 100


def test_theory_meets_a_wide_decoder_at_initialization():
    config = DecoderConfig(depth=2, width=96, heads=2, mlp="relu")
    model = Decoder(config, vocabulary=50, window=8)
    parts = Parts(model, model.init(jax.random.key(0)))
    tokens = np.random.default_rng(1).integers(0, 50, (4, 8))
    found = measure(parts, tokens, (7,))
    sizes = found.mean_square[0, :, 0]
    values = found.log_deflated[:, 0]
    entering = Tokens(sizes, found.mean[0, :, 0], tokens)
    law = overlay(parts, range(1, 3), 7, entering)
    assert "weights" not in law.broken
    assert law.distance(values) < law.level < 1.36 / np.sqrt(95)
    # 4 x 95 values: chance alone makes 1.36 / sqrt(380) = 0.07 of the distance at the 5 % level.
    assert law.distance(values) < 1.36 / np.sqrt(values.size)
    for factor in (0.6, 1.6):  # another size is noticed
        assert law.distance(values + np.log(factor)) > 1.36 / np.sqrt(values.size)
    squares = [found.mean_square[k, :, 0].mean() for k in range(3)]
    np.testing.assert_allclose(predicted_mean_squares(parts, 7, sizes.mean()), squares, rtol=0.25)
    block = overlay(parts, range(1, 2), 7, entering)
    total = np.trapezoid(block.log_density, block.log_s)
    assert abs(total - 1) < 2e-3
    assert abs(np.trapezoid(np.exp(2 * block.log_s) * block.log_density, block.log_s) ** 0.5
               - np.exp(block.log_rms)) < 2e-3  # fmt: skip


def wide(placement, norm="rmsnorm"):
    config = DecoderConfig(depth=2, width=64, heads=4, placement=placement, norm=norm)
    model = Decoder(config, vocabulary=64, window=16)
    return Parts(model, model.init(jax.random.key(0)))


@pytest.mark.parametrize("placement", ["sandwich", "branch_output"])
def test_theory_counts_the_tokens_that_repeat(placement):
    """One token 16 times is no mean of 16: the branch is four times larger, its J smaller."""
    parts, tokens = wide(placement), np.full((2, 16), 3)
    found = measure(parts, tokens, (15,))
    entering = Tokens(found.mean_square[0, :, 0], found.mean[0, :, 0], tokens)
    law = overlay(parts, range(1, 2), 15, entering)
    logs = found.log_deflated[:, 0], np.log(found.deflated[0, :, 0])
    assert law.distance(logs[1]) < law.level
    assert np.exp(law.log_edges[1]) == pytest.approx(np.exp(logs[1].max()), rel=0.15)
    assert list(law.broken) == ["tokens"] and "2 of 2 sequences repeat" in law.broken["tokens"]
    blind = overlay(parts, range(1, 2), 15, entering._replace(sequences=None))
    assert blind.distance(logs[1]) > 2 * blind.level and not blind.broken


def test_theory_says_when_weights_are_not_independent():
    parts, tokens = wide("pre"), np.arange(16)[None]
    branch = parts.params["blocks"]["mlp"]["branch"]
    with jax.enable_x64(True):
        branch["out"]["kernel"] = 3 * np.swapaxes(branch["in"]["kernel"], -1, -2)
    found = measure(parts, tokens, (15,))
    law = overlay(parts, range(1, 2), 15, Tokens(found.mean_square[0, :, 0], None, tokens))
    assert law.distance(np.log(found.deflated[0, :, 0])) > 3 * law.level
    assert law.broken == {"weights": "block 1: mlp in and out: are not independent"}


def test_a_decoder_without_a_law_says_why():
    assert (
        "every singular value is 1"
        in overlay(made("skipinit", False), range(1, 3), 5, Tokens(np.ones(2))).assumption
    )
    hot = made("pre", False)
    with jax.enable_x64(True):
        hot.params["blocks"]["attention"]["branch"]["query"]["kernel"] *= 1e3
    assert (
        "attention logits have a standard deviation"
        in overlay(hot, range(1, 3), 5, Tokens(np.ones(2))).assumption
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A whole survey through the experiment: two placements trained two steps, depth 1 and 2."""
    folder = tmp_path_factory.mktemp("survey")
    config = small(folder)
    outcome = experiment.run(config, "quick", Options(folder / "work", "the command", live=False))
    return folder, config, outcome


def small(folder, **changes):
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    return configs.replace(experiment.get_config("quick"), {
        "model.width": 8, "model.depth": 2, "train.steps": 2, "train.checkpoint_every": 1,
        "train.warmup_steps": 1, "train.batch_size": 2, "train.evaluation_windows": 2,
        "train.final_windows": 2, "data.corpus": str(folder / "text.txt"), "data.window": 6,
        "data.cache_dir": str(folder / "cache"), "spectrum.tokens": 6, "spectrum.sequences": 2,
        "spectrum.sequence_tokens": 3, "spectrum.placements": ("pre", "post"),
        "spectrum.depths": (1, 2), "spectrum.seeds": 1,
    } | changes)  # fmt: skip


def test_the_survey_measures_every_checkpoint_and_depth(workdir):
    folder, _, outcome = workdir
    found = survey_data.read_survey(folder / "work")
    assert found.series == ["pre", "post"]
    assert found.steps("pre") == found.steps("post") == [0, 1, 2]
    assert list(found.initialized("post")) == [1, 2]
    assert outcome.page == folder / "work" / "spectrum.html"
    assert "powers of ten" in outcome.text and "rounding" in outcome.text
    rows = (folder / "work" / "spectrum.csv").read_text().splitlines()
    assert rows[0].split(",") == [
        *("series", "seed", "step", "depth", "part", "position", "run", "sequences"),
        *("log10_sigma_max", "log10_sigma_min", "log10_rms_gain", "log10_condition"),
        *("log10_deflated_max", "log10_deflated_min", "log10_deflated_condition"),
        *("log10_deflated_condition_low", "log10_deflated_condition_high"),
        *("rr", "rt", "tr", "tt", "cosine", "stream_rms_before", "stream_rms_after"),
        *("log10_theory_max", "log10_theory_min", "theory_distance", "theory_level"),
        "theory_broken",
    ]
    # (3 steps x 2 blocks + stack) + (depth 1: block + stack), for 2 positions and 2 placements
    assert len(rows) - 1 == 2 * 2 * (3 * 3 + 2)
    page = outcome.page.read_text()
    for name in ("block_spectra", "stack_spectra", "stack_over_depth", "stack_over_training",
                 "gains_initialization", "gains_trained", "sequence_spectra"):  # fmt: skip
        assert f'id="{name}"' in page
        for kind in ("png", "svg", "csv"):
            assert (folder / "work" / "figures" / f"{name}.{kind}").stat().st_size > 100


def test_the_npz_holds_what_a_run_says_of_itself(workdir):
    folder, config, _ = workdir
    run = next(f for f in run_folders(folder / "work" / "training") if f.name.startswith("post"))
    opened = TrainedRun(run)
    assert opened.steps == (0, 1, 2) and opened.arm == "post"
    tokens = opened.windows(2)[:, : config.spectrum.tokens]
    again = measure(opened.parts(2), tokens, (0, 5))
    number = next(
        i
        for i, p in enumerate(survey_data.read_survey(folder / "work").points)
        if p.series == "post" and p.step == 2
    )
    with np.load(folder / "work" / "spectra.npz") as arrays:
        np.testing.assert_array_equal(arrays[f"{number}/raw"], again.raw)
        np.testing.assert_array_equal(arrays[f"{number}/log_deflated"], again.log_deflated)


@pytest.mark.slow
def test_runs_of_another_grid_can_be_measured(workdir, tmp_path):
    folder, config, _ = workdir
    runs = str(folder / "work" / "training")
    config = configs.replace(config, {"spectrum.runs": (runs,)})
    outcome = experiment.run(config, "quick", Options(tmp_path / "again", "c", live=False))
    assert outcome.page.exists()
    assert not (tmp_path / "again" / "training").exists()
    assert {p.main for p in survey_data.read_survey(tmp_path / "again").points} == {True}


def test_initialization_of_a_run_is_that_of_its_seed(workdir):
    folder, config, _ = workdir
    opened = TrainedRun(run_folders(folder / "work" / "training")[0])
    same = opened.model.init(jax.random.fold_in(jax.random.key(0), 0))
    jax.tree.map(np.testing.assert_array_equal, opened.params(0), same)
    trained = opened.params(2)
    assert any(
        np.any(np.asarray(a) != np.asarray(b))
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(trained), strict=True)
    )


def test_a_run_whose_text_is_gone_has_its_tokens_from_the_cache(workdir, tmp_path, monkeypatch):
    """By the fingerprint, from the cache of whoever opens it and not from the one it names."""
    folder, *_ = workdir
    run = tmp_path / "run"
    shutil.copytree(run_folders(folder / "work" / "training")[0], run)
    record = RunFolder(run).record
    record["data"] |= {"corpus": "moved/text.txt", "cache_dir": str(tmp_path / "theirs")}
    folders.write(run, record=record)
    monkeypatch.setenv("NORMJAX_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no such file or folder.*its tokens are not in the cache"):
        _ = TrainedRun(run).corpus
    monkeypatch.setenv("NORMJAX_CACHE", str(folder / "cache"))
    text = "to be or not to be, that is the question: " * 60
    corpus = TrainedRun(run).corpus
    assert corpus.vocabulary.decode(corpus.held_out) == text[int(len(text) * 0.9) :]
    assert TrainedRun(run).windows(2).shape == (2, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_what_cannot_be_measured_is_passed_over_and_said(tmp_path):
    model = Decoder(DecoderConfig(depth=2, width=8, heads=2), vocabulary=11, window=6)

    def parts():
        return Parts(model, jax.tree.map(lambda x: x * np.nan, model.init(jax.random.key(0))))

    record = {"first_seed": 0, "config": {}, "environment": {}, "command": "", "tokens": 6,
              "sequences": 2, "positions": [5],
              "corpus": {"name": "x", "fingerprint": "y"}}  # fmt: skip
    conditions = [Condition("bad", 0, 0, parts, TOKENS), Condition("good", 0, 0, made, TOKENS)]
    lines = []
    survey(conditions, (5,), 0, tmp_path, record, lines.append)
    found = survey_data.read_survey(tmp_path)
    assert [p.measured for p in found.points] == [False, True]
    assert "not measured" in lines[0] and "not finite" in survey_page.warnings(found)[0]


def test_a_fault_of_the_instrument_is_reported(workdir):
    folder, *_ = workdir
    text = json.loads((folder / "work" / "survey.json").read_text())
    found = survey_data.read_survey(folder / "work")
    assert text["format"] == survey_data.FORMAT
    assert survey_page.warnings(found) == []
    found.points[0].entry["defects"] = {"an identity": 1e-6}
    said = survey_page.warnings(found)[0]
    assert "A fault of the instrument: an identity is off by 1.0e-06" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spectrum.placements": ("prre",)}, r"placements=prre: must be .*did you mean 'pre'"),
        ({"spectrum.tokens": 7}, r"tokens=7: must be at most data.window=6"),
        ({"spectrum.depths": (0,)}, r"depths=0: must be from 1 to 10000; pass .*depths=2,4,8,16$"),
        (
            {"spectrum.seeds": 0},
            r"seeds=0: must be from 1 to 10000; pass --config.spectrum.seeds=2",
        ),
        (
            {"spectrum.sequence_tokens": 7},
            r"sequence_tokens=7: must be at most 6 here; pass .*tokens=6",
        ),
        ({"train.steps": -1}, r"train.steps=-1: must be from 0 to 2147483647; pass .*steps=300"),
        ({"spectrum.runs": ("nowhere",)}, r"runs=nowhere: must be a run folder, or a workdir"),
    ],
)
def test_mistakes_get_one_line(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        experiment.run(small(tmp_path, **changes), "quick", Options(tmp_path / "w", "c"))
    assert not (tmp_path / "w").exists()


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    assert (
        experiment.run(small(tmp_path), "quick", Options(tmp_path / "w", "c", dry_run=True)) is None
    )
    assert "train 2 placements x 1 seed," in capsys.readouterr().out
    assert not (tmp_path / "w").exists()


def test_a_folder_that_is_no_run(tmp_path, workdir):
    with pytest.raises(UserError, match="must be the folder of one run"):
        TrainedRun(tmp_path)
    folder, *_ = workdir
    opened = TrainedRun(run_folders(folder / "work" / "training")[0])
    with pytest.raises(UserError, match="step=7: must be one of 0, 1, 2"):
        opened.params(7)
    folders.write(tmp_path, record={"arm": 3})
    with pytest.raises(UserError, match="its manifest is not one of this version"):
        TrainedRun(tmp_path)


def test_a_damaged_survey_says_how_to_get_it_back(tmp_path, workdir):
    with pytest.raises(UserError, match="holds no survey.json of format 2"):
        survey_data.read_survey(tmp_path)
    folder, *_ = workdir
    (tmp_path / "survey.json").write_bytes((folder / "work" / "survey.json").read_bytes())
    (tmp_path / "spectra.npz").write_bytes(b"no zip")
    with pytest.raises(UserError, match="spectra.npz is not what was sealed; run it again"):
        survey_data.read_survey(tmp_path)


def test_what_is_known_in_logarithms_is_written_in_logarithms():
    """A stack over 800 powers of ten: no cap at 1e304 and no zero that is 2e-308."""
    logs = np.array([[921.0, 0.0, -921.0], [921.0, 0.0, -np.inf], [921.0, 0.0, -np.inf]])
    ones = np.ones((1, 3, 1, 3))
    arrays = {"mean_square": np.ones((2, 3, 1)), "raw": ones, "deflated": ones * [1.0, 1.0, 0.0],
              "log_raw": logs[:, None], "log_deflated": np.stack([logs[0]] * 3)[:, None],
              **{f"gains/{name}": np.ones((1, 3, 1)) for name in survey_data.GAINS}}  # fmt: skip
    entry = {"series": "x", "seed": 0, "step": 0, "depth": 1, "positions": [0], "run": "",
             "main": True}  # fmt: skip
    point = survey_data.SurveyPoint(entry, arrays)
    block, stack = survey_data.rows(survey_data.Survey({}, (point,)))
    assert stack["log10_deflated_condition"] == pytest.approx(1842 / np.log(10), rel=1e-15)
    assert stack["log10_sigma_max"] == pytest.approx(921 / np.log(10), rel=1e-15)
    assert stack["log10_condition"] == np.inf and stack["log10_sigma_min"] == -np.inf
    assert stack["log10_rms_gain"] == pytest.approx((921 - np.log(3) / 2) / np.log(10), rel=1e-15)
    assert block["log10_deflated_min"] == -np.inf and block["log10_condition"] == 0
    # exp(1842), by the digits of Python's decimal
    expected = Decimal(1842).exp()
    assert survey_data.shown(1842.0) == f"{expected:.3e}"


def test_a_norm_that_removes_the_mean_hides_two_directions():
    """Behind a LayerNorm nothing leaves along u / g nor along 1 / g, whatever gain and bias."""
    config = DecoderConfig(depth=2, width=16, heads=2, placement="post", norm="layernorm",
                           init="fan_in")  # fmt: skip
    model = Decoder(config, 11, 6)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
                          model.init(jax.random.key(0)))  # fmt: skip
    found = measure(Parts(model, params), np.arange(6)[None], (0, 5))
    assert found.deflated.shape[-1] == 14
    assert np.all(found.raw[..., 0] / found.raw[..., -1] > 1e14)
    assert np.all(found.deflated[..., 0] / found.deflated[..., -1] < 1e4)
