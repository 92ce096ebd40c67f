"""Checkpoints of one run: Orbax writes and reads them; what it lacks is added here.

Added: a save counts only once its files are on disk, hashed, read back equal to what was saved and
named by the run's manifest, and only then is an older one dropped; damaged ones are passed over;
any difference in names, shapes or dtypes is refused (Orbax casts dtypes silently).

:class:`SavedStates` reads and changes nothing. :class:`Checkpoints` writes and is for whoever holds
the workdir's lock.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from normjax.errors import UserError
from normjax.runs import files
from normjax.runs.run_folder import RunFolder, RunWriter, hashed

KEPT = 2


class SavedStates:
    """The checkpoints that a run's manifest names and that are what was saved.

    Attributes:
      steps: those that can be restored, ascending.
      damaged: step -> first file that is not what was saved.
    """

    def __init__(self, run: RunFolder):
        self.run = run
        self.damaged = run.damaged_checkpoints()
        named = map(int, run.value("checkpoints") or {})
        self.steps = sorted(step for step in named if step not in self.damaged)

    def folder(self, step: int) -> Path:
        """Return where a checkpoint lies."""
        return self.run.path / "checkpoints" / str(step)

    def shapes(self, step: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of every saved leaf under its dotted path."""
        saved: Any = _orbax().metadata(self.folder(step).absolute()).item_metadata
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
                    f"checkpoint {self.folder(step)}: leaf {name} is {_said(found, name)},"
                    f" the model needs {_said(wanted, name)}; use another workdir or the old config"
                )
        tree = _read(self.folder(step), names)
        return jax.tree.unflatten(jax.tree.structure(like), [tree[name] for name in names])


class Checkpoints(SavedStates):
    """A run's checkpoints, for its only writer; the newest ``kept`` stay on disk, 0 keeps all."""

    def __init__(self, run: RunWriter, kept: int = KEPT):
        super().__init__(run)
        self._writer, self._kept = run, kept

    def save(self, step: int, tree: Any, **changes: Any) -> None:
        """Write a tree of host arrays and commit it with other changes of the manifest.

        Returns once it is proven to be on disk. A step that is there, whole, is not written again:
        the same run at the same step holds the same numbers.

        Raises:
          OSError: it could not be written; the checkpoint before is still in force.
        """
        named = self.run.value("checkpoints") or {}
        if step not in self.steps:
            names = _flatten(tree)
            self._check_room(sum(np.asarray(leaf).nbytes for leaf in names.values()))
            named = named | {str(step): self._write(step, names)}
            self.steps = sorted([*self.steps, step])
            self.damaged.pop(step, None)
        self._writer.commit(step=step, checkpoints=named, **changes)
        self._prune()

    def _write(self, step: int, names: dict[str, Any]) -> dict[str, str]:
        folder = self.folder(step)
        self._clear(folder)
        try:
            _orbax().save(folder.absolute(), args=ocp.args.StandardSave(names))
        except (ValueError, RuntimeError, OSError) as error:  # tensorstore has its own
            reason = " ".join(str(error).split())[:200]
            raise OSError(errno.EIO, f"checkpoint not written: {reason}", str(folder)) from error
        _sync(folder)
        found = hashed(folder)
        back = _read(folder, names)
        for name, leaf in names.items():
            # As bytes: NaN must come back as the same NaN.
            if np.asarray(leaf).tobytes() != back[name].tobytes():
                raise OSError(errno.EIO, f"checkpoint read back differs in {name}", str(folder))
        return found

    def _clear(self, folder: Path) -> None:
        """Make place for a save: leftovers of killed saves go, what else is there is set aside."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if ".orbax-checkpoint-tmp" in other.name or other.name.startswith(".pruned-"):
                shutil.rmtree(other, ignore_errors=True)
        if folder.exists():
            self._writer.set_aside(f"checkpoints/{folder.name}")

    def _prune(self) -> None:
        """Drop what is older than the newest kept ones, and damaged ones that are older than them.

        Damaged ones are dropped from the manifest and set aside, not deleted.
        """
        kept = self.steps[-self._kept :] if self._kept else self.steps
        for step in [s for s in self.damaged if self._kept and s < kept[0]]:
            del self.damaged[step]
            if self.folder(step).exists():
                self._writer.set_aside(f"checkpoints/{step}")
            self._writer.forget([step])
        if dropped := [step for step in self.steps if step not in kept]:
            self._writer.forget(dropped)
            self.steps = list(kept)

    def _check_room(self, size: int) -> None:
        """Try a file of the state's size: on a full disk tensorstore's threads fail loudly."""
        probe = self.run.path / ".room"
        try:
            files.write_bytes(probe, bytes(size))
        except OSError as error:
            what = f"no room for a checkpoint of {size} bytes: {error.strerror}"
            raise OSError(error.errno, what, str(self.folder(0).parent)) from error
        finally:
            probe.unlink(missing_ok=True)


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _read(folder: Path, names: dict[str, Any]) -> dict[str, np.ndarray]:
    template = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in names.items()}
    tree = _orbax().restore(folder.absolute(), args=ocp.args.StandardRestore(template))
    return {name: np.asarray(tree[name]) for name in names}


def _sync(folder: Path) -> None:
    """Make a folder and all below it durable."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            files.sync_folder(path)
        else:
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
    files.sync_folder(folder.parent)


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
