"""The decoder against a float64 referee in loops, and what must hold for every placement."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax import layers as attention
from normjax.decoder import Decoder, DecoderConfig, check
from normjax.equation import MODEL_NORM, Sublayer
from normjax.errors import UserError
from normjax.placement import Placement
from normjax.placements import COMMON

V, T = 11, 6
TINY = DecoderConfig(depth=2, width=16, heads=2, tied=False)
EVERY = [(name, residual) for name in COMMON for residual in (True, False)]


def some(*names, pairs=EVERY, marks=pytest.mark.slow):
    """The same pairs; those without a residual path and not named are longer checks."""
    return [
        pytest.param(*pair, marks=() if pair[1] or pair[0] in names else marks) for pair in pairs
    ]


TOKENS = np.array([[7, 2, 9, 0, 4, 5]], np.int32)  # all different: one embedding per position


def make(vocabulary=V, window=T, base=TINY, **changes):
    return Decoder(dataclasses.replace(base, **changes), vocabulary, window)


def random_params(model, seed=0):
    """Parameters of ordinary size, gains and learned weights away from their initial values."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        mean = 0.5 if name in ("gain", "write") else 0.0
        spread = 0.4 if name in ("kernel", "embedding", "positions") else 0.1
        return (mean + spread * rng.normal(size=leaf.shape)).astype(np.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def as_dtype(params, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


# --- the referee: float64, one head, one query, one key at a time ---------------------------------


def plain_norm(name, eps, p, x):
    if name == "identity":
        return x
    c = x - x.mean(-1, keepdims=True) if name.startswith("layernorm") else x
    y = c / np.sqrt((c * c).mean(-1, keepdims=True) + eps)
    gain = p.get("gain", 1.0) + (1.0 if name == "rmsnorm_offset" else 0.0)
    return y * gain + p.get("bias", 0.0)


def plain_linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def plain_cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def plain_turn(x, t):
    """Multiply the pairs (x_i, x_{i + C/2}) by exp(i t 10000^(-2 i / C))."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * t * 10000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def plain_attention(c, p, x):
    length, width = len(x), c.width // c.heads
    groups = c.heads // (c.kv_heads or c.heads)
    q, k, v = (plain_linear(p[name], x) for name in ("query", "key", "value"))
    inner = functools.partial(plain_norm, c.norm_row.name, c.norm_eps)
    if "value" in c.inner_norms:
        heads = v.reshape(length, -1, v.shape[1] if c.inner_norms["value"] == "heads" else width)
        v = inner(p["value_norm"], heads).reshape(v.shape)
    if c.inner_norms.get("query") == "heads":
        q = inner(p.get("query_norm", {}), q)
    if c.inner_norms.get("key") == "heads":
        k = inner(p.get("key_norm", {}), k)
    out = np.zeros((length, c.width))
    for head in range(c.heads):
        mine = slice(head * width, (head + 1) * width)
        shared = slice(head // groups * width, (head // groups + 1) * width)
        for t in range(length):
            weights = []
            for s in range(t + 1):
                a, b = q[t, mine], k[s, shared]
                a = inner(p.get("query_norm", {}), a) if c.inner_norms.get("query") == "head" else a
                b = inner(p.get("key_norm", {}), b) if c.inner_norms.get("key") == "head" else b
                if c.positions == "rotary":
                    a, b = plain_turn(a, t), plain_turn(b, s)
                weights.append(math.exp(plain_cap(a @ b / math.sqrt(width), c.attention_softcap)))
            for s, weight in enumerate(weights):
                out[t, mine] += weight / sum(weights) * v[s, shared]
    return plain_linear(p["output"], out)


def plain_mlp(c, p, x):
    hidden = plain_linear(p["in"], x)
    kind = c.mlp_row.title
    if kind == "relu":
        hidden = np.where(hidden > 0, hidden, 0.0)
    elif kind == "gelu":  # by the published approximation with tanh
        hidden *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    elif kind == "swiglu":
        gate = plain_linear(p["gate"], x)
        hidden *= gate / (1 + np.exp(-gate))
    return plain_linear(p["out"], hidden)


def plain_decoder(model, params, tokens):
    """Logits (T, V) of one sequence (T,), as the equations say."""
    c = model.config
    place = c.placement_row
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    norm = functools.partial(plain_norm, c.norm_row.name, c.norm_eps)
    h = params["embedding"][tokens]
    if c.positions == "learned":
        h = h + params["positions"][: len(tokens)]
    H = [h] * 2 if place.name == "hyper_connections" else [h]  # streams, or sources so far
    for block in range(1, c.depth + 1):
        own = jax.tree.map(lambda leaf, i=block - 1: leaf[i], params.get("blocks", {}))
        for name in c.sublayers:
            row, p = place.of(name).at(block, c.depth), own[name]
            branch = functools.partial(
                {"attention": plain_attention, "mlp": plain_mlp}[name], c, p["branch"]
            )
            if place.name == "hyper_connections":
                x = sum(w * stream for w, stream in zip(p["read_weights"][0], H, strict=True))
                y = branch(norm(p.get("pre_norm", {}), x))
                A = p["keep_weights"] if c.residual else np.zeros((2, 2))
                H = [A[i, 0] * H[0] + A[i, 1] * H[1] + p["write_weights"][i, 0] * y for i in (0, 1)]
            elif place.name == "attention_residuals":
                y = branch(norm(p.get("pre_norm", {}), plain_softmax_mix(p["read_query"], H)))
                H = [*([*H] if c.residual else [0 * each for each in H]), y]
            else:
                h = H[0]
                read = norm(p.get("pre_norm", {}), h) if row.pre_norm else h
                out = branch(row.scale * read)
                out = norm(p.get("branch_norm", {}), out) if row.branch_norm else out
                kept = norm(p["pre_norm"], h) if row.skip_norm else h  # the same norm once more
                b = p.get("write", own.get("write", row.write))
                h = (row.keep * kept if row.keep else 0.0) + b * out
                H = [norm(p.get("post_norm", {}), h) if row.post_norm else h]
    query = params.get("readout_query")
    h = sum(H) if query is None else plain_softmax_mix(query, H)
    if {"auto": place.final_norm, "on": True, "off": False}[c.final_norm]:
        h = norm(params.get("final_norm", {}), h)
    logits = h @ params["embedding"].T if c.tied else plain_linear(params["output"], h)
    return plain_cap(logits, c.output_softcap)


def plain_softmax_mix(query, sources):
    """sum_i softmax_i(q . v_i / rms(v_i)) v_i, position by position."""
    out = np.zeros_like(sources[0])
    for t in range(len(out)):
        rows = [source[t] for source in sources]
        weights = [math.exp(query @ v / math.sqrt(np.mean(v * v) + 1e-6)) for v in rows]
        out[t] = sum(w / sum(weights) * v for w, v in zip(weights, rows, strict=True))
    return out


# --- every placement, with and without the residual path ------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One placement: its parameters and its compiled programs."""

    model: Decoder
    params: dict

    @functools.cache  # noqa: B019
    def program(self, scanned):
        """(params, tokens) -> logits, and the derivative of every position by every parameter."""
        model = make(base=self.model.config, scan_layers=scanned, remat=scanned)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=V), jnp.float32)

        def by_position(params, tokens):
            logits = model.apply(params, tokens)
            return logits[0] @ weights, logits

        return jax.jit(jax.jacrev(by_position, has_aux=True))

    def __hash__(self):
        return hash(self.model)


@functools.cache
def case(name, residual):
    model = make(placement=name, residual=residual)
    return Case(model, random_params(model))


@pytest.mark.parametrize(("name", "residual"), some("pre", "post"))
def test_no_position_sees_the_future(name, residual):
    """By derivative: exactly 0 for s > t, and not 0 for s <= t. By changed tokens: no bit moves."""
    it = case(name, residual)
    jacobian, logits = it.program(False)(it.params, TOKENS)
    reach = np.abs(np.asarray(jacobian["embedding"])).sum(-1)[:, TOKENS[0]]
    np.testing.assert_array_equal(reach[np.triu_indices(T, 1)], 0)
    assert np.all(reach[np.tril_indices(T)] > 0)
    for t in (1, 4):
        changed = TOKENS.copy()
        changed[0, t:] = [10, 3, 8, 6, 1][: T - t]
        other = it.program(False)(it.params, changed)[1]
        chex.assert_trees_all_equal(other[:, :t], logits[:, :t])
        assert float(jnp.max(jnp.abs(other[:, t:] - logits[:, t:]))) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 1e17, 1e19, 1e20, 1e25])
def test_no_position_sees_the_future_where_logits_overflow(scale):
    """A logit of -inf may make a NaN, which is noticed; it may not make room for what comes."""
    config = dataclasses.replace(TINY, width=4, heads=1, positions="none")
    layer, eye = attention.Attention(config), {"kernel": jnp.eye(4)}
    params = dict.fromkeys(("query", "key", "value", "output"), eye)
    x = jnp.eye(4)[None, :3] * jnp.float32(scale)
    for sign in (1.0, -1.0):
        signed = {"params": params | {"key": {"kernel": sign * jnp.eye(4)}}}
        first, slope = (
            transform(lambda x, p=signed: layer.apply(p, x)[0, 0])(x)
            for transform in (lambda f: f, jax.jacrev)
        )
        # The first position sees itself only: its output is its own value, or no number.
        assert bool(jnp.isnan(first).all()) or chex.assert_trees_all_close(first, x[0, 0]) is None
        assert not np.isfinite(slope).all() or not np.any(slope[:, 0, 1:])


@pytest.mark.parametrize(("name", "residual"), some("pre", "post"))
def test_scanned_and_recomputed_equals_unrolled(name, residual):
    """The same sums in another order: a few dozen roundings of each array's largest entry."""
    it = case(name, residual)
    plain, other = (it.program(scanned)(it.params, TOKENS) for scanned in (False, True))
    chex.assert_trees_all_equal_shapes_and_dtypes(plain, other)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        allowed = 128 * float(jnp.finfo(jnp.float32).eps) * float(jnp.max(jnp.abs(a)))
        chex.assert_trees_all_close(a, b, rtol=0, atol=allowed)


@pytest.mark.parametrize(("name", "residual"), some("pre", "post"))
def test_float32_is_the_equation(name, residual):
    it = case(name, residual)
    logits = np.asarray(it.program(False)(it.params, TOKENS)[1][0])
    expected = plain_decoder(it.model, it.params, TOKENS[0])
    # Float32 rounds about a hundred times on the way; softmax and norms amplify a little.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "residual"),
    [*some("pre", "post"), pytest.param("layernorm_scaling", True)],
)
def test_float64_is_the_equation(name, residual, x64):
    wide = {"dtype": "float64", "param_dtype": "float64"}
    model = make(placement=name, residual=residual, positions="learned", **wide)
    params = random_params(model)
    logits = jax.jit(model.apply)(params, TOKENS)
    assert logits.dtype == jnp.float64
    expected = plain_decoder(model, params, TOKENS[0])
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "residual", "dtype"),
    [pytest.param(*pair, "bfloat16", marks=() if pair[1] else pytest.mark.slow) for pair in EVERY]
    + [pytest.param(*pair, "float16", marks=() if pair[0] == "pre" else pytest.mark.slow)
       for pair in EVERY],
)  # fmt: skip
def test_low_precision_is_close(name, residual, dtype):
    it = case(name, residual)
    model = make(base=it.model.config, dtype=dtype, scan_layers=True)
    logits = jax.jit(model.apply)(it.params, TOKENS)
    assert logits.dtype == jnp.float32
    expected = plain_decoder(it.model, it.params, TOKENS[0])
    # About twenty roundings in a row, each of half a unit of the largest entry.
    allowed = 10 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=allowed)


def test_remat_alone_changes_no_number():
    it = case("pre", True)
    gradients = []
    for remat in (False, True):
        model = make(base=it.model.config, remat=remat)
        loss = lambda p, model=model: jnp.sum(jnp.sin(model.apply(p, TOKENS)))  # noqa: E731
        gradients.append(jax.jit(jax.grad(loss))(it.params))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        allowed = 128 * float(jnp.finfo(jnp.float32).eps) * float(jnp.max(jnp.abs(a)))
        chex.assert_trees_all_close(a, b, rtol=0, atol=allowed)


# --- every option against the referee -------------------------------------------------------------

OPTIONS = {
    "grouped": {"heads": 4, "kv_heads": 2, "bias": True},
    "one key head": {"heads": 4, "kv_heads": 1, "qk_norm": True},
    "over all heads": {"heads": 4, "kv_heads": 2, "qk_norm": True, "qk_norm_over": "heads"},
    "values over all heads": {
        "heads": 4, "kv_heads": 2, "norm": "layernorm",
        "placement": Placement("values", "here", Sublayer(
            pre_norm=MODEL_NORM, inner_norms=("value over heads", "query")
        )),
    },
    "layernorm, caps": {"norm": "layernorm", "qk_norm": True, "attention_softcap": 0.5,
                        "output_softcap": 0.7, "bias": True},
    "swiglu, tied": {"mlp": "swiglu", "tied": True, "norm": "rmsnorm_offset"},
    "relu, sandwich": {"mlp": "relu", "placement": "sandwich", "norm": "layernorm_nobias"},
    "plain norm, final off": {"norm": "rmsnorm_plain", "final_norm": "off", "mlp_width": 5},
    "post with final": {"placement": "post", "final_norm": "on", "norm": "layernorm_plain"},
    "no norm at all": {"norm": "identity", "qk_norm": True, "placement": "sandwich"},
    "no attention": {"attention": "none", "mlp": "swiglu"},
    "no mlp": {"mlp": "none", "positions": "none"},
    "odd head width": {"width": 15, "heads": 3},
    "large eps": {"norm_eps": 0.3, "depth": 1},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_are_their_equations(options, x64):
    wide = {"dtype": "float64", "param_dtype": "float64"}
    model = make(**({"positions": "learned"} | wide | options))
    params = random_params(model, seed=2)
    logits = jax.jit(model.apply)(params, TOKENS)[0]
    expected = plain_decoder(model, params, TOKENS[0])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_queries_and_keys_over_all_heads_are_per_head_where_there_is_one():
    one, other = (make(heads=1, qk_norm=True, qk_norm_over=over) for over in ("head", "heads"))
    params = random_params(one)
    chex.assert_trees_all_equal_shapes(params, random_params(other))
    chex.assert_trees_all_equal(*(jax.jit(m.apply)(params, TOKENS) for m in (one, other)))
    one, other = (make(heads=4, qk_norm=True, qk_norm_over=over) for over in ("head", "heads"))
    shape = random_params(other)["blocks"]["attention"]["branch"]["query_norm"]["gain"].shape
    assert shape == (other.config.depth, other.config.width)
    logits = [jax.jit(m.apply)(m.init(jax.random.key(0)), TOKENS) for m in (one, other)]
    assert float(jnp.abs(logits[0] - logits[1]).max()) > 1e-4


def test_rotary_in_float64_is_its_equation(x64):
    model = make(positions="rotary", dtype="float64", param_dtype="float64")
    params = random_params(model)
    logits = jax.jit(model.apply)(params, TOKENS)[0]
    expected = plain_decoder(model, params, TOKENS[0])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_grouped_heads_are_full_heads_with_repeated_weights():
    grouped, full = make(heads=4, kv_heads=2), make(heads=4)
    params = random_params(grouped)
    repeated = jax.tree.map(np.copy, params)
    branch = repeated["blocks"]["attention"]["branch"]
    for name in ("key", "value"):
        kernel = branch[name]["kernel"].reshape(2, 16, 2, 4)  # (L, D, K, C)
        branch[name]["kernel"] = np.repeat(kernel, 2, axis=2).reshape(2, 16, 16)
    assert grouped.parameter_count() < full.parameter_count()
    chex.assert_trees_all_close(
        jax.jit(grouped.apply)(params, TOKENS), jax.jit(full.apply)(repeated, TOKENS), rtol=1e-5,
        atol=1e-5,
    )  # fmt: skip


def test_shorter_sequences_are_prefixes():
    """T <= window is allowed, and gives what the longer one gives there."""
    model = make(positions="learned")
    params = random_params(model)
    f = jax.jit(model.apply)
    chex.assert_trees_all_close(
        f(params, TOKENS[:, :4]), f(params, TOKENS)[:, :4], rtol=1e-5, atol=1e-5
    )


def test_sequences_of_a_batch_are_independent():
    model = make(scan_layers=True)
    params = random_params(model)
    batch = np.concatenate([TOKENS, TOKENS[:, ::-1], (TOKENS + 1) % V])
    logits = jax.jit(model.apply)(params, batch)
    chex.assert_shape(logits, (3, T, V))
    for row, tokens in zip(logits, batch, strict=True):
        expected = plain_decoder(model, params, tokens)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_rotary_depends_on_the_distance_only(monkeypatch):
    """Every position counted from 1000 instead of 0 gives the same logits."""
    model = make(positions="rotary", depth=1)
    params = random_params(model)
    here = jax.jit(lambda p: model.apply(p, TOKENS))(params)
    angles = attention.rotary_angles
    shifted = lambda t, c, **rest: angles(1000 + t, c, **rest)[1000:]  # noqa: E731
    monkeypatch.setattr(attention, "rotary_angles", shifted)
    there = jax.jit(lambda p: model.apply(p, TOKENS))(params)
    # Angles near 1000 are known to 6e-5 only.
    chex.assert_trees_all_close(there, here, rtol=0, atol=2e-4 * float(jnp.max(jnp.abs(here))))
    assert not np.array_equal(here, there)


# --- what is left when a part is removed ----------------------------------------------------------


def names(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    flat, _ = jax.tree_util.tree_flatten_with_path(shapes)
    return {"/".join(entry.key for entry in path) for path, _ in flat}


ATTENTION = {f"blocks/attention/branch/{n}/kernel" for n in ("query", "key", "value", "output")}
MLP = {f"blocks/mlp/branch/{n}/kernel" for n in ("in", "out")}
NORM_READ = {f"blocks/{n}/pre_norm/gain" for n in ("attention", "mlp")}


def test_parameters_vanish_with_their_part():
    base = ATTENTION | MLP | NORM_READ | {"embedding", "final_norm/gain"}
    made = functools.partial(make, tied=True)
    assert names(made()) == base
    assert names(made(attention="none")) == base - ATTENTION - {"blocks/attention/pre_norm/gain"}
    assert names(made(mlp="none")) == base - MLP - {"blocks/mlp/pre_norm/gain"}
    assert names(made(attention="none", mlp="none")) == {"embedding", "final_norm/gain"}
    assert names(made(norm="identity")) == ATTENTION | MLP | {"embedding"}
    assert names(made(placement="none")) == ATTENTION | MLP | {"embedding"}
    assert names(made(residual=False)) == base
    assert names(made(positions="none")) == base
    assert names(made(positions="learned")) == base | {"positions"}
    assert names(made(final_norm="off")) == base - {"final_norm/gain"}
    assert names(made(tied=False)) == base | {"output/kernel"}
    everything = {"attention": "none", "mlp": "none", "norm": "identity", "positions": "none"}
    assert names(made(**everything, residual=False)) == {"embedding"}
    gates = names(made(mlp="swiglu")) - base
    assert gates == {"blocks/mlp/branch/gate/kernel"}
    added = names(made(qk_norm=True)) - base
    assert added == {f"blocks/attention/branch/{n}_norm/gain" for n in ("query", "key")}
    learned = names(made(placement="layerscale")) - base
    assert learned == {f"blocks/{n}/write" for n in ("attention", "mlp")}


@pytest.mark.parametrize("residual", [True, False])
def test_without_attention_a_position_sees_itself_only(residual):
    model = make(attention="none", positions="none", residual=residual)
    params = random_params(model)
    order = np.array([3, 0, 5, 1, 4, 2])
    f = jax.jit(model.apply)
    logits = f(params, TOKENS)
    chex.assert_trees_all_close(f(params, TOKENS[:, order]), logits[:, order], rtol=1e-6, atol=1e-6)
    assert model.config.sublayers == ("mlp",)


@pytest.mark.parametrize("tied", [True, False])
def test_without_attention_and_mlp_a_bigram_table_is_left(tied):
    model = make(attention="none", mlp="none", positions="none", tied=tied, norm_eps=0.0)
    params = random_params(model)
    logits = jax.jit(model.apply)(params, TOKENS)[0]
    e = params["embedding"].astype(np.float64)
    read_out = e.T if tied else params["output"]["kernel"]
    rms = np.sqrt((e * e).mean(-1, keepdims=True))
    table = (e / rms * params["final_norm"]["gain"]) @ read_out
    np.testing.assert_allclose(logits, table[TOKENS[0]], rtol=1e-5, atol=1e-5)
    assert model.config.sublayers == ()


def test_without_positions_one_block_reads_a_set():
    """The order of earlier tokens does not matter to the last position; with rotary it does."""
    swapped = TOKENS[:, [3, 0, 4, 2, 1, 5]]
    difference = {}
    for positions in ("none", "rotary", "learned"):
        model = make(positions=positions, depth=1)
        params = random_params(model)
        f = jax.jit(model.apply)
        difference[positions] = float(
            jnp.max(jnp.abs(f(params, TOKENS)[0, -1] - f(params, swapped)[0, -1]))
        )
    assert difference["none"] < 1e-5 < 1e-3 < min(difference["rotary"], difference["learned"])


# --- initialization -------------------------------------------------------------------------------

BIG = DecoderConfig(depth=3, width=48, heads=4, tied=False, positions="learned")
BETA = (8 * 3) ** -0.25
GLOROT = {"square": (2 / 96) ** 0.5, "mlp": (2 / (48 + 192)) ** 0.5}


def expected_stddevs(placement):
    """Published standard deviation of every matrix, by the last part of its name."""
    if placement == "deepnorm":  # Glorot; beta on value, output and both of the MLP
        square, mlp = GLOROT["square"], GLOROT["mlp"]
        inner = {"query": square, "key": square, "value": BETA * square, "output": BETA * square,
                 "in": BETA * mlp, "out": BETA * mlp}  # fmt: skip
        return inner, 48**-0.5, (2 / (48 + 97)) ** 0.5
    last = 0.02 if placement == "layernorm_scaling" else 0.02 / 6**0.5
    inner = dict.fromkeys(("query", "key", "value", "in"), 0.02) | {"output": last, "out": last}
    return inner, 0.02, 0.02


@pytest.mark.parametrize("placement", ["pre", "deepnorm", "layernorm_scaling"])
def test_initial_values_have_the_stated_spread(placement):
    """Of n normal draws the variance is known to sqrt(2/n) and the mean to sigma/sqrt(n)."""
    model = make(base=BIG, vocabulary=97, window=40, placement=placement)
    params = jax.jit(model.init)(jax.random.key(3))
    inner, embedding, output = expected_stddevs(placement)
    expected = {("embedding",): embedding, ("positions",): embedding, ("output",): output}
    matrices = {(n,): params[n] for n in ("embedding", "positions")}
    matrices["output",] = params["output"]["kernel"]
    for name, branch in params["blocks"].items():
        for part, value in branch["branch"].items():
            for block in range(3):
                matrices[name, part, block] = value["kernel"][block]
                expected[name, part, block] = inner[part]
    assert len(matrices) == 3 + 3 * 6
    for name, matrix in matrices.items():
        x = np.asarray(matrix, np.float64) / expected[name]
        assert abs(np.mean(x * x) - 1) < 5 * math.sqrt(2 / x.size), name
        assert abs(np.mean(x)) < 5 / math.sqrt(x.size), name
    draws = [np.asarray(m).ravel()[0] for m in matrices.values()]
    assert len(set(draws)) == len(draws)  # no two matrices are copies


def test_initialization_is_reproducible_whatever_the_program():
    """The same key gives the same float32 numbers: again, scanned, recomputed, in 64-bit mode."""
    key = jax.random.key(5)
    init = jax.jit(make().init)
    params = init(key)
    chex.assert_trees_all_equal(init(key), params)
    chex.assert_trees_all_equal(jax.jit(make(scan_layers=True, remat=True).init)(key), params)
    with jax.enable_x64(True):
        wide = jax.jit(make().init)(key)
    chex.assert_trees_all_equal_shapes_and_dtypes(wide, params)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, wide), jax.tree.map(np.asarray, params))
    other = init(jax.random.key(6))
    assert not np.array_equal(other["embedding"], params["embedding"])


def test_low_precision_parameters_have_their_dtype():
    model = make(param_dtype="bfloat16", norm="layernorm", bias=True, placement="layerscale")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}


def test_skipinit_starts_as_the_identity():
    model = make(placement="skipinit", tied=True)
    params = jax.jit(model.init)(jax.random.key(0))
    chex.assert_trees_all_equal(params["blocks"]["mlp"]["write"], jnp.zeros(2))
    logits = jax.jit(model.apply)(params, TOKENS)
    table = params["embedding"] @ params["embedding"].T
    chex.assert_trees_all_close(logits[0], table[TOKENS[0]], rtol=1e-6, atol=1e-7)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, TOKENS)))))(params)
    assert np.all(gradient["blocks"]["attention"]["write"] != 0)


def test_layerscale_starts_at_its_constant():
    params = jax.jit(make(placement="layerscale", depth=3).init)(jax.random.key(0))
    for name in ("attention", "mlp"):
        chex.assert_trees_all_equal(
            params["blocks"][name]["write"], jnp.full((3, 16), 0.1, jnp.float32)
        )


def test_deepnorm_without_residual_keeps_its_initialization():
    config = dataclasses.replace(TINY, placement="deepnorm", residual=False)
    assert config.initialization is DecoderConfig(placement="deepnorm").initialization
    assert not config.has_final_norm


# --- counts ---------------------------------------------------------------------------------------


def test_parameter_count_of_the_known_recipe():
    """4 (2 128 + 4 128^2 + 8 128^2) + 65 128 + 64 128 + 128 = 804096: 0.80 M."""
    recipe = DecoderConfig(depth=4, width=128, heads=4, positions="learned")
    assert make(65, 64, recipe).parameter_count() == 804_096


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True, "norm": "layernorm", "qk_norm": True, "placement": "layerscale"},
     {"mlp": "swiglu", "kv_heads": 1, "tied": True}, {"attention": "none", "mlp": "none"}],
)  # fmt: skip
def test_parameter_count_is_what_init_makes(changes):
    model = make(**changes)
    made = jax.jit(model.init)(jax.random.key(0))
    assert model.parameter_count() == sum(leaf.size for leaf in jax.tree.leaves(made))


def test_flops_by_hand():
    """Six per weight of a product, and 12 T D per block for scores and their weighted sum."""
    small = DecoderConfig(depth=2, width=16, heads=2, positions="learned", norm="layernorm")
    block, read_out, scores = 4 * 16 * 16 + 2 * 16 * 64, 11 * 16, 12 * 6 * 16
    assert make(base=small).flops_per_token() == 6 * (2 * block + read_out) + 2 * scores
    assert make(base=small, tied=False).flops_per_token() == make(base=small).flops_per_token()
    none = make(base=small, attention="none").flops_per_token()
    assert none == 6 * (2 * 2 * 16 * 64 + read_out)
    grouped = make(base=small, kv_heads=1).flops_per_token()
    assert grouped == make(base=small).flops_per_token() - 6 * 2 * 2 * 16 * 8
    gated = make(base=small, mlp="swiglu", mlp_width=40).flops_per_token()
    assert gated == 6 * (2 * (4 * 16 * 16 + 3 * 16 * 40) + read_out) + 2 * scores


def test_derived_widths():
    config = DecoderConfig(width=96, heads=4)
    assert (config.head_width, config.kv_head_count, config.hidden_width) == (24, 4, 384)
    assert dataclasses.replace(config, mlp="swiglu").hidden_width == 256  # 8/3 of 96
    assert dataclasses.replace(config, mlp_width=7, kv_heads=2).hidden_width == 7
    assert DecoderConfig(width=2, mlp="swiglu").hidden_width == 8


# --- refusals -------------------------------------------------------------------------------------

REFUSED = {
    "depth": (
        {"depth": 0},
        r"config\.model\.depth=0: must be from 1 to 10000; pass --config\.model\.depth=4$",
    ),
    "width": ({"width": 0}, r"width=0: must be from 1 to 65536"),
    "heads": ({"heads": 0}, r"heads=0: must be from 1 to 65536"),
    "negative": ({"kv_heads": -1}, r"kv_heads=-1: must be from 0 to 65536"),
    "division": ({"width": 128, "heads": 6}, r"heads=6: must divide the width 128; .* [48]$"),
    "more heads than width": ({"width": 4, "heads": 8}, r"heads=8: must divide .* example 4$"),
    "groups": ({"heads": 4, "kv_heads": 3}, r"kv_heads=3: must divide heads=4"),
    "odd": ({"width": 9, "heads": 3, "positions": "rotary"}, r"even head width.*positions=learned"),
    "placement": ({"placement": "sandwhich"}, r"sandwhich: must be one of .*mean 'sandwich'\?"),
    "norm": ({"norm": "rms_norm"}, r"norm=rms_norm: .*; did you mean 'rmsnorm'\?"),
    "mlp": ({"mlp": "gleu"}, r"mlp=gleu: must be one of gelu, .*mean 'gelu'"),
    "attention": ({"attention": "linear"}, r"attention=linear: must be one of softmax, none"),
    "positions": ({"positions": "rotery"}, r"positions=rotery.*mean 'rotary'"),
    "final": ({"final_norm": "true"}, r"final_norm=true: must be one of auto, on, off"),
    "init": ({"init": "gpt3"}, r"init=gpt3: .*mean 'gpt2'"),
    "dtype": ({"dtype": "float8"}, r"dtype=float8: must be one of float32"),
    "64 bits": ({"dtype": "float64"}, r"config\.model\.dtype=float64: .*enable_x64"),
    "eps": ({"norm_eps": -1e-6}, r"norm_eps=-1e-06: must be from 0 to 1000000"),
    "nan": ({"attention_softcap": math.nan}, r"attention_softcap=nan: must be from 0 to 1000000"),
    "inf": ({"output_softcap": math.inf}, r"output_softcap=inf: must be from 0 to 1000000"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_impossible_decoders_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make(base=DecoderConfig(), **changes)
    assert "\n" not in str(caught.value)


def test_the_prefix_names_the_flag():
    with pytest.raises(UserError, match=r"^config\.other\.depth=-1: "):
        check(DecoderConfig(depth=-1), "config.other")


def test_odd_heads_are_fine_where_nothing_rotates():
    odd = DecoderConfig(width=9, heads=3)
    check(dataclasses.replace(odd, positions="learned"))
    check(dataclasses.replace(odd, attention="none"))


# --- known weaknesses: each of these should pass --------------------------------------------------


def test_refusal_of_float64_parameters_names_their_field():
    with pytest.raises(UserError, match=r"param_dtype=float64"):
        make(param_dtype="float64")


@pytest.mark.parametrize("changes", [{"depth": 0}, {"heads": 4, "kv_heads": 3}, {"norm_eps": -1.0}])
def test_refusals_name_a_fix(changes):
    with pytest.raises(UserError, match=r"; (pass|use|for example) "):
        make(**changes)


# Not strict: whether eager and compiled draws differ in the last bit depends on the JAX version.
def test_initialization_compiled_by_the_caller_gives_the_same_bits():
    model, key = make(), jax.random.key(5)
    chex.assert_trees_all_equal(jax.jit(model.init)(key), model.init(key))


@pytest.mark.parametrize("size", [{"vocabulary": 0}, {"window": 0}])
def test_empty_vocabularies_and_windows_are_refused(size):
    with pytest.raises(UserError, match="must be at least 1"):
        make(**size)


@pytest.mark.parametrize("window", [1, 4])
def test_sequences_longer_than_the_window_are_refused(window):
    """With window 1 the one learned position is silently given to every token."""
    model = make(window=window, positions="learned")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(UserError, match="window"):
        jax.eval_shape(model.apply, shapes, jax.ShapeDtypeStruct((1, T), jnp.int32))


def test_logits_carry_float32_digits():
    model = make(dtype="bfloat16", scan_layers=True)
    logits = jax.jit(model.apply)(random_params(model), TOKENS)
    assert not np.array_equal(logits.astype(jnp.bfloat16).astype(jnp.float32), logits)
