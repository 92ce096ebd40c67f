"""Rows of the table of norms against PyTorch and the transformers library: values, and products
of vectors with Jacobians against PyTorch's reverse mode."""

import pytest

pytest.importorskip("torch", reason="torch and transformers: `make test-parity` installs them")
pytest.importorskip("transformers", reason="transformers: `make test-parity` installs it")

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import torch

from normjax.norms import NORMS
from tests.parity.tiny_models import Widened

pytestmark = pytest.mark.slow
D, EPS = 24, 1e-3
X = np.random.default_rng(0).normal(size=(3, 5, D)) * np.array([1.0, 1e-2, 30.0])[:, None, None]
V = np.random.default_rng(1).normal(size=X.shape)
ROUNDOFFS = 32
"""Of a row of values, in units of the dtype's roundoff and of the row's largest: about eight on
either side for a value; a product with the Jacobian computes the value's parts again, and two
sums of d terms more."""


def of(module, name, *arguments, **keywords):
    """A module of the library's."""
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return lambda: getattr(code, name)(*arguments, **keywords)


class Normalized(torch.nn.Module):
    """PyTorch's ``normalize``, times a number or a learned one."""

    def __init__(self, times, eps, learned=False):
        super().__init__()
        self.times, self.eps = times, eps
        self.gain = torch.nn.Parameter(torch.tensor(float(times))) if learned else None

    def forward(self, x):
        times = self.times if self.gain is None else self.gain
        return times * torch.nn.functional.normalize(x, dim=-1, eps=self.eps)


class Scaled(torch.nn.Module):
    """ZAYA's residual scaling of a branch, beside a stream of zeros."""

    def __init__(self):
        super().__init__()
        self.of = of("zaya", "ZayaResidualScaling", D)()

    def forward(self, x):
        return self.of(x, torch.zeros_like(x))


WEIGHT, BOTH = {"gain": "weight"}, {"gain": "weight", "bias": "bias"}
NORM, LAYER = torch.nn.RMSNorm, torch.nn.LayerNorm
CASES = [
    ("rmsnorm", lambda: NORM(D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm", of("llama", "LlamaRMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm", of("olmo2", "Olmo2RMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm", of("doge", "DogeRMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm", of("muse_spark", "MuseSparkRMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm_offset", of("gemma2", "Gemma2RMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm_offset", of("muse_spark", "MuseSparkTextCenteredRMSNorm", D, eps=EPS), WEIGHT, EPS),
    ("rmsnorm_plain", lambda: NORM(D, eps=EPS, elementwise_affine=False), {}, EPS),
    ("rmsnorm_plain", of("deepseek_v4", "DeepseekV4UnweightedRMSNorm", eps=EPS), {}, EPS),
    ("rmsnorm_plain", of("inkling2", "Inkling2UnweightedRMSNorm", eps=EPS), {}, EPS),
    ("layernorm", lambda: LAYER(D, eps=EPS), BOTH, EPS),
    ("layernorm_nobias", lambda: LAYER(D, eps=EPS, bias=False), WEIGHT, EPS),
    ("layernorm_nobias", of("cohere", "CohereLayerNorm", D, eps=EPS), WEIGHT, EPS),
    ("layernorm_plain", lambda: LAYER(D, eps=EPS, elementwise_affine=False), {}, EPS),
    ("layernorm_plain", of("olmo", "OlmoLayerNorm", D), {}, 1e-5),
    ("rmsnorm_simple", lambda: Normalized(D**0.5, 1e-12), {}, 0.0),
    ("scalenorm", lambda: Normalized(D**0.5, 1e-12, learned=True), {"gain": "gain"}, 0.0),
    ("l2norm", lambda: Normalized(1.0, 1e-12), {}, 0.0),
    ("l2norm", of("dory", "DoryL2Norm", eps=0.0), {}, 0.0),
    ("l2clip", of("inkling2", "Inkling2L2Clip", D**0.5), {}, 0.0),
    ("affine", Scaled, {"gain": "of.hidden_states_scale", "shift": "of.hidden_states_bias"}, 0.0),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("name", "make", "where", "eps"), CASES,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)],
)  # fmt: skip
def test_a_norm_is_the_library_s_in_value_and_in_its_reverse_mode(name, make, where, eps, dtype):
    row, wide = NORMS[name], dtype == "float64"
    torch.manual_seed(2)
    module = make().to(getattr(torch, dtype))
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, dtype=parameter.dtype)
    for unseen in ("of.residual_bias",):
        if isinstance(module, Scaled):
            module.get_parameter(unseen).data.zero_()
    x = torch.tensor(X.astype(dtype), requires_grad=True)
    own = [module.get_parameter(p) for p in where.values()]
    if wide:
        with Widened():
            y = module(x)
    else:
        y = module(x)
    pulled = torch.autograd.grad(y, [x, *own], torch.tensor(V.astype(dtype)))
    with jax.enable_x64(wide):
        held = {k: jnp.asarray(p.detach().numpy()) for k, p in zip(where, own, strict=True)}
        assert set(held) == {p.name for p in row.parameters}
        ours, back = jax.vjp(lambda x, p: row(x, p, eps), jnp.asarray(X.astype(dtype)), held)
        to_x, to_own = back(jnp.asarray(V.astype(dtype)))
    tolerance = ROUNDOFFS * np.finfo(dtype).eps
    _agree(ours, y.detach().numpy(), tolerance)
    _agree(to_x, pulled[0].numpy(), tolerance)
    for key, theirs in zip(where, pulled[1:], strict=True):
        _agree(np.ravel(to_own[key]), theirs.numpy().ravel(), tolerance)
    if wide:
        closed = row.derivative_at(X, {k: np.asarray(v) for k, v in held.items()}, eps)
        _agree(closed.vjp(V), pulled[0].numpy(), tolerance)


def _agree(ours, theirs, tolerance):
    ours, size = np.asarray(ours), np.max(np.abs(theirs), axis=-1, keepdims=True)
    np.testing.assert_array_less(np.abs(ours - theirs) / size, tolerance)
