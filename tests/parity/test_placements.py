"""Rows of the table of placements are what the transformers library computes, in its own code."""

import pytest

pytest.importorskip("torch", reason="torch and transformers: `make test-parity` installs them")
pytest.importorskip("transformers", reason="transformers: `make test-parity` installs it")

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch

from normjax.decoder import Decoder
from normjax.decoder_config import DecoderConfig
from normjax.mixing import Sinkhorn, Weights, mixed
from normjax.norm_functions import rms_norm
from normjax.placements import PLACEMENTS
from tests.parity import comparisons, maps
from tests.parity.comparisons import COMPARISONS, Comparison, cases, compare
from tests.parity.replay import largest
from tests.parity.tiny_models import DEPTH, HEADS, LENGTH, VOCABULARY, WIDTH, build, precision

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("c", "wide", "whole"),
    [
        pytest.param(*case, id=f"{case[0].name}-{64 if case[1] else 32}{'-whole' * case[2]}")
        for case in cases()
    ],
)
def test_a_row_computes_what_the_library_does(c, wide, whole):
    found = compare(c, wide, whole)
    assert found.largest <= found.tolerance, found


@pytest.mark.parametrize("c", COMPARISONS, ids=lambda c: c.name)
def test_a_wrong_eps_and_a_wrong_row_are_seen(c):
    """In float64 a comparison sees a branch that weighs one millionth more, where a number weighs
    it, and an eps that is one thousandth larger, where there is one."""
    assert c.row in PLACEMENTS
    row = PLACEMENTS[c.row]
    wrong = dataclasses.replace(
        row, attention=dataclasses.replace(row.attention, write=_more(row.attention.write))
    )
    if wrong != row:
        found = compare(c, True, False, placement=wrong)
        assert found.largest > 1e3 * found.tolerance, found
    if c.prepared is None:
        eps = 1.001 * (comparisons.MIXING_EPS if row.streams and row.streams.rows(4) > 2
                       else comparisons.EPS)  # fmt: skip
        found = compare(c, True, False, norm_eps=eps)
        assert found.largest > 10 * found.tolerance, found


def _more(write):
    """Return one and a millionth of what weighs the branch, where that is a number."""
    if isinstance(write, int | float):
        return write * (1 + 1e-6)
    if callable(write) and not hasattr(write, "record"):
        return lambda block, depth: write(block, depth) * (1 + 1e-6)
    return write


DRAWN = (
    "_projection", ".gate", "_predicts", "_corrects", "_predictions", "_corrections", "_left",
    "_right",
)  # fmt: skip


@pytest.mark.parametrize("c", COMPARISONS, ids=lambda c: c.name)
def test_a_scheme_starts_where_the_library_starts_it(c):
    """What the library draws (matrices of gates and routers, Muse Spark's gates) starts around
    zero, with the standard deviation of its config; ours with that of the row, or at zero."""
    model = build(c.model_type, False, disturbed=False, **c.keywords)
    theirs = maps.values(c.model_type, model, c.blocks, c.others)
    config = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "placement": c.row} | c.config
    params = Decoder(DecoderConfig(**config), VOCABULARY, LENGTH).init(jax.random.key(0))
    for name, start in theirs.items():
        ours = params
        for key in name.split("."):
            ours = ours[key]
        if np.ptp(start) < 1e-6:
            np.testing.assert_allclose(ours, start, rtol=1e-6, atol=1e-7)
        else:
            assert name.endswith(DRAWN), name
            spread, four_errors = model.config.initializer_range, 4 / start.size**0.5
            assert abs(np.mean(start)) < four_errors * spread
            assert np.std(start) == pytest.approx(spread, rel=four_errors)
            assert abs(np.mean(ours)) < four_errors * 0.02


class _Transposed(Sinkhorn):
    def value(self, logits):
        return jnp.swapaxes(super().value(logits), -1, -2)


def test_the_other_side_of_mhc_s_matrix_is_seen():
    c = next(c for c in COMPARISONS if c.row == "mhc")
    row = PLACEMENTS["mhc"]
    keep = dataclasses.replace(row.attention.keep, squash=_Transposed())
    wrong = dataclasses.replace(row, attention=dataclasses.replace(row.attention, keep=keep))
    assert compare(c, True, False, placement=wrong).largest > 1e-3


def test_what_the_row_leaves_out_of_dory_is_its_eps():
    """As shipped, 1e-6 beside the squared length of about 1 in each of 2 L + 1 norms."""
    dory = next(c for c in COMPARISONS if c.row == "dory")
    found = compare(dataclasses.replace(dory, prepared=None), True, False)
    assert 1e-8 < found.largest < 1e-4, found


def test_glm_5_next_is_mhc_with_a_plain_mean_for_its_head():
    """Its streams are those of our row; its output layer reads their mean, which is no row."""
    of_deepseek = next(c for c in COMPARISONS if c.row == "mhc")
    glm = Comparison(
        "glm5_next_text", "mhc", of_deepseek.blocks, {"final_norm.gain": "norm.weight"}
    )
    row = PLACEMENTS["mhc"]
    mean = Weights("mean", lambda position, n: np.full((1, n), 1 / n))
    own = dataclasses.replace(row, streams=dataclasses.replace(row.streams, readout=mean))
    found = compare(glm, True, False, placement=own)
    assert found.largest <= found.tolerance, found


def test_inkling_2_mixes_normalized_sources_which_no_row_does():
    """Its read is softmax(q . r(v) / sqrt(d)) over r(v); with our r in front, and q over sqrt(d),
    our weights give the same, and over v itself something else."""
    from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual

    rng = np.random.default_rng(0)
    sources, query = rng.normal(size=(2, 3, 4, WIDTH)), rng.normal(size=WIDTH)
    with precision(True):
        theirs = Inkling2BlockAttentionResidual(
            SimpleNamespace(hidden_size=WIDTH, _attn_implementation="eager")
        ).double()
        theirs.query.copy_(torch.tensor(query))
        H = torch.tensor(sources)
        read = theirs(H[..., :-1, :], H[..., -1, :])[0].numpy()
    row = PLACEMENTS["attention_residuals"].attention
    with jax.enable_x64(True):
        H, q = jnp.asarray(sources), {"query": jnp.asarray(query / WIDTH**0.5)}
        weights, normed = row.read.value(q, H, 3), rms_norm(H, eps=row.read.eps)
        ours, plain = (np.asarray(mixed(weights, x)[..., 0, :]) for x in (normed, H))
    assert largest(ours, read) < 16 * np.finfo(float).eps
    assert largest(plain, read) > 0.01
