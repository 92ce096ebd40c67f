"""A survey of spectra read back from its two files, and its rows. No JAX."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from normjax.errors import UserError
from normjax.reporting import palette
from normjax.reporting.palette import Look
from normjax.runs import files

FORMAT = 2
TEN = math.log(10)
THEORY = ("log10_theory_max", "log10_theory_min", "theory_distance", "theory_level",
          "theory_broken")  # fmt: skip
GAINS = ("rr", "rt", "tr", "tt", "cosine")


@dataclasses.dataclass(frozen=True)
class SurveyPoint:
    """One decoder of the survey: its entry in ``survey.json`` and its arrays.

    The arrays are those of :class:`experiments.spectrum.measured.Measured`.
    """

    entry: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.entry[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def measured(self) -> bool:
        """Whether there is anything but a reason why not."""
        return "failed" not in self.entry

    def log_deflated(self) -> np.ndarray:
        """Return (B, d - 1) log singular values of the stack at the last position."""
        return self.arrays["log_deflated"][:, -1]

    def logs(self, part: str) -> np.ndarray:
        """Return (B, d - 1) log singular values of the stack or a block at the last position."""
        if part == "stack":
            return self.log_deflated()
        block = int(part.split()[1]) - 1
        return log_of(*(self.arrays[name][block, :, -1] for name in ("deflated", "raw")))

    def relative(self, part: str, reference: float | None) -> np.ndarray:
        """Return the log singular values of a part, all tokens on one scale.

        Each token is shifted from the log root mean square that theory gives for it to the
        reference, that of the law it is laid beside. Without a reference nothing is shifted.
        """
        logs = self.logs(part)
        own = self.arrays.get(f"scale/{part}")
        if reference is None or own is None or not len(own):
            return logs.ravel()
        return (logs - own[:, None] + reference).ravel()

    def law(self, name: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray] | None:
        """Return the record, log_s and log-density of a law, or None where there is none."""
        record = self.entry.get("laws", {}).get(name)
        if record is None:
            return None
        arrays = [self.arrays[f"law/{name}/{part}"] for part in ("log_s", "log_density")]
        return record, arrays[0], arrays[1]


@dataclasses.dataclass(frozen=True)
class Survey:
    """Everything measured.

    Attributes:
      record: ``survey.json`` without its conditions.
      points: one per condition, in order.
    """

    record: dict[str, Any]
    points: tuple[SurveyPoint, ...]

    @property
    def series(self) -> list[str]:
        """Names in order."""
        return list(dict.fromkeys(p.series for p in self.points))

    @property
    def looks(self) -> dict[str, Look]:
        """Colour and marker by series."""
        own = {p.series: c for p in self.points if (c := p.entry.get("colour"))}
        return palette.looks(self.series, self.series[0], own)

    def main(self, series: str, step: int | None = None) -> list[SurveyPoint]:
        """Return the points of a series that were looked at in full, at a step or at all."""
        return [
            p for p in self.points
            if p.measured and p.main and p.series == series and step in (None, p.step)
        ]  # fmt: skip

    def steps(self, series: str) -> list[int]:
        """Return the training steps at which a series was looked at in full."""
        return sorted({p.step for p in self.main(series)})

    def initialized(self, series: str) -> dict[int, list[SurveyPoint]]:
        """Return the points at initialization by depth."""
        found: dict[int, list[SurveyPoint]] = {}
        for point in self.points:
            if point.measured and point.series == series and point.step == 0:
                found.setdefault(point.depth, []).append(point)
        return dict(sorted(found.items()))


def read_survey(workdir: Path) -> Survey:
    """Read ``survey.json`` and ``spectra.npz``.

    Raises:
      UserError: one is missing or damaged, or of another format.
    """
    again = "; run it again: python launch.py --experiment=spectrum"
    try:
        record = files.read_sealed(workdir / "survey.json")
    except ValueError as error:
        raise UserError(f"workdir={workdir}: survey.json: {error}{again}") from None
    if record is None or record.get("format") != FORMAT:
        raise UserError(f"workdir={workdir}: holds no survey.json of format {FORMAT}{again}")
    with np.load(io.BytesIO(files.read_bytes(workdir / "spectra.npz") or b"")) as file:
        arrays = {name: file[name] for name in file.files}
    points = []
    for number, entry in enumerate(record.pop("conditions")):
        head = f"{number}/"
        own = {k.removeprefix(head): v for k, v in arrays.items() if k.startswith(head)}
        points.append(SurveyPoint(entry, own))
    return Survey(record, tuple(points))


def rows(survey: Survey) -> list[dict[str, Any]]:
    """Return one row per condition, part (block or stack) and position: medians over sequences.

    Singular values and condition numbers are written as their log10: those of a stack are known as
    logarithms, over any range. -inf is a value of zero, inf the condition number of one.
    """
    return [
        _row(point, block, p)
        for point in survey.points if point.measured
        for p in range(len(point.positions)) for block in (*range(1, point.depth + 1), 0)
    ]  # fmt: skip


def _row(point: SurveyPoint, block: int, p: int) -> dict[str, Any]:
    """Return the row of a block, or of the stack, 0, at a position."""
    a, part = point.arrays, f"block {block}" if block else "stack"
    rms, i = np.sqrt(a["mean_square"][:, :, p]), block - 1
    if block:
        raw, inner = (log_of(a[name][i, :, p], a["raw"][i, :, p]) for name in ("raw", "deflated"))
    else:
        raw, inner = a["log_raw"][:, p], a["log_deflated"][:, p]
    top, spread = raw[:, 0], _difference(inner)
    mean_square = np.log(np.mean(np.exp(2 * (raw - top[:, None])), axis=1)) / 2 + top
    low, high = _quantiles(spread, (0.25, 0.75))
    law = point.law(part) if p == len(point.positions) - 1 else None
    return {
        "series": point.series, "seed": point.seed, "step": point.step, "depth": point.depth,
        "part": part, "position": point.positions[p], "run": point.run,
        "sequences": a["raw"].shape[1],
        "log10_sigma_max": _log10(top), "log10_sigma_min": _log10(raw[:, -1]),
        "log10_rms_gain": _log10(mean_square), "log10_condition": _log10(_difference(raw)),
        "log10_deflated_max": _log10(inner[:, 0]), "log10_deflated_min": _log10(inner[:, -1]),
        "log10_deflated_condition": _log10(spread),
        "log10_deflated_condition_low": low / TEN, "log10_deflated_condition_high": high / TEN,
        **{name: _median(a[f"gains/{name}"][i, :, p]) if block else None for name in GAINS},
        "stream_rms_before": _median(rms[i if block else 0]),
        "stream_rms_after": _median(rms[block if block else -1]),
        **dict(zip(THEORY, _theory(law), strict=True)),
    }  # fmt: skip


def _theory(law: tuple[dict[str, Any], Any, Any] | None) -> tuple[float | str | None, ...]:
    """Return log10 of a law's ends, how far off it is, its level, and what does not hold."""
    if law is None or law[0]["log_high"] is None:
        return None, None, None, None, None
    low, high = (-np.inf if (log := law[0][k]) is None else log for k in ("log_low", "log_high"))
    record = law[0]
    return (
        float(high) / TEN, float(low) / TEN, record["distance"], record["level"],
        "; ".join(record["broken"].values()),
    )  # fmt: skip


def log_of(values: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Return the logarithms of singular values (..., n) of a dense decomposition.

    -inf where a value is zero, or no more than what rounding leaves of it: n roundoffs of the
    largest of ``raw``, all singular values of the same matrix.

    >>> log_of(np.array([1.0, 1e-17]), np.array([1.0, 1e-17]))
    array([  0., -inf])
    """
    noise = raw.shape[-1] * np.finfo(np.float64).eps * raw[..., :1]
    with np.errstate(divide="ignore"):
        return np.log(np.where(values > noise, values, 0.0))


def shown(log: float) -> str:
    """Return a number to four digits from its natural logarithm, also beyond float64.

    >>> shown(0.0), shown(math.log(0.00123)), shown(-1000.0), shown(-math.inf), shown(math.inf)
    ('1', '0.00123', '5.076e-435', '0', 'infinite')
    """
    if math.isnan(log) or math.isinf(log):
        return "unknown" if math.isnan(log) else "0" if log < 0 else "infinite"
    if abs(log) < 700:
        return f"{math.exp(log):.4g}"
    exponent = math.floor(log / TEN)
    mantissa = f"{math.exp(log - exponent * TEN):.4g}"
    return f"{mantissa}e{exponent:+d}" if mantissa != "10" else f"1e{exponent + 1:+d}"


def _difference(logs: np.ndarray) -> np.ndarray:
    """Return the logarithm of largest over smallest, (B, n) -> (B,); inf where that is zero."""
    with np.errstate(invalid="ignore"):  # all of them zero: NaN, no condition at all
        return np.asarray(logs[:, 0] - logs[:, -1])


def _quantiles(x: np.ndarray, levels: tuple[float, ...]) -> list[float]:
    """Return quantiles of numbers that may be infinite: two infinite neighbours have one."""
    with np.errstate(invalid="ignore"):
        found = np.quantile(x, levels)
        above = np.quantile(x, levels, method="higher")
    return [float(v) for v in np.where(np.isnan(found), above, found)]


def _log10(logs: np.ndarray) -> float:
    return _quantiles(logs, (0.5,))[0] / TEN


def _median(x: np.ndarray) -> float:
    return float(np.median(x))
