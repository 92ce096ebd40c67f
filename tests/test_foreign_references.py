"""Checkpoints that the transformers library wrote, with what it computed of them.

They are no part of the repository: NORMJAX_REFERENCE_MODELS names their folder, or it lies beside
the checkout. tests/test_foreign.py needs none of them.
"""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from normjax.foreign.opened import open_model

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "reference_models"
FOLDER = Path(os.environ.get("NORMJAX_REFERENCE_MODELS", BESIDE))
NAMES = ("openai-gpt", "opt-postln", "gpt2", "llama", "olmo2", "gemma2")

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no {FOLDER}: set NORMJAX_REFERENCE_MODELS to their folder"
)


def close(ours, theirs):
    """Whether two float32 arrays agree to 1e-5 of the largest entry."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_computes_what_the_library_does_after_every_block(name):
    model, expected = open_model(FOLDER / name), load_file(FOLDER / name / "expected.safetensors")
    decoder, ends, tokens = model.decoder(), model.ends(), expected["tokens"]
    h = decoder.embed(ends, tokens)
    close(h, expected["hidden.0"])
    for block in range(1, model.config.depth + 1):
        h = decoder.block(model.layer(block), h)
        if block < model.config.depth or not model.config.has_final_norm:
            close(h, expected[f"hidden.{block}"])
    close(decoder.readout(ends, h), expected["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_all_parameters_at_once_are_the_same_decoder(name):
    model, expected = open_model(FOLDER / name), load_file(FOLDER / name / "expected.safetensors")
    logits, taps = jax.jit(model.decoder().tapped)(model.params(), expected["tokens"])
    close(logits, expected["logits"])
    if model.config.has_final_norm:
        close(taps["final"], expected[f"hidden.{model.config.depth}"])


@pytest.mark.parametrize("name", NAMES)
def test_another_eps_is_seen(name):
    """What is equal to 1e-5 above is not with a thousandth more in every norm."""
    import dataclasses

    model, expected = open_model(FOLDER / name), load_file(FOLDER / name / "expected.safetensors")
    config = dataclasses.replace(model.config, norm_eps=model.config.norm_eps + 1e-3)
    decoder = dataclasses.replace(model.decoder(), config=config)
    logits = np.asarray(decoder.apply(model.params(), expected["tokens"]))
    assert np.abs(logits - expected["logits"]).max() > 1e-4 * np.abs(expected["logits"]).max()
