"""The folder of one run, and the sealed manifest that says what in it counts.

    manifest.json           what the run is, where it stands, and the SHA-256 of all that follows
    manifest.before.json    the one before it, which is in force where the newer one is damaged
    metrics.jsonl           one line per evaluation       diagnostics.jsonl  one per measured step
    checkpoints/STEP/       written by Orbax              quarantine/        what was set aside

The manifest holds the run's name and the digest of what defines it, its state, the files of every
checkpoint, the length and hash of the records, and its segments: from which step on which
configuration, environment and code made the numbers. Each manifest names the seal of the one
before. What it does not name does not exist for a reader.

:class:`RunFolder` reads and has no way to write; :class:`RunWriter` is for whoever holds the
workdir's lock. Lines carry a checksum of their own, so that what is left of a damaged file is known
line by line. No JAX is imported here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normjax.errors import UserError
from normjax.runs import files

FORMAT = 4
"""Of grid.json and of run folders; another one is refused."""
FINISHED = ("done", "diverged")
STATES = ("running", "interrupted", *FINISHED)
METRICS = "metrics.jsonl"
MANIFEST, BEFORE = "manifest.json", "manifest.before.json"
TUNING = "tuning"
"""In a workdir: the folder of the runs that chose the rates."""
_CHECK = "check"
_SHAPE: dict[str, Any] = {
    "run": str, "identity": str, "number": int, "previous?": str, "state": str, "step": int,
    "steps": int, "diverged_at?": int, "reason?": str, "time": dict,
    "segments": [{"from": int, "config": dict, "environment": dict}],
    "checkpoints": {"*": {"*": str}},
    "records": {"*": {"bytes": int, "lines": int, "sha256": str}},
}  # fmt: skip
_LINE = {"step": int}
_STEP = re.compile(r"[0-9]{1,18}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def run_folder(workdir: Path, run_id: str) -> Path:
    """Return the folder of a run in a workdir.

    Raises:
      UserError: the name leaves the workdir, or a link stands in the way.
    """
    return files.below(workdir, "runs", run_id)


class RunFolder:
    """One run, read only.

    Args:
      path: its folder, which need not exist.
      run: the name that its manifest must have; "" for any: a folder may be copied.

    Attributes:
      path: its folder.
      manifest: what is known of it; None where there is no usable manifest.
      problem: why there is none although there are files, or what was wrong with the newest one.
    """

    def __init__(self, path: str | Path, run: str = ""):
        self.path, self._run = Path(path), run
        self.manifest: dict[str, Any] | None = None
        self.problem = ""
        for name in (MANIFEST, BEFORE):
            try:
                found = files.read_sealed(self.path / name)
                if found is not None:
                    self.manifest = _checked(found, self._run)
                    break
            except ValueError as error:  # a UserError too
                self.problem = self.problem or f"{name}: {error}"
        if self.manifest is None and not self.problem and self.traces():
            self.problem = f"it holds {self.traces()[0]} but no {MANIFEST}"

    def traces(self) -> list[str]:
        """Return the names of files that a run leaves, with or without a manifest."""
        if self.path.is_symlink() or not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))

    @property
    def state(self) -> str:
        """How it stands: "missing", "damaged" (no usable manifest), or one of ``STATES``."""
        if self.manifest is None:
            return "damaged" if self.problem else "missing"
        return self.manifest["state"]

    @property
    def segments(self) -> list[dict[str, Any]]:
        """The parts of the run: {"from": step, "config": ..., "environment": ...}."""
        return self.manifest["segments"] if self.manifest else []

    @property
    def record(self) -> dict[str, Any]:
        """The run's configuration, as its newest segment has it; empty where nothing is known."""
        return self.segments[-1]["config"] if self.segments else {}

    @property
    def environment(self) -> dict[str, Any]:
        """Where the newest segment is computed."""
        return self.segments[-1]["environment"] if self.segments else {}

    def value(self, name: str) -> Any:
        """Return an entry of the manifest, None without one."""
        return self.manifest.get(name) if self.manifest else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the evaluations in order of step.

        What is no number in them, nor a list of numbers, is left out.
        """
        return [
            {k: v for k, v in line.items() if v is None or _is_number(v) or (
                type(v) is list and all(map(_is_number, v)))}
            for line in self.lines(METRICS)
        ]  # fmt: skip

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Return the sealed lines of a record in order of step; of a repeated step the last.

        A resumed run repeats the steps since its checkpoint with the same numbers. Lines whose own
        checksum does not hold are left out; :meth:`problems` counts them.
        """
        return lines_of(self._sealed(file)[0])

    def _sealed(self, file: str) -> tuple[bytes, dict[str, Any]]:
        """Return what a record holds up to its sealed length, and its entry in the manifest."""
        entry = (self.manifest or {}).get("records", {}).get(file)
        if entry is None:
            return b"", {"bytes": 0, "lines": 0, "sha256": files.sha256(b"")}
        content = files.read_bytes(self.path / file) or b""
        return content[: entry["bytes"]], entry

    def problems(self) -> list[str]:
        """Return what is wrong with the manifest and the records, one line each."""
        found = [self.problem] if self.problem else []
        for file in (self.manifest or {}).get("records", {}):
            content, entry = self._sealed(file)
            if files.sha256(content) != entry["sha256"]:
                good = sum(_line(text) is not None for text in content.split(b"\n"))
                lost = entry["lines"] - good
                found.append(f"{file}: {lost} of {entry['lines']} lines are lost or damaged")
        return found

    def damaged_checkpoints(self) -> dict[int, str]:
        """Return, for every checkpoint that is not what was saved, the first such file."""
        found = {}
        for step, names in (self.value("checkpoints") or {}).items():
            bad = _differing_file(self.path / "checkpoints" / step, names)
            if bad is not None:
                found[int(step)] = bad
        return found


@dataclasses.dataclass
class _End:
    """How far a record has been written."""

    size: int
    lines: int
    sha256: Any


class RunWriter(RunFolder):
    """One run, for its only writer."""

    def __init__(self, path: str | Path, run: str = ""):
        super().__init__(path, run)
        self._ends: dict[str, _End] = {}  # of records that were appended to

    def begin(
        self, record: Mapping[str, Any], identity: str, environment: Mapping[str, Any], step: int,
        joins: bool, changes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start or go on: a new segment where ``joins`` is false or there is none yet.

        One that is joined keeps under "resumed" from which step on what of no effect is another:
        ``changes``, a line "field: old -> new" each.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self.manifest is None:
            self.manifest = _empty(self._run or self.path.name)
        self._mend()
        segments = list(self.segments)
        if not segments or not joins:
            segments.append({"from": step, "config": record, "environment": environment})
        else:
            resumed = [*segments[-1].get("resumed", []), {"from": step, "changes": list(changes)}]
            segments[-1] = segments[-1] | {"resumed": resumed}
        self.commit(
            segments=segments, identity=identity, state="running", steps=record["train"]["steps"]
        )

    def adopt(self, other: RunFolder, step: int) -> None:
        """Begin with what another run has up to a step: segments, records, that checkpoint."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.manifest = _empty(self._run or self.path.name)
        folder = f"checkpoints/{step}"
        shutil.copytree(other.path / folder, self.path / folder)
        for file in other.value("records"):
            for line in other.lines(file):
                if line["step"] < step:
                    self.append(file, line)
        checkpoints = {str(step): other.value("checkpoints")[str(step)]}
        self.commit(step=step, segments=other.segments, checkpoints=checkpoints)

    def append(self, file: str, line: Mapping[str, Any]) -> None:
        """Append one line, with its checksum, durably; it counts from the next commit on."""
        if file not in self._ends:
            content, entry = self._sealed(file)
            self._ends[file] = _End(len(content), entry["lines"], hashlib.sha256(content))
        end, text = self._ends[file], text_of(line)
        number = files.open_to_append(self.path / file)
        try:
            os.ftruncate(number, end.size)  # what a kill left behind the sealed part
            with open(number, "ab", closefd=False) as out:
                out.write(text)
            os.fsync(number)
        finally:
            os.close(number)
        end.size, end.lines = end.size + len(text), end.lines + 1
        end.sha256.update(text)

    def commit(self, **changes: Any) -> None:
        """Write a new manifest with some entries changed; the one before is kept beside it."""
        old = self._known()
        records = {
            file: {"bytes": end.size, "lines": end.lines, "sha256": end.sha256.hexdigest()}
            for file, end in self._ends.items()
        }
        new = old | changes | {"number": old["number"] + 1, "previous": old["seal"]}
        new["records"] = old["records"] | records
        path = self.path / MANIFEST
        if path.exists():
            os.replace(path, self.path / BEFORE)  # in force until the new one stands
        seal = files.write_sealed(path, new)
        self.manifest = _checked(files.read_sealed(path) or {}, self._run)
        if self.manifest["seal"] != seal:
            raise OSError(5, "the manifest read back is not the one written", str(path))

    def _known(self) -> dict[str, Any]:
        if self.manifest is None:
            raise RuntimeError("the run has not been begun: call begin() first")
        return self.manifest

    def set_aside(self, name: str) -> Path:
        """Move a file or folder of the run to ``quarantine/``; nothing is deleted."""
        quarantine = self.path / "quarantine"
        quarantine.mkdir(exist_ok=True)
        number = len(list(quarantine.iterdir()))
        target = quarantine / f"{Path(name).name}-{number}"
        os.rename(self.path / name, target)
        return target

    def forget(self, steps: list[int]) -> None:
        """Drop checkpoints: first from the manifest, then from disk."""
        saved = self._known()["checkpoints"].items()
        kept = {step: names for step, names in saved if int(step) not in steps}
        self.commit(checkpoints=kept)
        for step in steps:
            folder = self.path / "checkpoints" / str(step)
            if folder.exists():
                # Renamed first: a kill half way leaves no folder that looks like a checkpoint.
                doomed = folder.with_name(f".pruned-{step}")
                shutil.rmtree(doomed, ignore_errors=True)
                os.rename(folder, doomed)
                shutil.rmtree(doomed)

    def _mend(self) -> None:
        """Keep the good lines of a damaged record; set the damaged file aside."""
        records = self._known()["records"]
        for file in list(records):
            content, entry = self._sealed(file)
            if files.sha256(content) == entry["sha256"]:
                continue
            good = [text + b"\n" for text in content.split(b"\n") if _line(text) is not None]
            if (self.path / file).exists():
                self.set_aside(file)
            files.write_bytes(self.path / file, b"".join(good))
            records[file] = {
                "bytes": sum(map(len, good)), "lines": len(good),
                "sha256": files.sha256(b"".join(good)),
            }  # fmt: skip


def _empty(run: str) -> dict[str, Any]:
    """Return the manifest of a run that has not begun."""
    return {
        "format": FORMAT, "run": run, "identity": "", "number": 0, "previous": None, "seal": None,
        "state": "running", "step": 0, "steps": 0, "diverged_at": None, "reason": None,
        "time": {}, "segments": [], "checkpoints": {}, "records": {},
    }  # fmt: skip


def hashed(folder: Path) -> dict[str, str]:
    """Return {relative path: SHA-256} of every file in a folder.

    Raises:
      UserError: a link, or what is no regular file.
    """
    return {
        str(path.relative_to(folder)): files.digest(path)
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() or path.is_symlink()
    }


def _differing_file(folder: Path, names: Mapping[str, str]) -> str | None:
    """Return the first file that is missing, new or different, or None."""
    if folder.is_symlink() or not folder.is_dir():
        return "no such folder"
    try:
        now = hashed(folder)
    except UserError as error:
        return str(error)
    return next((n for n in sorted({*now, *names}) if now.get(n) != names.get(n)), None)


def _checked(manifest: dict[str, Any], run: str) -> dict[str, Any]:
    """Return a manifest whose entries are of the right kind.

    Raises:
      UserError: it is of another format, of another run, or not a manifest.
    """
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"written in format {manifest.get('format')!r}, this version reads format {FORMAT}"
        )
    files.check_shape(manifest, _SHAPE)
    bad = [] if manifest["state"] in STATES else ["state"]
    bad += [f"checkpoints.{k}" for k in manifest["checkpoints"] if not _STEP.fullmatch(k)]
    bad += [f"records.{k}" for k in manifest["records"] if not files.NAME.fullmatch(k)]
    if bad:
        raise UserError(f"{bad[0][:60]!r} is not as this version writes it")
    if run not in ("", manifest["run"]):
        raise UserError(f"it is of the run {manifest['run']!r}, not of {run!r}")
    return manifest


def lines_of(content: bytes) -> list[dict[str, Any]]:
    """Return the whole lines of a record's text in order of step; of a repeated step the last."""
    found = (_line(text) for text in content.split(b"\n"))
    by_step = {line["step"]: line for line in found if line is not None}
    return [by_step[step] for step in sorted(by_step)]


def text_of(line: Mapping[str, Any]) -> bytes:
    """Return a line as it stands in a file: its JSON, with the CRC-32 of what precedes it."""
    text = json.dumps(files.strict(dict(line)), allow_nan=False)
    return f'{text[:-1]}, "{_CHECK}": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line without its checksum; None where that does not hold."""
    head, mark, tail = text.rpartition(f', "{_CHECK}": "'.encode())
    if not mark or tail != f'{zlib.crc32(head + b"}"):08x}"}}'.encode():
        return None
    try:
        line = files.parsed(head + b"}")
        files.check_shape(line, _LINE)
    except ValueError:  # a UserError too
        return None
    return line
