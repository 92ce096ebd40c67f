"""A checkpoint of another program as one of our decoders, read block by block."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax import regular_files
from normjax.decoder import Decoder, Layer, Params, parameter_shapes
from normjax.decoder_config import DecoderConfig
from normjax.errors import UserError, suggest
from normjax.foreign.gguf_names import translated
from normjax.foreign.mappings import MODEL_TYPES, REFUSED, ModelType, Part
from normjax.foreign.settings import Settings, listed
from normjax.foreign.tensors import Gguf, Tensors, open_tensors, read_json

MOST_CONFIG = 1 << 24
_HELD = ("depth", "vocabulary", "window")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint was read from.

    Attributes:
      path: as it was given.
      form: "safetensors" or "gguf".
      files: bytes of each file of weights, by name.
      config_sha256: of what config.json or a GGUF file's header says, as sorted JSON.
    """

    path: Path
    form: str
    files: dict[str, int]
    config_sha256: str


class OpenedModel:
    """A checkpoint, opened: its configuration at once, its weights when they are asked for.

    Attributes:
      config: the decoder's, in float32.
      vocabulary, window: tokens it knows, and positions it can have.
      model_type: as its config.json has it.
      source: where it comes from.

    Blocks are counted from 1. Whatever is read is float32, held against NaN and infinity, and not
    kept: only the caller holds it.
    """

    def __init__(self, tensors: Tensors, settings: Settings, source: Source, argument: str) -> None:
        self.argument, self.source, self._tensors = argument, source, tensors
        self.model_type, row = _row(settings, argument)
        self.settings = settings
        tied = settings.flag("tie_word_embeddings", row.tied)
        fields = row.fields(settings) | {"tied": tied}
        if settings.problems:
            raise listed(settings.problems, argument)
        self.vocabulary, self.window = fields.pop("vocabulary"), fields.pop("window")
        config = DecoderConfig(**fields)
        try:
            self._decoder = Decoder(config, self.vocabulary, self.window)
        except UserError as error:
            raise UserError(f"{argument}: as our decoder, {error}") from None
        self.config = self._decoder.config
        self._places = _Places(row, settings, fields, tensors)
        self._shapes = dict(_flat(parameter_shapes(self._decoder)))
        problems = self._places.problems(self._shapes, self.config.depth)
        if problems:
            raise listed(problems, argument)
        self._check_head(row)

    def decoder(self) -> Decoder:
        """Return the decoder that the parameters are of."""
        return self._decoder

    def block(self, block: int) -> Params:
        """Return the parameters of one block, counted from 1, as NumPy arrays in float32.

        Raises:
          UserError: there is no such block, or a tensor holds NaN or infinity.
        """
        if not 1 <= block <= self.config.depth:
            raise UserError(f"block={block}: must be from 1 to {self.config.depth}")
        own = {k: v for k, v in self._shapes.items() if k.startswith("blocks.")}
        return self._tree({
            name.removeprefix("blocks."): self._value(name, shape[1:], block)
            for name, shape in own.items()
        })  # fmt: skip

    def layer(self, block: int) -> Layer:
        """Return parameters and factors of one block: what :meth:`Decoder.block` takes."""
        return self.block(block), self._decoder.factors(block)

    def ends(self) -> Params:
        """Return the parameters without the blocks: embedding, positions, final norm, output."""
        own = {k: v for k, v in self._shapes.items() if not k.startswith("blocks.")}
        return self._tree({name: self._value(name, shape) for name, shape in own.items()})

    def params(self) -> Params:
        """Return all parameters, those of the blocks stacked: all of the model in memory."""
        out = self.ends()
        out["blocks"] = jax.tree.map(
            lambda *each: np.stack(each),
            *(self.block(block) for block in range(1, self.config.depth + 1)),
        )
        return out

    def _value(self, name: str, shape: tuple[int, ...], block: int = 0) -> np.ndarray:
        part = self._places.part(name)
        if not part.name:
            return np.zeros(shape, np.float32)
        theirs = self._places.name(name, block)
        stored = self._tensors.read(theirs)
        if not np.isfinite(stored).all():
            raise UserError(
                f"{self.argument}: {self._tensors.called(theirs)} of shape {stored.shape} holds NaN"
                " or infinity; download the checkpoint again"
            )
        return np.ascontiguousarray(part.read(stored))

    @staticmethod
    def _tree(flat: Mapping[str, Any]) -> Params:
        out: Params = {}
        for name, value in flat.items():
            *above, last = name.split(".")
            node = out
            for key in above:
                node = node.setdefault(key, {})
            node[last] = value
        return out

    def _check_head(self, row: ModelType) -> None:
        """Refuse an output layer of its own where the settings say that it is the embedding."""
        if not self.config.tied or (head := self._places.head) is None:
            return
        embedding = self._places.name("embedding", 0)
        if not np.array_equal(self._tensors.read(head), self._tensors.read(embedding)):
            raise UserError(
                f"{self.argument}: {head} differs from {embedding}, and tie_word_embeddings is"
                " true; set it to false in config.json where the output layer is one of its own"
            )


class _Places:
    """Which tensor of a checkpoint holds which parameter."""

    def __init__(self, row: ModelType, s: Settings, fields: Any, tensors: Tensors) -> None:
        self.row, self.tensors = row, tensors
        self.there = dict.fromkeys(tensors.names())
        self.parts = {f"blocks.{k}": v for k, v in row.blocks(s, fields).items()}
        self.parts |= row.ends(s, fields)
        # Some checkpoints are of the model without its output layer, whose names begin later.
        without = row.root and not any(name.startswith(row.root) for name in self.there)
        self.cut = row.root if without else ""
        heads = [name for name in row.head if name in self.there]
        self.head = heads[0] if heads else None

    def part(self, ours: str) -> Part:
        return self.parts[ours]

    def name(self, ours: str, block: int) -> str:
        """Return the tensor's name for a parameter, of a block counted from 1."""
        name = self.parts[ours].name
        if ours == "output.kernel":
            return self.head or self.row.head[0]
        full = self.row.layer.format(block - 1) + name if ours.startswith("blocks.") else name
        return full.removeprefix(self.cut)

    def problems(self, shapes: Mapping[str, tuple[int, ...]], depth: int) -> list[str]:
        """Return what is missing, of another shape, or has no place, a line each."""
        assert set(shapes) == set(self.parts), set(shapes) ^ set(self.parts)
        out, used = [], set()
        for theirs, wanted in self._wanted(shapes, depth):
            used.add(theirs)
            if theirs not in self.there:
                called = self.tensors.called(theirs)
                out.append(f"{called} is missing; expected with shape {wanted}")
                continue
            found, called = self.tensors.tensor(theirs), self.tensors.called(theirs)
            if found.shape != wanted:
                out.append(f"{called} has shape {found.shape}; expected {wanted}")
            if found.dtype not in self.tensors.dtypes:
                allowed = ", ".join(self.tensors.dtypes)
                out.append(f"{called} is stored as {found.dtype}; must be one of {allowed}")
        if self.head is not None:
            used.add(self.head)
        for name in self.there:
            if name not in used and not self.row.is_ignored(name):
                found = self.tensors.tensor(name)
                called = self.tensors.called(name)
                out.append(f"{called} of shape {found.shape} has no place in our decoder")
        return out

    def _wanted(
        self, shapes: Mapping[str, tuple[int, ...]], depth: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for ours, shape in shapes.items():
            part, inside = self.parts[ours], ours.startswith("blocks.")
            if part.name:
                for block in range(1, depth + 1) if inside else (0,):
                    own = shape[1:] if inside else shape
                    yield self.name(ours, block), part.shape(own)


def open_model(path: str | Path, argument: str = "model") -> OpenedModel:
    """Open a checkpoint: a Hugging Face folder of safetensors, or a GGUF file.

    Everything that its headers say is checked; no weights are read but, where it has an output
    layer that is said to be the embedding, those two. Nothing is downloaded.

    Args:
      path: the folder (with config.json), or the file.
      argument: what messages start with.

    Raises:
      UserError: in one line, with the tensors' names and shapes: what is missing, superfluous,
        misshapen, of an unknown type, or needs a branch that our decoder does not have.
    """
    path = Path(path)
    said = f"{argument}={regular_files.printable(str(path))}"
    tensors = open_tensors(path, said)
    if isinstance(tensors, Gguf):
        settings, held = translated(tensors, said)
        values = tensors.values
    else:
        values = read_json(path / "config.json", said, MOST_CONFIG)
        settings, held = Settings(values), tensors
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    files = {each.name: each.stat().st_size for each in tensors.files}
    return OpenedModel(held, settings, Source(path, tensors.form, files, digest), said)


def _row(settings: Settings, argument: str) -> tuple[str, ModelType]:
    name = settings.values.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return name, MODEL_TYPES[name]
    if isinstance(name, str) and name in REFUSED:
        raise UserError(f"{argument}: model_type={name} is not read: {REFUSED[name]}")
    raise UserError(
        f"{argument}: model_type={name}: must be one of {', '.join(MODEL_TYPES)}"
        f"{suggest(str(name), MODEL_TYPES)}"
    )


def _flat(tree: Params, above: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", tuple(value.shape)
