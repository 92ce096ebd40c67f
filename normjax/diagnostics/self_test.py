"""Whether what measured the diagnostics is itself sound: identities that hold whatever the weights.

With every measurement the gradient along each token's own direction is compared before and after a
sub-layer (see :mod:`normjax.diagnostics.radial`). That is exact for norms that divide by a length,
so that what is left is rounding; more than that is a fault of the instrument, not of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from normjax.diagnostics.evidence import Evidence

NAMES = ("instrument/radial_defect", "instrument/radial_defect_last")
ROUNDINGS = 64
"""So many machine epsilons of the computation's dtype are rounding; runs of 6 blocks show 4."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """The worst defect of all measurements.

    Attributes:
      worst: relative to the gradient; 0 where it was exact.
      limit: what rounding explains.
      run: the run that has it.
      step: at which step.
      tests: how many sub-layers and final norms were tested, over runs and steps.
    """

    worst: float
    limit: float
    run: str
    step: int
    tests: int

    @property
    def sound(self) -> bool:
        """Whether rounding explains it."""
        return self.worst <= self.limit

    def __str__(self) -> str:
        if self.sound:
            return (
                f"The instrument tested itself {self.tests} times: along a token's own direction"
                f" the gradient passes as it must, off by at most {self.worst:.0e}, rounding."
            )
        return (
            f"A fault of the instrument: along a token's own direction the gradient is off by"
            f" {self.worst:.1e} in run {self.run} at step {self.step}, more than rounding"
            f" ({self.limit:.0e}); the derivatives of a norm or placement are wrong."
        )


def run_test(found: Mapping[str, Evidence], dtype: str) -> SelfTest | None:
    """Return the worst self-test of some runs, or None where no identity applied.

    Args:
      found: the evidence by run. Values that are not finite are events of the run, not tests.
      dtype: in which the runs compute.
    """
    limit = ROUNDINGS * EPSILON.get(dtype, EPSILON["float32"])
    results = [test for run, each in found.items() for test in _tests(run, each)]
    if not results:
        return None
    worst, run, step = max(results, key=lambda r: r[0])
    return SelfTest(worst, limit, run, step, len(results))


def _tests(run: str, evidence: Evidence) -> Iterable[tuple[float, str, int]]:
    for name in NAMES:
        series = evidence.series.get(name)
        if series is not None:
            for step, row in zip(series.steps, series.flat, strict=True):
                for value in row[np.isfinite(row)]:
                    yield float(value), run, int(step)
