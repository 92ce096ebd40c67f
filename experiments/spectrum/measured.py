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

from normjax.diagnostics.identities import (
    dual_identities,
    has_postnorm_identity,
    has_prenorm_identity,
    postnorm_identity,
    prenorm_identity,
)
from normjax.jacobians.blocks import Part, Parts
from normjax.jacobians.radial import deflated_spectrum, radial_gains
from normjax.norm_derivatives import Floats
from normjax.spectra.dense import singular_values
from normjax.spectra.depth_products import DepthProduct


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured; L blocks, B sequences, P positions, d features of the state.

    Attributes:
      raw: (L, B, P, d) singular values of each block, descending.
      deflated: (L, B, P, d - m), without the m directions that the norms of the blocks forget: see
        ``Part.null_directions``; 1 for RMSNorm and where there is no norm, 2 for LayerNorm.
      gains: name -> (L, B, P): rr, rt, tr, tt and cosine, see :class:`RadialReport`.
      log_raw: (B, P, d) natural logarithms of the singular values from block 1 to L.
      log_deflated: (B, P, d - m) of those without these directions.
      mean_square: (L + 1, B, P) of the stream before block 1 and after every block.
      mean: (L + 1, B, P) of the same over its features.
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
    mean: Floats
    sequence: Floats
    defects: dict[str, float]


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
    L, d, picked = parts.config.depth, parts.config.state_width, list(positions)
    states = np.asarray(parts.hidden_states(tokens))
    at = states[:, :, picked]
    B, P = at.shape[1:3]
    nulls = [parts.block(block).null_directions(states[block - 1]) for block in range(1, L + 1)]
    m = nulls[0].right.shape[-1]
    raw, deflated = np.empty((L, B, P, d)), np.empty((L, B, P, d - m))
    gains = {name: np.empty((L, B, P)) for name in ("rr", "rt", "tr", "tt", "cosine")}
    products = [[(DepthProduct(d), DepthProduct(d)) for _ in range(P)] for _ in range(B)]
    for block in range(1, L + 1):
        jacobians = parts.block(block).token_jacobians(states[block - 1])[:, picked]
        before, after = at[block - 1], at[block]
        read, write = (side[:, picked] for side in nulls[block - 1])
        outward = parts.forgotten(after)
        for b in range(B):
            report = radial_gains(jacobians[b], before[b], after[b], read=read[b], write=outward[b])
            for name, values in gains.items():
                values[block - 1, b] = getattr(report, name)
            spectrum = deflated_spectrum(
                jacobians[b], before[b], after[b], read=read[b], write=write[b]
            )
            raw[block - 1, b] = spectrum.raw
            deflated[block - 1, b] = 0.0  # gains of zero take out more: these values are zero
            deflated[block - 1, b, :, : spectrum.deflated.shape[-1]] = spectrum.deflated
            for p in range(P):
                whole, inner = products[b][p]
                whole.apply(jacobians[b, p])
                factor = jacobians[b, p]
                if block == 1:
                    factor = factor @ _tangential(read[b, p])
                if block == L:
                    factor = _tangential(write[b, p]) @ factor
                inner.apply(factor)
    logs = np.array([[[x.log_singular_values() for x in pair] for pair in row] for row in products])
    return Measured(
        raw, deflated, gains,
        np.asarray(logs[:, :, 0], np.float64), np.asarray(logs[:, :, 1, :-m], np.float64),
        np.mean(at**2, axis=-1), np.mean(at, axis=-1),
        _whole_sequence(parts.stack(1, L), states[0, 0, :sequence_length]),
        _defects(parts, tokens[0], states[:, 0]) if identities else {},
    )  # fmt: skip


def _tangential(directions: Floats) -> Floats:
    """Return the projection on what is orthogonal to orthonormal directions (d, m)."""
    return np.eye(len(directions)) - directions @ directions.T


def _whole_sequence(stack: Part, h: Floats) -> Floats:
    if not len(h):
        return np.empty(0)
    values = singular_values(stack.sequence_jacobian(h).reshape(h.size, h.size))
    return np.asarray(values, np.float64)


def _defects(parts: Parts, tokens: np.ndarray, states: Floats) -> dict[str, float]:
    """Return the worst defect of every identity that this placement obeys."""
    found: dict[str, float] = {}
    for title, test, applies in (
        ("J u = a u + the branch's eps term", prenorm_identity, has_prenorm_identity),
        ("(u / g) J = the eps term", postnorm_identity, has_postnorm_identity),
    ):
        at = [
            (block, name) for block in {1, parts.config.depth} for name in parts.sublayer_names
            if applies(parts.config, block, name)
        ]  # fmt: skip
        if at:
            found[title] = max(
                test(parts, *where, _entering(parts, *where, states[where[0] - 1])) for where in at
            )
    if len(tokens) > 2 and parts.sublayer_names and all(
        has_prenorm_identity(parts.config, block, name)
        for block in range(1, parts.config.depth + 1) for name in parts.sublayer_names
    ):  # fmt: skip
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
