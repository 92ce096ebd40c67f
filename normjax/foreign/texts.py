"""Texts as the tokens of a checkpoint: its tokenizer.json, or the vocabulary in a GGUF file.

The library tokenizers does it, from files that are there; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normjax import named_files, regular_files
from normjax.errors import UserError
from normjax.foreign.tensors import Gguf

MOST_TOKENIZER = 1 << 27
MOST_IDS = 1 << 24
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")
"""Values of tokenizer.ggml.pre: how a text is cut before pairs are merged."""


class Tokenizer:
    """Texts to tokens.

    Attributes:
      size: number of tokens that it knows.
    """

    def __init__(self, inner: Any, argument: str, first: Sequence[int] = (), bytes_: bool = False):
        self._inner, self._argument, self._first, self._bytes = inner, argument, first, bytes_
        self.size: int = inner.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text; ``special``: with those that the model begins with.

        Raises:
          UserError: the vocabulary of a GGUF file has no token for a byte of it.
        """
        found = self._inner.encode(text, add_special_tokens=special)
        if self._bytes and sum(map(len, found.tokens)) != len(text.encode()):
            raise UserError(
                f"{self._argument}: its vocabulary has no token for some bytes of the text; pass"
                " another text, or ids"
            )
        return [*(self._first if special else ()), *found.ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token stands for, as the vocabulary has it; "?" for none."""
        return [self._inner.id_to_token(each) or "?" for each in ids]


def open_tokenizer(path: str | Path, argument: str = "model") -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Args:
      path: a folder with tokenizer.json, such a file, or a GGUF file.
      argument: what messages start with.

    Raises:
      UserError: there is none, or it is of a kind that we do not read.
    """
    path = Path(path)
    said = f"{argument}={regular_files.printable(str(path))}"
    if path.suffix == ".gguf":
        return _of_gguf(Gguf(path, said).values, said)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = named_files.read(file, said, MOST_TOKENIZER, "pass a tokenizer.json, or ids")
    except FileNotFoundError:
        raise UserError(f"{said}: has no tokenizer.json; pass one, or a file of ids") from None
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner.from_str(text.decode())
    except Exception as error:  # the library has no narrower one
        raise UserError(f"{said}: {file.name}: is no tokenizer ({error})") from None
    inner.no_truncation()
    inner.no_padding()
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None  # merges left out at random: of training only
    return Tokenizer(inner, said)


def read_ids(path: str | Path, vocabulary: int, argument: str = "tokens") -> list[int]:
    """Return the tokens that a file lists as whole numbers between blanks.

    Raises:
      UserError: something else is in it, none at all, or a number that is no token.
    """
    path = Path(path)
    said = f"{argument}={regular_files.printable(str(path))}"
    try:
        words = named_files.read(path, said, MOST_IDS, "pass a file of whole numbers").split()
    except FileNotFoundError:
        raise UserError(f"{said}: there is no such file") from None
    if not words:
        raise UserError(f"{said}: is empty; list tokens, whole numbers between blanks")
    for at, word in enumerate(words, 1):
        if not word.isdigit():
            shown = word[:20].decode(errors="replace")
            raise UserError(f"{said}: word {at} is {shown!r}; must be a whole number")
        if len(word) > 10 or int(word) >= vocabulary:
            shown = word[:20].decode()
            raise UserError(
                f"{said}: word {at} is {shown}; must be a token from 0 to {vocabulary - 1}"
            )
    return [int(word) for word in words]


def _of_gguf(values: dict[str, Any], said: str) -> Tokenizer:
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    kind, pre = (values.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    fix = "pass a tokenizer.json, or ids"
    if kind != "gpt2":
        raise UserError(f"{said}: tokenizer.ggml.model={kind}: must be gpt2, a byte BPE; {fix}")
    if pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{said}: tokenizer.ggml.pre={pre}: must be one of {', '.join(PRE_TOKENIZERS)}; {fix}"
        )
    tokens = _texts(values, "tokens", said)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError(f"{said}: tokenizer.ggml.tokens lists a token twice; {fix}")
    merges: list[Any] = [tuple(each.split(" ")) for each in _texts(values, "merges", said)]
    if any(len(pair) != 2 for pair in merges):
        raise UserError(f"{said}: tokenizer.ggml.merges: each must be two tokens; {fix}")
    try:
        model: Any = models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library has no narrower one
        raise UserError(f"{said}: tokenizer.ggml.merges: {error}; {fix}") from None
    inner = Inner(model)
    steps: list[Any] = []
    if pre in ("gpt-2", "smollm"):
        steps += [pre_tokenizers.Digits(individual_digits=True)] * (pre == "smollm")
    else:
        words = Regex(_WORDS % ("{1,3}" if pre == "llama-bpe" else ""))
        steps.append(pre_tokenizers.Split(words, "isolated"))
    plain = pre in ("gpt-2", "smollm")
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[attr-defined]
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()  # type: ignore[attr-defined]
    bos = values.get("tokenizer.ggml.bos_token_id")
    # llama.cpp: where the file does not say it, these begin without one but for llama-bpe.
    begins = values.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    if begins and (not isinstance(bos, int) or not 0 <= bos < len(tokens)):
        raise UserError(f"{said}: tokenizer.ggml.bos_token_id={bos}: must be a token; {fix}")
    first = [int(bos)] if begins and bos is not None else []
    return Tokenizer(inner, said, first, bytes_=pre != "qwen2")


def _texts(values: dict[str, Any], key: str, said: str) -> list[str]:
    found = values.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UserError(f"{said}: tokenizer.ggml.{key}: must be a list of texts")
    return found
