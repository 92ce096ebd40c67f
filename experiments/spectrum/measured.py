"""The Jacobians of one decoder at one set of parameters, block by block and end to end.

The view is that of a token: d h'_i / d h_i at single positions i, keys and values of the other
positions held fixed, for several sequences. Per block its singular values, raw and with the radial
direction taken out, and the radial and tangential gains; from block 1 to L the logarithms of all
singular values, which are right over any range; for one short sequence the whole T d x T d Jacobian
of the stack; and the identities that the placement obeys exactly, as a test of the instrument.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from normjax.jacobians.blocks import Part, Parts
from normjax.jacobians.identities import dual_identities, postnorm_identity, prenorm_identity
from normjax.jacobians.radial import deflated_spectrum, directions, radial_gains
from normjax.norm_derivatives import Floats
from normjax.spectra.dense import singular_values
from normjax.spectra.depth_products import DepthProduct


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured; L blocks, B sequences, P positions, d features.

    Attributes:
      raw: (L, B, P, d) singular values of each block, descending.
      deflated: (L, B, P, d - 1), without the radial direction.
      gains: name -> (L, B, P): rr, rt, tr, tt and cosine, see :class:`RadialReport`.
      log_raw: (B, P, d) natural logarithms of the singular values from block 1 to L.
      log_deflated: (B, P, d - 1) of those without the radial direction.
      mean_square: (L + 1, B, P) of the stream before block 1 and after every block.
      sequence: (T d,) singular values of the whole-sequence Jacobian of the stack; empty where it
        was not asked for.
      defects: name -> the worst defect of an identity that should hold to rounding.
    """

    raw: Floats
    deflated: Floats
    gains: dict[str, Floats]
    log_raw: Floats
    log_deflated: Floats
    mean_square: Floats
    sequence: Floats
    defects: dict[str, float]

    @property
    def condition(self) -> Floats:
        """(L, B, P) raw condition numbers of the blocks."""
        return _ratio(self.raw)

    @property
    def deflated_condition(self) -> Floats:
        """(L, B, P) condition numbers without the radial direction."""
        return _ratio(self.deflated)


def _ratio(values: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return values[..., 0] / values[..., -1]


def measure(
    parts: Parts,
    tokens: np.ndarray,
    positions: tuple[int, ...],
    *,
    sequence_length: int = 0,
    identities: bool = False,
) -> Measured:
    """Measure the Jacobians of a decoder.

    Args:
      parts: the decoder with its parameters.
      tokens: (B, T) integers.
      positions: of the tokens looked at, from 0 to T - 1.
      sequence_length: tokens of the first sequence for the whole-sequence Jacobian; 0: none.
      identities: whether to test the placement's identities, in the first and the last block.

    Raises:
      UserError: parameters or derivatives that are not finite; a stream that is zero at a position.
    """
    L, d, picked = parts.config.depth, parts.config.width, list(positions)
    states = np.asarray(parts.hidden_states(tokens))
    at = states[:, :, picked]
    B, P = at.shape[1:3]
    raw, deflated = np.empty((L, B, P, d)), np.empty((L, B, P, d - 1))
    gains = {name: np.empty((L, B, P)) for name in ("rr", "rt", "tr", "tt", "cosine")}
    products = [[(DepthProduct(d), DepthProduct(d)) for _ in range(P)] for _ in range(B)]
    for block in range(1, L + 1):
        jacobians = parts.block(block).token_jacobians(states[block - 1])[:, picked]
        before, after = at[block - 1], at[block]
        write = _written(parts, block, after)
        for b in range(B):
            report = radial_gains(jacobians[b], before[b], after[b])
            for name, values in gains.items():
                values[block - 1, b] = getattr(report, name)
            spectrum = deflated_spectrum(jacobians[b], before[b], after[b], write=write[b])
            raw[block - 1, b], deflated[block - 1, b] = spectrum.raw, spectrum.deflated
            for p in range(P):
                whole, inner = products[b][p]
                whole.apply(jacobians[b, p])
                factor = jacobians[b, p]
                if block == 1:
                    factor = factor @ _tangential(before[b, p])
                if block == L:
                    factor = _tangential(write[b, p]) @ factor
                inner.apply(factor)
    logs = np.array([[[x.log_singular_values() for x in pair] for pair in row] for row in products])
    return Measured(
        raw, deflated, gains,
        np.asarray(logs[:, :, 0], np.float64), np.asarray(logs[:, :, 1, :-1], np.float64),
        np.mean(at**2, axis=-1),
        _whole_sequence(parts.stack(1, L), states[0, 0, :sequence_length]),
        _defects(parts, tokens[0], states[:, 0]) if identities else {},
    )  # fmt: skip


def _written(parts: Parts, block: int, after: Floats) -> Floats:
    """Return the direction in which nothing radial leaves: of u / g for a norm on the stream.

    The stream after such a norm is g u / s, so that u / g is along after / g^2.
    """
    params = parts.layer(block)[0]
    last = params[parts.sublayer_names[-1]] if parts.sublayer_names else {}
    gain = last.get("stream_norm", {}).get("gain")
    if gain is None or parts.config.norm not in ("rmsnorm", "rmsnorm_offset"):
        return after
    gain = np.asarray(gain) + (1.0 if parts.config.norm == "rmsnorm_offset" else 0.0)
    return after / gain**2 if np.all(gain != 0) else after


def _tangential(h: Floats) -> Floats:
    """Return I - u u^T."""
    u = directions("h", h)
    return np.eye(len(u)) - np.outer(u, u)


def _whole_sequence(stack: Part, h: Floats) -> Floats:
    if not len(h):
        return np.empty(0)
    values = singular_values(stack.sequence_jacobian(h).reshape(h.size, h.size))
    return np.asarray(values, np.float64)


def _defects(parts: Parts, tokens: np.ndarray, states: Floats) -> dict[str, float]:
    """Return the worst defect of every identity that this placement obeys."""
    place, found = parts.config.resolved_placement, {}
    if parts.config.norm == "identity":
        return {}
    tests = {}
    if place.read and not place.stream:
        tests["J u = a u + the branch's eps term"] = prenorm_identity
    if place.stream:
        tests["(u / g) J = the eps term"] = postnorm_identity
    for title, test in tests.items():
        found[title] = max(
            test(parts, block, name, _entering(parts, block, name, states[block - 1]))
            for block in {1, parts.config.depth}
            for name in parts.sublayer_names
        )
    if place.read and not place.stream and len(tokens) > 2:
        defects = dual_identities(parts, tokens)
        found["u . grad before = a u . grad after + the eps term"] = float(np.max(defects.exact))
    return found


def _entering(parts: Parts, block: int, name: str, h: Floats) -> Floats:
    """Return the stream that a sub-layer of a block reads, from the one that the block reads."""
    for each in parts.sublayer_names:
        if each == name:
            break
        h = np.asarray(parts.sublayer(block, each)(h))
    return h
