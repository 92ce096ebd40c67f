"""A run folder opened again: its decoder, its text, its parameters at every step that was kept.

    run = TrainedRun("runs/ablation-default/runs/full-s0-...")
    parts = run.parts(run.steps[-1])             # the decoder's parts with those parameters
    parts.block(2).token_jacobians(parts.embed(run.windows(1)[0, :-1]))

Step 0 is the initialization, made anew from the seed. Nothing is written.
"""

from __future__ import annotations

import json
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax import configs
from normjax.data import corpora
from normjax.decoder import Decoder, DecoderConfig, Params
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.runs.run_folder import MANIFEST, RunFolder
from normjax.training import train
from normjax.training.checkpoints import SavedStates
from normjax.training.train import Hyper, State, TrainConfig


class TrainedRun:
    """One run folder, read only.

    Attributes:
      folder: where it is.
      arm: the name of its variant.
      hyper: seed, learning rate, weight decay and initial scale.
      model: its decoder.
      data: what it was trained on.
      train_config: how it was trained.
      steps: 0 and the steps of its checkpoints, ascending.
    """

    def __init__(self, folder: str | Path):
        """Open a run folder, ``WORKDIR/runs/NAME``.

        Raises:
          UserError: no such folder, no usable manifest, or no whole checkpoint in it.
        """
        self.folder = Path(folder).expanduser()
        found = RunFolder(self.folder.absolute())
        if found.state == "damaged":
            raise UserError(f"run={folder}: {found.problem}; bring it back, or train it anew")
        record = found.record
        if not record:
            hint = ", ".join(sorted(p.name for p in (self.folder / "runs").glob("*"))[:3])
            raise UserError(
                f"run={folder}: must be the folder of one run, with manifest.json and checkpoints/"
                + (f"; for example one of runs/: {hint}" if hint else "")
            )
        try:
            self.arm, self.hyper = str(record["arm"]), Hyper(**record["hyper"])
            self.data = configs.from_dict(corpora.DataConfig(), record["data"])
            self.train_config = configs.from_dict(TrainConfig(), record["train"])
            config = configs.from_dict(DecoderConfig(), record["model"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"run={folder}: its manifest is not one of this version ({error}); train it anew"
            ) from None
        now = config.identity()["rows"]
        changed = configs.differences(record["model"].get("rows"), json.loads(json.dumps(now)))
        if changed:
            raise UserError(
                f"run={folder}: a norm, placement or rule that it names is another one now"
                f" ({'; '.join(changed[:4])}); bring the old one back, by --plugins=FILE if it is"
                " one of your own"
            )
        self._fingerprint = record["data"].get("fingerprint")
        self._checkpoints = SavedStates(found)
        saved = self._checkpoints.steps
        if not saved:
            raise UserError(f"run={folder}: has no whole checkpoint yet; let it train a while")
        for step, file in self._checkpoints.damaged.items():
            warnings.warn(
                f"{folder}: the checkpoint of step {step} is damaged ({file})", stacklevel=2
            )
        self.steps: tuple[int, ...] = (0, *(step for step in saved if step > 0))
        vocabulary = self._checkpoints.shapes(saved[-1])["params.embedding"][0][0]
        self.model = Decoder(config, vocabulary, self.data.window)

    def params(self, step: int) -> Params:
        """Return the parameters at one of ``steps``."""
        return self.state(step).params

    def state(self, step: int) -> State:
        """Return the whole state of training at one of ``steps``: parameters, moments, counters."""
        if step not in self.steps:
            known = ", ".join(str(s) for s in self.steps)
            raise UserError(f"step={step}: must be one of {known}, the steps kept in {self.folder}")
        state = jax.eval_shape(lambda: self._initial())
        if step == 0:
            return jax.jit(self._initial)()
        return self._checkpoints.restore(step, state)

    def parts(self, step: int) -> Parts:
        """Return the decoder's parts as functions, with the parameters at one of ``steps``."""
        return Parts(self.model, self.params(step))

    def windows(self, count: int) -> np.ndarray:
        """Return windows (count, T + 1) of the validation text that it was evaluated on.

        Raises:
          UserError: the text is gone, or another one now.
        """
        return self.corpus.evaluation_set(self.data.window, count)[0]

    @cached_property
    def corpus(self) -> corpora.AnyCorpus:
        """The text that it was trained on.

        Raises:
          UserError: its tokens are not cached, and the text is gone or is another one now.
        """
        return corpora.open_by_fingerprint(self.data, self._fingerprint)

    def _initial(self) -> Any:
        hyper = Hyper(np.uint32(self.hyper.seed), *(np.float32(x) for x in self.hyper[1:]))
        return train.init_state(self.model, self.train_config, hyper)


def run_folders(path: str | Path) -> list[Path]:
    """Return the run folders that a path means: itself, or a workdir's that hold a checkpoint.

    Raises:
      UserError: neither.
    """
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        return [folder]
    found = sorted(p.parent for p in folder.glob(f"runs/*/{MANIFEST}"))
    found = [p for p in found if RunFolder(p).value("checkpoints")]
    if not found:
        raise UserError(
            f"runs={path}: must be a run folder, or a workdir with runs/*/manifest.json and"
            " checkpoints; train one, e.g. python launch.py"
        )
    return found
