"""Does what is said of norms and residual blocks hold for the program's own modules?

Question: 23 statements about lengths and directions, RMSNorm and its Jacobian, attention and the
size of its input, the Jacobians of pre-norm, post-norm and norm-free blocks, streams over depth and
first-order expansions: does each hold, and to how many digits?

Hypothesis: all hold, to rounding in float64 where they are exact, and to the next term of their
series where they are approximations.

Command: python launch.py --experiment=claims        30 s of processor time, shared by the cores,
                                                     nearly all of it compiling; 11 s once compiled

Result: all 23 hold. One needs a word: a step along the stream's own direction passes a pre-norm
sub-layer unchanged, but not two in a row, since the first has turned the stream.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial

from experiments.claims import (
    attention_claims,
    block_claims,
    depth_claims,
    norm_claims,
    page,
    setting,
    taylor,
    vectors,
)
from experiments.claims.claim import Claim
from experiments.claims.setting import ClaimsConfig, Point
from normjax import configs
from normjax.reporting import report
from normjax.reporting.wording import counted
from normjax.runs import measuring, preflight
from normjax.runs.experiment import Options, Outcome, check_workdir, working_in

GROUPS = (vectors, norm_claims, attention_claims, block_claims, depth_claims, taylor)
IDS = tuple(f"A{n}" for n in range(1, 24))
PRESETS = {
    "default": ("23 claims, 16 features, 6 tokens: half a minute on two cores", {}),
    "wide": ("the same at 48 features and 12 tokens", {
        "point.width": 48, "point.heads": 4, "point.tokens": 12,
    }),
}  # fmt: skip


def get_config(preset: str) -> ClaimsConfig:
    """Return the configuration of a preset."""
    return configs.replace(ClaimsConfig(), PRESETS[preset][1])


def run(config: ClaimsConfig, preset: str, options: Options) -> Outcome | None:
    """Compute every claim, write claims.csv and claims.html; code 1 where one does not hold."""
    setting.check(config)
    check_workdir(options.workdir)
    point = config.point
    sizes = f"{point.width} features, {counted(point.heads, 'head')}, {point.tokens} tokens"
    if options.dry_run:
        print(
            f"{len(functions())} claims, {IDS[0]} to {IDS[-1]}, at {sizes}, seed {point.seed};"
            " about half a minute"
        )
        return None
    start = time.monotonic()
    made = partial(measuring.record, options.command, start, Sizes=sizes, Seed=str(point.seed))

    preflight.check_page()
    with working_in(options) as folder:
        claims = compute(config)
        where = report.write_page(
            folder, "claims", page.CHECKS.csv(page.rows(claims)), {"command": options.command},
            lambda: page.figures(claims), lambda drawn: page.render(claims, drawn, made()),
        )  # fmt: skip
    return Outcome(page.text(claims), where, 0 if all(claim.holds for claim in claims) else 1)


def functions() -> list[Callable[[Point], Claim]]:
    """Return the function of every claim, group by group."""
    return [function for group in GROUPS for function in group.CLAIMS]


def compute(config: ClaimsConfig) -> list[Claim]:
    """Return every claim with its checks, in order.

    Raises:
      UserError: sizes at which the claims cannot be computed.
    """
    setting.check(config)
    return in_order(measuring.side_by_side(functions(), config.point, most=4))


def in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims by their number.

    >>> [c.id for c in in_order([Claim("A10", "", ()), Claim("A2", "", ())])]
    ['A2', 'A10']
    """
    return sorted(claims, key=lambda claim: int(re.sub(r"\D", "", claim.id)))
