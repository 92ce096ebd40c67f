"""A survey of spectra read back from its two files, and its rows. No JAX."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np

from normjax.errors import UserError
from normjax.reporting import palette
from normjax.reporting.palette import Look
from normjax.runs import files

FORMAT = 1
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
        return np.log(_positive(self.arrays["deflated"][int(part.split()[1]) - 1, :, -1]))

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
    """Return one row per condition, part (block or stack) and position: medians over sequences."""
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
        raw, inner = (np.log(_positive(a[name][i, :, p])) for name in ("raw", "deflated"))
    else:
        raw, inner = a["log_raw"][:, p], a["log_deflated"][:, p]
    top, spread = raw[:, 0], np.exp(inner[:, 0] - inner[:, -1])
    mean_square = np.log(np.mean(np.exp(2 * (raw - top[:, None])), axis=1)) / 2 + top
    low, high = np.quantile(spread, (0.25, 0.75))
    law = point.law(part) if p == len(point.positions) - 1 else None
    return {
        "series": point.series, "seed": point.seed, "step": point.step, "depth": point.depth,
        "part": part, "position": point.positions[p], "run": point.run,
        "sequences": a["raw"].shape[1],
        "sigma_max": _median(np.exp(top)), "sigma_min": _median(np.exp(raw[:, -1])),
        "rms_gain": _median(np.exp(mean_square)),
        "condition": _median(np.exp(np.minimum(top - raw[:, -1], 700.0))),
        "deflated_max": _median(np.exp(inner[:, 0])),
        "deflated_min": _median(np.exp(inner[:, -1])), "deflated_condition": _median(spread),
        "deflated_condition_low": float(low), "deflated_condition_high": float(high),
        **{name: _median(a[f"gains/{name}"][i, :, p]) if block else None for name in GAINS},
        "stream_rms_before": _median(rms[i if block else 0]),
        "stream_rms_after": _median(rms[block if block else -1]),
        **dict(zip(("theory_max", "theory_min", "theory_distance"), _theory(law), strict=True)),
    }  # fmt: skip


def _theory(law: tuple[dict[str, Any], Any, Any] | None) -> tuple[float | None, ...]:
    """Return the largest and the smallest singular value of a law, and how far off it is."""
    if law is None or law[0]["log_high"] is None:
        return None, None, None
    low, high = (-np.inf if (log := law[0][k]) is None else log for k in ("log_low", "log_high"))
    return float(np.exp(high)), float(np.exp(low)), law[0]["distance"]


def _positive(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.finfo(float).tiny)


def _median(x: np.ndarray) -> float:
    return float(np.median(x))
