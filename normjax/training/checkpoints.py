"""Checkpoints of one run: Orbax writes and reads them; what it lacks is added here.

Added: a SHA-256 per file, written after the save and verified before anything is restored; a fall
back to the previous checkpoint, the damaged one being moved to ``quarantine/``; a refusal of any
difference in names, shapes or dtypes (Orbax casts dtypes silently); and no silent fresh start when
every checkpoint is damaged. A checkpoint counts only once its hashes are written, so a kill inside
a save leaves the previous one in force.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from normjax.errors import UserError
from normjax.runs.runlog import read_object, write_json

KEPT = 2


class Checkpoints:
    """A run folder's checkpoints: ``checkpoints/STEP/``, ``checkpoint_hashes/STEP.json``."""

    def __init__(self, run_dir: Path, kept: int = KEPT):
        """Open a run's checkpoints, of which the newest ``kept`` stay on disk; 0 keeps all."""
        self._kept = kept
        self._run = Path(run_dir)
        self._folder = self._run / "checkpoints"
        self._hashes = self._run / "checkpoint_hashes"
        self._quarantine = self._run / "quarantine"
        self._manager: ocp.CheckpointManager | None = None

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._kept or None, enable_async_checkpointing=False, create=True
            )
            handler = ocp.StandardCheckpointHandler()
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(), options=options, item_handlers=handler
            )
        return self._manager

    def save(self, step: int, tree: Any) -> None:
        """Write a tree of host arrays; returns once it is on disk and hashed.

        A step that is already there, verified, is left alone: the same run at the same step holds
        the same numbers.

        Raises:
          OSError: it could not be written; the checkpoint before is still in force.
        """
        if step in self.verified_steps():
            return
        self._clear_unfinished()
        self._check_room(sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree)))
        try:
            self._open().save(step, args=ocp.args.StandardSave(_flatten(tree)), force=True)
            self._open().wait_until_finished()
        except (ValueError, RuntimeError, OSError) as error:  # tensorstore has its own
            reason = " ".join(str(error).split())[:200]
            folder = str(self._folder / str(step))
            raise OSError(errno.EIO, f"checkpoint not written: {reason}", folder) from error
        write_json(self._hashes / f"{step}.json", _hash_folder(self._folder / str(step)))
        for old in self._hashes.glob("*.json"):
            if not (self._folder / old.stem).exists():
                old.unlink()

    def _check_room(self, size: int) -> None:
        """Try a file of the state's size: on a full disk tensorstore's threads fail loudly."""
        probe = self._run / ".room"
        try:
            with probe.open("wb") as file:
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = f"no room for a checkpoint of {size} bytes: {error.strerror}"
            raise OSError(error.errno, what, str(self._folder)) from error
        finally:
            probe.unlink(missing_ok=True)

    def verified_steps(self) -> list[int]:
        """Return the steps that can be restored, ascending; damaged ones are quarantined.

        Raises:
          UserError: there are checkpoints and every one of them is damaged.
        """
        good, damaged = [], []
        for path in sorted(self._hashes.glob("*.json")):
            folder = self._folder / path.stem
            if not path.stem.isdecimal() or not folder.is_dir():
                continue
            step = int(path.stem)
            bad = _differing_file(folder, read_object(path) or {})
            if bad is None:
                good.append(step)
            else:
                damaged.append(f"{folder / bad}")
                self._set_aside(step)
        if damaged and not good:
            raise UserError(
                f"every checkpoint of {self._run} is damaged ({damaged[-1]}): moved to"
                f" {self._quarantine.name}/; delete the run folder to train it from the start"
            )
        for name in damaged:
            warnings.warn(
                f"damaged checkpoint file {name}: going back to the one before", stacklevel=2
            )
        return sorted(good)

    def shapes(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of every saved leaf under its dotted path."""
        saved = self._open().item_metadata(step)
        return {k: (tuple(leaf.shape), np.dtype(leaf.dtype)) for k, leaf in saved.items()}

    def restore(self, step: int, like: Any) -> Any:
        """Return the tree saved at ``step``, which must have exactly the leaves of ``like``.

        Raises:
          UserError: a leaf is missing, left over, or has another shape or dtype.
        """
        names = _flatten(like)
        found = self.shapes(step)
        wanted = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in names.items()}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise UserError(
                    f"checkpoint {self._folder / str(step)}: leaf {name} is {_said(found, name)},"
                    f" the model needs {_said(wanted, name)}; use another workdir or the old config"
                )
        template = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in names.items()}
        tree = self._open().restore(step, args=ocp.args.StandardRestore(template))
        leaves = [np.asarray(tree[name]) for name in names]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Release Orbax's threads and files."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _clear_unfinished(self) -> None:
        """Put numbered folders without hashes aside: Orbax would count them as kept."""
        for folder in self._folder.glob("[0-9]*"):
            known = (self._hashes / f"{folder.name}.json").exists()
            if folder.name.isdecimal() and folder.is_dir() and not known:
                self._set_aside(int(folder.name))

    def _set_aside(self, step: int) -> None:
        self.close()
        self._quarantine.mkdir(exist_ok=True)
        number = len(list(self._quarantine.iterdir()))
        shutil.move(self._folder / str(step), self._quarantine / f"{step}-{number}")
        (self._hashes / f"{step}.json").unlink(missing_ok=True)


def _said(leaves: dict[str, Any], name: str) -> str:
    return "{1} {0}".format(*leaves[name]) if name in leaves else "absent"


def _flatten(tree: Any) -> dict[str, Any]:
    """Return {dotted path: leaf} in the tree's own order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(_key(part) for part in path): leaf for path, leaf in flat}


def _key(part: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    raise TypeError(f"unknown part of a tree path: {part!r}")


def _hash_folder(folder: Path) -> dict[str, str]:
    """Return {relative path: SHA-256} of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def _differing_file(folder: Path, hashes: dict[str, str]) -> str | None:
    """Return the first file that is missing, new or different, or None."""
    now = _hash_folder(folder)
    for name in sorted(now.keys() | hashes.keys()):
        if now.get(name) != hashes.get(name):
            return name
    return None
