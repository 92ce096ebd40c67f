"""Vocabularies: between text and tokens, by characters or by bytes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from normjax.errors import UserError, check_choice

VOCABULARIES = ("char", "byte")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A bijection between characters (or bytes) and ``0 .. size-1``.

    >>> vocabulary = Vocabulary.of("char", "hello")
    >>> vocabulary.characters
    'ehlo'
    >>> vocabulary.decode(vocabulary.encode("hole"))
    'hole'
    """

    kind: str
    characters: str = ""  # sorted by code point; empty for bytes

    @classmethod
    def of(cls, kind: str, *texts: str) -> Vocabulary:
        """Return the vocabulary of all characters in ``texts``, or that of bytes."""
        check_choice("data.vocabulary", kind, VOCABULARIES)
        if kind == "byte":
            return cls(kind)
        points = [np.unique(_code_points(text)) for text in texts]
        return cls(kind, _from_code_points(np.unique(np.concatenate(points))))

    @property
    def size(self) -> int:
        """Number of different tokens V."""
        return 256 if self.kind == "byte" else len(self.characters)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(max(self.size - 1, 0))

    @functools.cached_property
    def _points(self) -> np.ndarray:
        return _code_points(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text.

        Raises:
          UserError: a character that is not in the vocabulary.
        """
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8"), np.uint8).copy()
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = np.take(self._points, ids, mode="clip") != points
        if unknown.any():
            at = int(np.argmax(unknown))
            raise UserError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}, position {at}): not among the "
                f"{self.size} characters of the corpus; leave it out, or train on bytes with "
                "--config.data.vocabulary=byte"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Any) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
          UserError: a token outside ``0 .. size-1``.
        """
        ids = np.asarray(ids, dtype=np.int64).ravel()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
            bad = int(ids[(ids < 0) | (ids >= self.size)][0])
            raise UserError(f"token {bad}: must be between 0 and {self.size - 1}")
        if self.kind == "byte":
            return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return _from_code_points(self._points[ids])


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def _from_code_points(points: np.ndarray) -> str:
    return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
