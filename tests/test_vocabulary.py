"""Vocabularies: bijections between text and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from normjax.data.vocabulary import VOCABULARIES, Vocabulary
from normjax.errors import UserError


@pytest.mark.parametrize("text", ["hello", "naïve Ω 漢字 🙂\n\t", "a"])
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_vocabulary_is_a_bijection(kind, text):
    vocabulary = Vocabulary.of(kind, text)
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    if kind == "char":  # by the definition, with Python's own sorting
        assert vocabulary.characters == "".join(sorted(set(text)))
        assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    else:
        assert vocabulary.size == 256
        assert ids.tolist() == list(text.encode("utf-8"))


@pytest.mark.parametrize("size, dtype", [(256, np.uint8), (257, np.uint16), (65537, np.uint32)])
def test_the_smallest_type_that_fits(size, dtype):
    text = "".join(chr(0xE000 + i) if 0xE000 + i < 0x110000 else "" for i in range(size))
    vocabulary = Vocabulary.of("char", text)
    ids = vocabulary.encode(text)
    assert vocabulary.size == size
    assert ids.dtype == dtype
    np.testing.assert_array_equal(ids, np.arange(size))


def test_what_is_not_in_the_vocabulary_is_named():
    vocabulary = Vocabulary.of("char", "abc")
    with pytest.raises(UserError, match=r"'é' \(U\+00E9, position 2\).*vocabulary=byte"):
        vocabulary.encode("abé")
    with pytest.raises(UserError, match="token 3: must be between 0 and 2"):
        vocabulary.decode([0, 3])
    with pytest.raises(UserError, match="token -1"):
        vocabulary.decode([-1])
    with pytest.raises(UserError, match="did you mean 'char'"):
        Vocabulary.of("chars", "abc")


def test_bytes_cut_inside_a_character_still_decode():
    vocabulary = Vocabulary("byte")
    assert vocabulary.decode(vocabulary.encode("aé")[:2]) == "a\ufffd"
