"""All claims in order, computed in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from experiments.claims import (
    attention_claims,
    block_claims,
    depth_claims,
    norm_claims,
    setting,
    taylor,
    vectors,
)
from experiments.claims.claim import Claim
from experiments.claims.setting import ClaimsConfig, Point
from normjax.runs import machine

GROUPS = (vectors, norm_claims, attention_claims, block_claims, depth_claims, taylor)
IDS = tuple(f"A{n}" for n in range(1, 24))


def functions() -> list[Callable[[Point], Claim]]:
    """Return the function of every claim, group by group."""
    return [function for group in GROUPS for function in group.CLAIMS]


def compute(config: ClaimsConfig) -> list[Claim]:
    """Return every claim with its checks, in order.

    Most of the time goes into compiling, one program after the other; the claims therefore share
    the cores. Each is computed under a local 64-bit mode, which its function takes for granted.

    Raises:
      UserError: sizes at which the claims cannot be computed.
    """
    setting.check(config)
    with ThreadPoolExecutor(min(4, machine.usable_cores())) as pool:
        futures = [pool.submit(one, function, config.point) for function in functions()]
        try:
            return in_order([future.result() for future in futures])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def one(function: Callable[[Point], Claim], point: Point) -> Claim:
    """Return one claim, computed in 64-bit mode."""
    with jax.enable_x64(True):
        return function(point)


def in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims by their number.

    >>> [c.id for c in in_order([Claim("A10", "", ()), Claim("A2", "", ())])]
    ['A2', 'A10']
    """
    return sorted(claims, key=lambda claim: int(re.sub(r"\D", "", claim.id)))
