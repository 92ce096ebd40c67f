"""A text that a person wrote, as a prediction; every mistake is one line that says what is allowed.

Two forms, as text or JSON::

    # lowest loss first               # expected validation loss in nats per token
    author: A. N. Other               level: 95
    reason: what I expect, and why    full: 2.1 (1.9 to 2.3)
    full                              no-mlp: 2.4 ± 0.2
    post-norm = no-norm               no-norm: 2.6
    no-mlp

    {"ranking": ["full", ["post-norm", "no-norm"], "no-mlp"], "author": "", "reason": ""}
    {"losses": {"full": [2.1, 1.9, 2.3], "no-norm": 2.6}, "level": 95}

Names on one line joined by ``=`` are equal. An interval is meant to hold the mean of the measured
losses with the probability ``level``, 80 % unless said, from its (100 - level)/2 % quantile to the
one as far from the other end: alpha = 1 - level/100 is what it is scored with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from normjax.errors import UserError, suggest
from normjax.predictions.prediction import (
    LEVEL,
    LEVELS,
    LOSSES,
    RANKING,
    VARIANTS,
    Candidate,
    Expected,
    Prediction,
    by_loss,
    ranking,
)

HEADERS = ("author", "reason", "level")
KEYS = (RANKING, LOSSES, *HEADERS)
MOST_LETTERS = 1000
"""Of a message: what it quotes may be as long as the file."""
_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_VALUE = re.compile(
    rf"{_NUMBER}(?:\s*nats)?"
    rf"(?:\s*[(\[]\s*{_NUMBER}\s*(?:to|\.\.+|[,;–-])\s*{_NUMBER}\s*[)\]]"
    rf"|\s*(?:±|\+/-|\+-)\s*{_NUMBER})?"
)
_BULLET = re.compile(r"(?:(\d{1,9})[.)]|[-*•])\s+")
_FORM = '"2.1", or with an interval "2.1 (1.9 to 2.3)"'


def parse(text: str, argument: str, candidates: Sequence[Candidate]) -> Prediction:
    """Return the prediction that a text states.

    Args:
      text: what the file holds, in one of the forms above.
      argument: what messages start with, such as ``--predict=mine.txt``.
      candidates: what may be named.

    Raises:
      UserError: anything in it cannot be understood, or it states nothing.

    >>> names = [Candidate("full"), Candidate("no-mlp")]
    >>> [e.place for e in parse("full = no-mlp", "--predict=x", names).entries]
    [1, 1]
    >>> parse("full: 2 (1 to 3)", "--predict=x", names).entries[0].high
    3.0
    """
    reader = _Reader(argument, candidates)
    text = text.removeprefix("\ufeff")
    try:
        if text.lstrip()[:1] in ("{", "["):
            _read_json(text, reader)
        else:
            _read_lines(text, reader)
    except RecursionError:
        raise reader.wrong("nested too deeply; a list holds names, or lists of names") from None
    return reader.finish()


def example(candidates: Iterable[Candidate]) -> str:
    """Return the two forms, made of the names that there are, as a part of a sentence."""
    names = [c.name for c in candidates if c.planned and c.subject == VARIANTS][:3]
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f"write one name per line, lowest loss first ({listed}), or expected losses in nats"
        f' ("{names[0]}: 2.1 (1.9 to 2.3)")'
    )


class _Reader:
    """Collects what the lines or the JSON say, and says where something is wrong."""

    def __init__(self, argument: str, candidates: Sequence[Candidate]):
        self.argument, self.candidates = argument, candidates
        self.where = ""
        self.groups: list[list[str]] = []
        self.losses: list[Expected] = []
        self.said: dict[str, str] = {}
        self._found: dict[str, str] = {}
        self._subjects: dict[str, str] = {}

    def wrong(self, what: str) -> UserError:
        what = what if len(what) <= MOST_LETTERS else what[: MOST_LETTERS - 1] + "…"
        return UserError(f"{self.argument}: {self.where}{what}")

    def name(self, text: str) -> str:
        """Return the name that is meant; each may be named once."""
        folded = " ".join(text.split()).casefold()
        known = [c for c in self.candidates if c.name.casefold() == folded]
        known = known or [c for c in self.candidates if c.title.casefold() == folded != ""]
        if not known:
            names = [c.name for c in self.candidates]
            one_line = "; one name per line" if re.search(r"[,<>]", text) else ""
            close = suggest(text, [*names, *HEADERS]) or f"; they are {', '.join(names)}"
            raise self.wrong(f"{text!r} is no variant of this grid{one_line or close}")
        candidate = known[0]
        if candidate.name in self._found:
            raise self.wrong(
                f"{candidate.name} is named twice (before: {self._found[candidate.name]});"
                " name each variant once"
            )
        self._found[candidate.name] = self.where.rstrip(": ") or "above"
        self._subjects.setdefault(candidate.subject, candidate.name)
        if len(self._subjects) > 1:
            both = " and ".join(self._subjects.values())
            raise self.wrong(
                f"{both} are a single variant and a whole series; predict either variants or series"
            )
        return candidate.name

    def loss(self, name: str, expected: Any, low: Any = None, high: Any = None) -> None:
        """Add an expected loss."""
        name = self.name(name)
        for value in (expected, *(end for end in (low, high) if end is not None)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self.wrong(f"{name}: {value!r} is no number; write a loss in nats as {_FORM}")
            if not abs(value) < 1e300 or value < 0:  # not isfinite: an int may be beyond floats
                raise self.wrong(
                    f"{name}: {value} cannot be a loss; it must be finite and at least 0 (leave"
                    " out a variant that you expect to diverge, or write a ranking)"
                )
        if low is not None and not low <= expected <= high:
            raise self.wrong(
                f"{name}: the interval {low:g} to {high:g} does not hold the expected"
                f" {expected:g}; write lower end, then upper end"
            )
        ends = (None, None) if low is None else (float(low), float(high))
        self.losses.append(Expected(name, 0, float(expected), *ends))

    def header(self, key: str, value: str) -> None:
        """Take an author, a reason (the parts of several lines are joined) or a level."""
        value = " ".join(value.split())
        if not _is_text(value):
            raise self.wrong(f"{key}: holds half a character (a surrogate); write whole ones")
        if key == "level":
            number = value.removesuffix("%").strip()
            if number not in [str(level) for level in LEVELS]:
                allowed = " or ".join(str(level) for level in LEVELS)
                raise self.wrong(f"level={value}: must be {allowed} (per cent)")
            value = number
        if key != "reason" and key in self.said:
            raise self.wrong(f"{key} is given twice; give it once")
        self.said[key] = f"{self.said.get(key, '')} {value}".strip()

    def finish(self) -> Prediction:
        self.where = ""
        count = sum(len(group) for group in self.groups) + len(self.losses)
        if not count:
            raise self.wrong(f"predicts nothing; {example(self.candidates)}")
        kind = LOSSES if self.losses else RANKING
        entries = by_loss(self.losses) if self.losses else ranking(self.groups)
        planned = {c.name for c in self.candidates if c.planned}
        usable = [entry.name for entry in entries if entry.name in planned]
        if len(usable) < (2 if kind == RANKING else 1):
            only = f"only {usable[0]}" if usable else "none of them"
            raise self.wrong(
                f"of what it names this grid runs {only}, so there is nothing to compare;"
                f" {example(self.candidates)}"
            )
        level = int(self.said.get("level", LEVEL))
        author, reason = (self.said.get(key, "") for key in ("author", "reason"))
        return Prediction(kind, entries, author, reason, level, next(iter(self._subjects)))


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can say what cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_lines(text: str, reader: _Reader) -> None:
    last = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        reader.where = f"line {number}: "
        line = raw.strip()
        if line.startswith("#"):
            continue
        head, colon, rest = line.partition(":")
        if colon and head.strip().casefold() in HEADERS:
            key = head.strip().casefold()
            reader.header(key, rest if key != "level" else _uncommented(rest))
            continue
        line = _uncommented(line)
        bullet = _BULLET.match(line)
        if bullet:
            line = line[bullet.end() :]
            if bullet[1] is not None and int(bullet[1]) <= last:
                raise reader.wrong(
                    f"numbered {bullet[1]} after {last}; list the lowest loss first, in order"
                )
            last = int(bullet[1] or last)
        if not line:
            continue
        if ":" in line:
            _read_loss(line, reader)
        else:
            reader.groups.append([reader.name(name.strip()) for name in line.split("=")])
        if reader.groups and reader.losses:
            raise reader.wrong(
                'mixes names alone and "name: loss"; write an order or losses, not both'
            )


def _uncommented(line: str) -> str:
    return re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()


def _read_loss(line: str, reader: _Reader) -> None:
    name, _, rest = line.partition(":")
    name, rest = name.strip(), rest.strip()
    match = _VALUE.fullmatch(rest)
    if match is None:
        reader.name(name)  # a wrong name is the better complaint
        raise reader.wrong(f"{name}: {rest!r} is no loss; write {_FORM}, with decimal points")
    expected, low, high, half = (None if part is None else float(part) for part in match.groups())
    assert expected is not None
    if half is not None:
        low, high = expected - half, expected + half
    reader.loss(name, expected, low, high)


def _read_json(text: str, reader: _Reader) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise reader.wrong(f"looks like JSON and is none ({error})") from None
    value = {RANKING: value} if isinstance(value, list) else value
    for key in value:
        if key not in KEYS:
            raise reader.wrong(f"key {key!r}: must be one of {', '.join(KEYS)}{suggest(key, KEYS)}")
    if RANKING in value and LOSSES in value:
        raise reader.wrong('states both "ranking" and "losses"; state one')
    for key in HEADERS:
        if key in value:
            if isinstance(value[key], bool) or not isinstance(value[key], (str, int)):
                raise reader.wrong(f"{key}={json.dumps(value[key])}: must be text")
            reader.header(key, str(value[key]))
    groups = value.get(RANKING, [])
    if not isinstance(groups, list):
        raise reader.wrong('"ranking" must be a list of names, a list within it for equals')
    for group in groups:
        names = group if isinstance(group, list) else [group]
        for name in names:
            if not isinstance(name, str):
                raise reader.wrong(f"ranking holds {json.dumps(name)}, which is no name")
        if names:
            reader.groups.append([reader.name(name) for name in names])
    losses = value.get(LOSSES, {})
    if not isinstance(losses, dict):
        raise reader.wrong('"losses" must be an object of names and losses')
    for name, stated in losses.items():
        parts = stated if isinstance(stated, list) else [stated]
        if len(parts) not in (1, 3) or (len(parts) == 3 and None in parts):
            raise reader.wrong(
                f"{name}: {json.dumps(stated)} must be a loss or [loss, lower end, upper end]"
            )
        reader.loss(name, *parts)
