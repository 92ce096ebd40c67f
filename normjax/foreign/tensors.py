"""Where the tensors of a checkpoint are: a folder of safetensors files, or one GGUF file.

Files come from strangers. They are opened as regular files, mapped into memory, and whatever a
header says is held against the file's length before anything is read. Nothing is unpickled. A file
that is shortened by somebody while it is mapped ends the process, as with every memory map.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from normjax import named_files, regular_files
from normjax.errors import UserError

Floats = npt.NDArray[np.float32]
MOST_HEADER = 100_000_000
"""Bytes of a header; the safetensors format allows no more."""
SHAPE_LIMIT = 2**40
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT = (
    "pickled weights run code when they are read: convert them to safetensors"
    " (safetensors.torch.save_file) where you trust them"
)
SAFE_DTYPES = ("F32", "F16", "BF16")
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor: its shape, and how its numbers are stored."""

    shape: tuple[int, ...]
    dtype: str


class Tensors(Protocol):
    """Tensors by name.

    Attributes:
      form: "safetensors" or "gguf".
      files: those that hold the tensors.
      dtypes: how tensors may be stored that are read.
    """

    form: str
    files: Sequence[Path]
    dtypes: Sequence[str]

    def names(self) -> list[str]:
        """Return the names, in order."""
        ...

    def called(self, name: str) -> str:
        """Return what a tensor, there or not, is called in the file."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return shape and dtype of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Floats:
        """Return a tensor as float32: f16 and bf16 widened, blocks of numbers dequantized.

        Raises:
          UserError: it is stored in another way.
        """
        ...


def open_tensors(path: Path, argument: str) -> SafeTensors | Gguf:
    """Return the tensors of a checkpoint.

    Args:
      path: a folder with model.safetensors or model.safetensors.index.json, or a GGUF file.
      argument: what messages start with, such as ``--model=/some/path``.

    Raises:
      UserError: it is neither, or its files contradict themselves.
    """
    if path.is_dir():
        return SafeTensors(path, argument)
    if path.suffix in PICKLES:
        raise UserError(f"{argument}: {CONVERT}")
    if path.suffix == ".safetensors":
        raise UserError(f"{argument}: pass the folder that holds it and its config.json")
    return Gguf(path, argument)


def read_json(path: Path, argument: str, most: int = MOST_HEADER) -> dict[str, Any]:
    """Return the object that a JSON file of a checkpoint holds.

    Raises:
      UserError: it is missing, no JSON object, or names something twice.
    """
    try:
        text = named_files.read(path, f"{argument}: {path.name}", most, "pass a plain file")
    except FileNotFoundError:
        raise UserError(f"{argument}: has no {path.name}; pass a folder that has") from None
    return _object(text, f"{argument}: {path.name}")


def _object(text: bytes, said: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{said}: is no JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{said}: must be a JSON object; download it again")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice!r} is named twice")
    return found


class SafeTensors:
    """The tensors of a folder: model.safetensors, or the files that its index names."""

    form = "safetensors"
    dtypes: Sequence[str] = SAFE_DTYPES

    def __init__(self, folder: Path, argument: str) -> None:
        self.argument, self.folder = argument, folder
        named: dict[str, str] | None = None
        if (folder / INDEX).exists() and not (folder / SINGLE).exists():
            named = self._index()
            files = sorted(set(named.values()))
        else:
            files = [SINGLE]
            if not (folder / SINGLE).exists():
                pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
                why = f"it has {regular_files.printable(pickled[0])}; {CONVERT}" if pickled else (
                    f"pass a folder with {SINGLE} or {INDEX}"
                )  # fmt: skip
                raise UserError(f"{argument}: has no {SINGLE}; {why}")
        self._where: dict[str, Path] = {}
        self._held: dict[str, Tensor] = {}
        for name in files:
            self._add(folder / name)
        if named is not None:
            self._check_index(named)
        self.files: Sequence[Path] = tuple(folder / name for name in files)

    def names(self) -> list[str]:
        return list(self._held)

    def called(self, name: str) -> str:
        return name

    def tensor(self, name: str) -> Tensor:
        return self._held[name]

    def read(self, name: str) -> Floats:
        held = self._held[name]
        if held.dtype not in SAFE_DTYPES:
            raise UserError(
                f"{self.argument}: {name} is stored as {held.dtype}; must be one of"
                f" {', '.join(SAFE_DTYPES)}; convert it"
            )
        with _safe_open(self._where[name], self.argument) as file:
            found = file.get_tensor(name)  # its own memory; bfloat16 by ml_dtypes
        return np.asarray(found).astype(np.float32, copy=False)

    def _index(self) -> dict[str, str]:
        found = read_json(self.folder / INDEX, self.argument).get("weight_map")
        said = f"{self.argument}: {INDEX}"
        if not isinstance(found, dict) or not found:
            raise UserError(f'{said}: must hold a "weight_map" of tensors to files')
        for name, file in found.items():
            if not isinstance(file, str) or Path(file).name != file or (
                Path(file).suffix != ".safetensors"
            ):  # fmt: skip
                raise UserError(
                    f"{said}: {name} is to be in {file!r}; must be a .safetensors file of this"
                    " folder"
                )
        return found

    def _check_index(self, named: dict[str, str]) -> None:
        for name, file in named.items():
            if name not in self._held or self._where[name].name != file:
                raise UserError(
                    f"{self.argument}: {INDEX} has {name} in {file}, which does not hold it;"
                    " download both again"
                )
        if over := [name for name in self._held if name not in named]:
            raise UserError(
                f"{self.argument}: {self._where[over[0]].name} holds {over[0]}, which {INDEX} does"
                " not name; download both again"
            )

    def _add(self, path: Path) -> None:
        said = f"{self.argument}: {regular_files.printable(path.name)}"
        if path.is_symlink() and not path.resolve().is_relative_to(self.folder.resolve()):
            raise UserError(f"{said} links out of its folder; copy the file there (cp -L)")
        try:
            with regular_files.opened(path) as file:
                header = file.read(8) or b""
                length = int.from_bytes(header, "little")
                size = path.stat().st_size
                if len(header) < 8 or length > min(MOST_HEADER, size - 8):
                    raise UserError(
                        f"{said} is cut short, or no safetensors file; download it again"
                    )
                _object(file.read(length) or b"", said)  # names given twice
        except FileNotFoundError:
            raise UserError(f"{said} is missing; download it") from None
        except regular_files.Unread as found:
            raise UserError(f"{said} {found.words}; pass a plain file") from None
        except OSError as error:
            raise UserError(
                f"{said} cannot be read ({error.strerror}); pass a plain file"
            ) from None
        with _safe_open(path, said) as file:
            for name in list(file.keys()):
                if name in self._held:
                    raise UserError(
                        f"{said} holds {name}, as does {self._where[name].name}; keep one of them"
                    )
                part = file.get_slice(name)
                self._held[name] = Tensor(tuple(part.get_shape()), part.get_dtype())
                self._where[name] = path


@contextlib.contextmanager
def _safe_open(path: Path, said: str) -> Generator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{said}: {error}; download it again") from None


# --- GGUF -----------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_CHUNK = 1 << 20
"""Numbers that are dequantized at once: the library holds several copies of those."""


class _Header:
    """A cursor on the header of a GGUF file; every step is held against the file's end.

    Our own, and not the library's reader: that one walks an array of 2^60 entries past the end of
    the file, and keeps an object for each token of the vocabulary.
    """

    def __init__(self, data: npt.NDArray[np.uint8], said: str) -> None:
        self.data, self.said, self.at = data, said, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise UserError(f"{self.said} is cut short; download it again")
        self.at += count
        return self.data[self.at - count : self.at].tobytes()

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self) -> Any:
        kind = self.number("I")
        return self._array() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise UserError(f"{self.said} has a value of the unknown type {kind}; convert it again")
        return self.number(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            data = self.take(count * struct.calcsize(code))
            return [value for (value,) in struct.iter_unpack(code, data)]
        if kind != _STRING or 8 * count > len(self.data):
            raise UserError(f"{self.said} has a list of {count} values of type {kind}")
        return [self.text() for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class _Stored:
    tensor: Tensor
    kind: Any
    start: int
    size: int


class Gguf:
    """The tensors of a GGUF file of version 2 or 3, and what it says of itself in ``values``.

    Shapes are those of NumPy: the file has them the other way round.
    """

    form = "gguf"
    dtypes: Sequence[str] = GGUF_TYPES

    def __init__(self, path: Path, argument: str) -> None:
        self.argument = argument
        self.files: Sequence[Path] = (path,)
        self._data = _mapped(path, argument)
        header = _Header(self._data, argument)
        if header.take(4) != b"GGUF":
            raise UserError(f"{argument}: is no GGUF file; pass one, or a folder of safetensors")
        version = header.number("I")
        if version not in (2, 3):
            raise UserError(
                f"{argument}: GGUF version {version}; must be 2 or 3, little-endian; convert it"
            )
        count, pairs = header.number("Q"), header.number("Q")
        self.values: dict[str, Any] = {}
        for _ in range(_counted(pairs, header)):
            name = header.text()
            if name in self.values:
                raise UserError(f"{argument}: says {name} twice; convert it again")
            self.values[name] = header.value()
        found = [self._entry(header) for _ in range(_counted(count, header))]
        self._held = self._placed(found, header.at)

    def names(self) -> list[str]:
        return list(self._held)

    def called(self, name: str) -> str:
        return name

    def tensor(self, name: str) -> Tensor:
        return self._held[name].tensor

    def read(self, name: str) -> Floats:
        from gguf.quants import dequantize

        held = self._held[name]
        shape = held.tensor.shape
        if held.tensor.dtype not in GGUF_TYPES:
            raise UserError(
                f"{self.argument}: {name} is quantized as {held.tensor.dtype}; must be one of"
                f" {', '.join(GGUF_TYPES)}; convert it"
            )
        raw = self._data[held.start : held.start + held.size]
        if held.tensor.dtype in ("F32", "F16"):
            plain = raw.view("<f4" if held.tensor.dtype == "F32" else "<f2")
            return plain.reshape(shape).astype(np.float32)
        width = shape[-1] if shape else 1
        rows = raw.reshape(-1, held.size // max(1, math.prod(shape[:-1])))
        out = np.empty((len(rows), width), np.float32)
        step = max(1, _CHUNK // width)
        for start in range(0, len(rows), step):
            out[start : start + step] = dequantize(rows[start : start + step], held.kind)
        return out.reshape(shape)

    def _entry(self, header: _Header) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = header.text(), header.number("I")
        if dims > 4:
            raise UserError(f"{self.argument}: {name} has {dims} dimensions; at most 4")
        shape = tuple(reversed([header.number("Q") for _ in range(dims)]))
        return name, shape, header.number("I"), header.number("Q")

    def _placed(
        self, found: Iterable[tuple[str, tuple[int, ...], int, int]], end: int
    ) -> dict[str, _Stored]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        said, step = self.argument, self.values.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise UserError(f"{said}: general.alignment={step}: must be a power of two")
        first = -(-end // step) * step
        out: dict[str, _Stored] = {}
        for name, shape, number, offset in found:
            if name in out:
                raise UserError(f"{said}: holds {name} twice; convert it again")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise UserError(f"{said}: {name} is of the unknown type {number}") from None
            block, size = GGML_QUANT_SIZES[kind]
            numbers, width = math.prod(shape), shape[-1] if shape else 1
            if numbers > SHAPE_LIMIT or width % block:
                raise UserError(f"{said}: {name} has shape {shape}, in blocks of {block}")
            stored = _Stored(
                Tensor(shape, kind.name), kind, first + offset, numbers // block * size
            )
            if offset % step or stored.start + stored.size > len(self._data):
                raise UserError(
                    f"{said}: {name} is to be at byte {stored.start:,} to"
                    f" {stored.start + stored.size:,} of a file of {len(self._data):,}; download"
                    " it again"
                )
            out[name] = stored
        before: tuple[int, str] = (0, "")
        for name, each in sorted(out.items(), key=lambda pair: pair[1].start):
            if each.start < before[0]:
                raise UserError(f"{said}: {name} overlaps {before[1]}; download it again")
            before = each.start + each.size, name
        return out


def _mapped(path: Path, argument: str) -> npt.NDArray[np.uint8]:
    try:
        with regular_files.opened(path) as file:
            if not path.stat().st_size:
                raise UserError(f"{argument}: is empty; download it again")
            return np.memmap(file, np.uint8, mode="r")  # type: ignore[arg-type]
    except FileNotFoundError:
        raise UserError(f"{argument}: there is no such file or folder") from None
    except regular_files.Unread as found:
        raise UserError(f"{argument}: {found.words}; pass a GGUF file or a folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{argument}: cannot be read ({reason}); pass a GGUF file") from None


def _counted(count: int, header: _Header) -> int:
    """Return a number of entries of at least twelve bytes each that the file has room for."""
    if 12 * count > len(header.data):
        raise UserError(f"{header.said} says {count:,} entries; download it again")
    return count
