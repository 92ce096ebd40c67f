"""A survey of spectra read back from its two files, and the table made of it. No JAX."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from normjax.errors import UserError
from normjax.reporting import palette, tables
from normjax.reporting.palette import Look
from normjax.runs import runlog

FORMAT = 1
GAINS = ("rr", "rt", "tr", "tt", "cosine")
COLUMNS = (
    *("series", "seed", "step", "depth", "part", "position", "run", "sequences"),
    *("sigma_max", "sigma_min", "rms_gain", "condition"),
    *("deflated_max", "deflated_min", "deflated_condition"),
    *(f"deflated_condition_{q}" for q in ("low", "high")),
    *GAINS,
    *("stream_rms_before", "stream_rms_after"),
    *("theory_max", "theory_min", "theory_distance"),
)


@dataclasses.dataclass(frozen=True)
class Point:
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

    def relative(self, part: str, reference: float | None) -> np.ndarray:
        """Return the log singular values of a part, all tokens on one scale.

        Each token is shifted from the log root mean square that theory gives for it to the
        reference, that of the law it is laid beside. Without a reference nothing is shifted.
        """
        if part == "stack":
            logs = self.log_deflated()
        else:
            logs = np.log(_positive(self.arrays["deflated"][int(part.split()[1]) - 1, :, -1]))
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
    points: tuple[Point, ...]

    @property
    def series(self) -> list[str]:
        """Names in order."""
        return list(dict.fromkeys(p.series for p in self.points))

    @property
    def looks(self) -> dict[str, Look]:
        """Colour and marker by series."""
        own = {p.series: c for p in self.points if (c := p.entry.get("colour"))}
        return palette.looks(self.series, self.series[0], own)

    def main(self, series: str, step: int | None = None) -> list[Point]:
        """Return the points of a series that were looked at in full, at a step or at all."""
        return [
            p for p in self.points
            if p.measured and p.main and p.series == series and step in (None, p.step)
        ]  # fmt: skip

    def steps(self, series: str) -> list[int]:
        """Return the training steps at which a series was looked at in full."""
        return sorted({p.step for p in self.main(series)})

    def initialized(self, series: str) -> dict[int, list[Point]]:
        """Return the points at initialization by depth."""
        found: dict[int, list[Point]] = {}
        for point in self.points:
            if point.measured and point.series == series and point.step == 0:
                found.setdefault(point.depth, []).append(point)
        return dict(sorted(found.items()))


def read_survey(workdir: Path) -> Survey:
    """Read ``survey.json`` and ``spectra.npz``.

    Raises:
      UserError: one is missing or damaged, or of another format.
    """
    record = runlog.read_object(workdir / "survey.json")
    if record is None or record.get("format") != FORMAT:
        raise UserError(
            f"workdir={workdir}: holds no survey.json of format {FORMAT}; run it again:"
            " python launch.py --experiment=spectrum"
        )
    try:
        with np.load(workdir / "spectra.npz") as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise UserError(
            f"workdir={workdir}: spectra.npz cannot be read ({error}); run it again:"
            " python launch.py --experiment=spectrum"
        ) from None
    points = []
    for number, entry in enumerate(record.pop("conditions")):
        head = f"{number}/"
        own = {k.removeprefix(head): v for k, v in arrays.items() if k.startswith(head)}
        points.append(Point(entry, own))
    return Survey(record, tuple(points))


def csv(survey: Survey) -> str:
    """Return one row per condition, part (block or stack) and position: medians over sequences."""
    rows = []
    for point in survey.points:
        if not point.measured:
            continue
        for p, position in enumerate(point.positions):
            rows += [_block_row(point, block, p, position) for block in range(1, point.depth + 1)]
            rows.append(_stack_row(point, p, position))
    return tables.csv_text(COLUMNS, rows)


def _head(point: Point, part: str, position: int) -> tuple[Any, ...]:
    sequences = point.arrays["raw"].shape[1]
    return (point.series, point.seed, point.step, point.depth, part, position, point.run, sequences)


def _block_row(point: Point, block: int, p: int, position: int) -> tuple[Any, ...]:
    a, i = point.arrays, block - 1
    raw, inner = a["raw"][i, :, p], a["deflated"][i, :, p]
    rms = np.sqrt(a["mean_square"][:, :, p])
    last = p == len(point.positions) - 1
    return (
        *_head(point, f"block {block}", position),
        *_spectrum(np.log(_positive(raw)), np.log(_positive(inner))),
        *(_median(a[f"gains/{name}"][i, :, p]) for name in GAINS),
        _median(rms[i]), _median(rms[i + 1]), *_theory(point, f"block {block}" if last else ""),
    )  # fmt: skip


def _stack_row(point: Point, p: int, position: int) -> tuple[Any, ...]:
    a = point.arrays
    rms = np.sqrt(a["mean_square"][:, :, p])
    return (
        *_head(point, "stack", position), *_spectrum(a["log_raw"][:, p], a["log_deflated"][:, p]),
        *(None for _ in GAINS), _median(rms[0]), _median(rms[-1]),
        *_theory(point, "stack" if p == len(point.positions) - 1 else ""),
    )  # fmt: skip


def _positive(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.finfo(float).tiny)


def _spectrum(log_raw: np.ndarray, log_inner: np.ndarray) -> tuple[float, ...]:
    """Return the columns from sigma_max to deflated_condition_high, from logs (B, n)."""
    top = log_raw[:, 0]
    mean_square = np.log(np.mean(np.exp(2 * (log_raw - top[:, None])), axis=1)) / 2 + top
    spread = np.exp(log_inner[:, 0] - log_inner[:, -1])
    return (
        _median(np.exp(top)), _median(np.exp(log_raw[:, -1])), _median(np.exp(mean_square)),
        _median(np.exp(np.minimum(top - log_raw[:, -1], 700.0))),
        _median(np.exp(log_inner[:, 0])), _median(np.exp(log_inner[:, -1])), _median(spread),
        *(float(q) for q in np.quantile(spread, (0.25, 0.75))),
    )  # fmt: skip


def _median(x: np.ndarray) -> float:
    return float(np.median(x))


def _theory(point: Point, name: str) -> tuple[Any, ...]:
    law = point.law(name) if name else None
    if law is None or law[0]["log_high"] is None:
        return (None, None, None)
    record = law[0]
    low = record["log_low"]
    return (
        float(np.exp(record["log_high"])),
        (0.0 if low is None else float(np.exp(low))),
        record["distance"],
    )
