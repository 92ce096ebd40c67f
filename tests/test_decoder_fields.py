"""Fields that decoders of others need: each does what its formula says, none moves a default."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.decoder_config import LATER
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.layers import angles_of, rotary_angles, rotate, seen_by

CONFIG = DecoderConfig(depth=3, width=16, heads=2, init="fan_in")
TOKENS = jnp.arange(16).reshape(2, 8) % 11


def made(**changes):
    model = Decoder(dataclasses.replace(CONFIG, **changes), 11, 8)
    return model, model.init(jax.random.key(0))


OTHER = {
    "head_features": 4, "attention_scale": 0.5, "rotary_base": 100.0, "rotary_share": 0.5,
    "local_blocks": (1, 3), "local_window": 3, "local_rotary_base": 50.0, "embedding_scale": 2.0,
    "output_scale": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_default_is_no_part_of_a_name_and_another_value_is(name):
    plain = CONFIG.identity()
    assert name not in plain
    found = dataclasses.replace(CONFIG, **{name: OTHER[name]}).identity()
    other = OTHER[name]
    assert found.pop(name) == (list(other) if isinstance(other, tuple) else other)
    assert found == plain


@pytest.mark.parametrize("name", LATER)
def test_each_changes_what_is_computed(name):
    more = {"local_blocks": (2,)} if name.startswith("local_") and name != "local_blocks" else {}
    more |= {"local_window": 3} if name == "local_blocks" else {}
    before, params = made(**more | ({} if name != "local_blocks" else {"local_blocks": (2,)}))
    after, own = made(**more | {name: OTHER[name]})
    params = own if name == "head_features" else params
    changed = after.apply(params, TOKENS)
    if name != "head_features":
        assert jnp.max(jnp.abs(changed - before.apply(params, TOKENS))) > 1e-3
    else:
        assert params["blocks"]["attention"]["branch"]["query"]["kernel"].shape == (3, 16, 8)
        assert params["blocks"]["attention"]["branch"]["output"]["kernel"].shape == (3, 8, 16)


def test_scales_of_embedding_and_logits_are_factors():
    model, params = made(tied=False)
    larger = made(tied=False, embedding_scale=4.0)[0]
    np.testing.assert_array_equal(larger.embed(params, TOKENS), 4 * model.embed(params, TOKENS))
    half = made(tied=False, output_scale=0.5)[0]
    np.testing.assert_array_equal(half.apply(params, TOKENS), 0.5 * model.apply(params, TOKENS))


def test_the_scale_of_attention_stands_for_that_of_its_width():
    model, params = made()
    same = made(attention_scale=8**-0.5)[0]
    np.testing.assert_array_equal(same.apply(params, TOKENS), model.apply(params, TOKENS))


def test_a_share_of_a_head_is_turned_and_the_rest_is_left():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    config = dataclasses.replace(CONFIG, rotary_share=0.5, rotary_base=70.0)
    angles = angles_of(config, 5)
    np.testing.assert_array_equal(angles, rotary_angles(5, 4, 70.0))
    turned = rotate(x, angles)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], rotate(x[..., :4], angles))
    assert jnp.max(jnp.abs(turned - x)[..., :4]) > 0.1


def test_a_token_of_a_local_block_sees_its_window():
    config = dataclasses.replace(CONFIG, local_blocks=(2,), local_window=2)
    np.testing.assert_array_equal(
        seen_by(config, 4, True), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    )
    for local in (False, jnp.asarray(False)):
        np.testing.assert_array_equal(seen_by(config, 4, local), np.tri(4))
    np.testing.assert_array_equal(seen_by(config, 4, jnp.asarray(True)), seen_by(config, 4, True))


def test_what_lies_before_all_windows_is_not_seen():
    """Three local blocks of a window of 2 reach back three tokens, and no further."""
    model, params = made(local_blocks=(1, 2, 3), local_window=2)
    changed = TOKENS.at[:, 0].add(1) % 11
    before, after = model.apply(params, TOKENS), model.apply(params, changed)
    np.testing.assert_array_equal(before[:, 4:], after[:, 4:])
    assert jnp.all(jnp.any(before[:, 3] != after[:, 3], -1))


LOCAL = {"local_blocks": (1, 3), "local_window": 3, "local_rotary_base": 50.0}


def test_scanned_unrolled_and_single_blocks_agree_where_blocks_differ():
    model, params = made(**LOCAL)
    logits = model.apply(params, TOKENS)
    scanned = made(scan_layers=True, **LOCAL)[0]
    np.testing.assert_allclose(scanned.apply(params, TOKENS), logits, atol=1e-6)
    h = model.hidden_states(params, TOKENS)[-1]
    np.testing.assert_allclose(model.readout(params, h), logits, atol=1e-6)
    assert [bool(model.factors(b)["attention"]["local"]) for b in (1, 2, 3)] == [True, False, True]


def test_a_window_as_long_as_the_text_is_none():
    model, params = made()
    wide = made(local_blocks=(1, 2, 3), local_window=8)[0]
    np.testing.assert_array_equal(wide.apply(params, TOKENS), model.apply(params, TOKENS))


def test_the_closed_form_of_a_stack_knows_which_blocks_are_local():
    model, params = made(**LOCAL, attention_scale=0.6, rotary_share=0.5, head_features=4)
    stack = Parts(model, params).stack(1, 3)
    h = np.random.default_rng(0).normal(size=(6, 16))
    with jax.enable_x64(True):
        expected = np.asarray(jax.jacfwd(stack)(jnp.asarray(h)))
    got = stack.sequence_jacobian(h)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_a_branch_as_a_function_is_that_of_its_block():
    model, params = made(**LOCAL)
    x = jax.random.normal(jax.random.key(1), (1, 8, 16))
    for block in (1, 2):
        points = model.points(model.layer(params, block), x, "attention")
        branch = model.pieces(params, block, "attention")["branch"]
        np.testing.assert_allclose(branch(points["read"]), points["output"], atol=1e-6)
    alike = jax.tree.map(lambda p: p.at[1].set(p[0]), params["blocks"])
    first, second = (
        model.pieces(params | {"blocks": alike}, b, "attention")["branch"](x) for b in (1, 2)
    )
    assert jnp.max(jnp.abs(first - second)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotary_share": 0.4}, ["rotary_share=0.4", "not 3", "for example 0.25"]),
        ({"rotary_share": 0.0}, ["rotary_share=0", "above 0"]),
        ({"rotary_base": 1.0}, ["rotary_base=1", "above 1"]),
        ({"local_rotary_base": 0.5}, ["local_rotary_base=0.5", "above 1"]),
        ({"local_blocks": (1, 4)}, ["local_blocks=1,4", "no block 4"]),
        ({"local_blocks": (1, 1)}, ["local_blocks=1,1", "once"]),
        ({"head_features": 3}, ["head_features=3", "even head width"]),
        ({"output_scale": 0.0}, ["output_scale=0", "above 0"]),
    ],
)
def test_values_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        made(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_heads_need_not_divide_the_width_where_their_own_is_given():
    model, params = made(heads=3, head_features=4)
    assert model.apply(params, TOKENS).shape == (2, 8, 11)
