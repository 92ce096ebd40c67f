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

import time

from experiments.claims import all_claims, listing, page, pictures, setting
from experiments.claims.setting import ClaimsConfig
from normjax import configs
from normjax.reporting import drawing, tables
from normjax.runs import provenance
from normjax.runs.experiment import Options, Outcome, check_workdir, working_in

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
    if options.dry_run:
        print(
            f"{len(all_claims.functions())} claims, {all_claims.IDS[0]} to {all_claims.IDS[-1]}, at"
            f" {point.width} features, {point.heads} heads, {point.tokens} tokens, seed"
            f" {point.seed}; about half a minute"
        )
        return None
    start = time.monotonic()
    with working_in(options) as folder:
        claims = all_claims.compute(config)
        tables.write_text(folder / "claims.csv", listing.csv_text(claims))
        drawn = [
            (figure, drawing.save(figure, folder / "figures", options.command))
            for figure in pictures.figures(claims)
        ]
        environment = provenance.environment()
        record = {
            "Command": options.command,
            "Sizes": f"{point.width} features, {point.heads} heads, {point.tokens} tokens",
            "Seed": str(point.seed),
            "Time": f"{time.monotonic() - start:.0f} s, compiling included",
            "Versions": ", ".join(f"{k} {v}" for k, v in environment["versions"].items()),
            "Machine": f"{environment['cpu']}, {', '.join(environment['devices'])}",
            "Commit": environment["commit"] or "unknown",
        }
        where = tables.write_text(folder / "claims.html", page.render(claims, drawn, record))
    code = 0 if all(claim.holds for claim in claims) else 1
    return Outcome(listing.text(claims), where, code)
