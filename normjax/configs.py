"""Frozen, typed configurations: to flags, to JSON, to a hash, and back.

A configuration is a frozen dataclass whose fields are bool, int, float, str, a tuple of those, or
another configuration. Fields are named by dotted paths: ``model.depth``. What a field's value may
be stands in its declaration; :func:`check` holds every field to it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import math
import numbers
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from absl import flags

from normjax.errors import UserError, closest, suggest

C = TypeVar("C")


Choices = Iterable[str] | Callable[[], Iterable[str]]
"""Names that a field may have, asked for when they are needed: a table may have grown by then."""

_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"), int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"), str: (str, "a text"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the value of a field may be; of a list, what each of its elements may be.

    Attributes:
      least, most: ends that are allowed.
      above, below: ends that are not.
      choices: the names allowed.
      fewest: how many a list must hold.
      distinct: whether a list may hold a value only once.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Choices | None = None
    fewest: int = 0
    distinct: bool = False

    def names(self) -> list[str]:
        """Return the names allowed now; none where any is."""
        return list(self.choices() if callable(self.choices) else self.choices or ())

    @property
    def words(self) -> str:
        """What is allowed, in words; empty where anything is.

        >>> Limits(least=1, most=8).words, Limits(above=0, most=1).words
        ('from 1 to 8', 'above 0 and at most 1')
        >>> Limits(choices=("on", "off")).words
        'one of on, off'
        """
        if self.choices is not None:
            return f"one of {', '.join(self.names())}"
        if self.least is not None and self.most is not None:
            return f"from {self.least:.10g} to {self.most:.10g}"
        ends = {"above": self.above, "at least": self.least,
                "below": self.below, "at most": self.most}  # fmt: skip
        return " and ".join(f"{word} {x:.10g}" for word, x in ends.items() if x is not None)

    def admit(self, value: Any) -> bool:
        """Whether one value lies within; no NaN or infinity does."""
        if self.choices is not None:
            return value in self.names()
        if isinstance(value, str):
            return True
        return (
            (isinstance(value, int) or math.isfinite(value))  # an int may be beyond all floats
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and self.inside(value)
        )

    def inside(self, value: Any) -> bool:
        """Whether a value lies within the ends that are not allowed themselves."""
        return isinstance(value, str) or (
            (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def field(default: Any, help: str, **limits: Any) -> Any:
    """Declare a dataclass field with a default, the help text of its flag, and its limits.

    Args:
      default: its value where nothing is said.
      help: what it is, in words. What is allowed is added where it is shown.
      **limits: fields of :class:`Limits`.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Example:
    ...     depth: int = field(4, "number of blocks", least=1, most=100)
    >>> Example().depth
    4
    >>> check(Example(depth=0))
    Traceback (most recent call last):
    normjax.errors.UserError: config.depth=0: must be from 1 to 100; pass --config.depth=4
    """
    return dataclasses.field(default=default, metadata={"help": help, "limits": Limits(**limits)})


def part(default: Any, **changed: Mapping[str, Any]) -> Any:
    """Declare a nested configuration, some of whose fields have other limits here.

    >>> steps = ("steps", int, field(9, "steps", least=1))
    >>> train = dataclasses.make_dataclass("T", [steps], frozen=True)
    >>> Example = dataclasses.make_dataclass(
    ...     "Example", [("train", train, part(train(), steps={"least": 0}))])
    >>> check(Example(train=train(steps=0)))
    """
    return dataclasses.field(default=default, metadata={"changed": changed})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One plain field of a nested configuration.

    Attributes:
      path: its dotted name.
      type: as declared: a plain type, or a tuple of one.
      value: what it holds.
      usual: what it holds where nothing is said.
      text: its help text as declared.
      limits: what is allowed.
    """

    path: str
    type: Any
    value: Any
    usual: Any
    text: str
    limits: Limits

    @property
    def is_list(self) -> bool:
        """Whether it holds any number of values."""
        return typing.get_origin(self.type) is tuple

    @property
    def kind(self) -> Any:
        """The plain type of its value, or of its elements."""
        return typing.get_args(self.type)[0] if self.is_list else self.type

    @property
    def help(self) -> str:
        """Its help text with what is allowed."""
        words = self.limits.words
        return f"{self.text} ({words})" if words else self.text


def leaves(config: Any) -> Iterator[Leaf]:
    """Yield every plain field of a nested configuration in the order of declaration."""
    return _leaves(config, None, "", {})


def _leaves(
    config: Any, usual: Any, prefix: str, changed: Mapping[str, Mapping[str, Any]]
) -> Iterator[Leaf]:
    types = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, path = getattr(config, f.name), prefix + f.name
        if usual is not None:
            default = getattr(usual, f.name)
        else:
            default = value if f.default is dataclasses.MISSING else f.default
        if dataclasses.is_dataclass(value) and not _is_row(value):
            yield from _leaves(value, default, path + ".", f.metadata.get("changed", {}))
        else:
            limits = f.metadata.get("limits", Limits())
            limits = dataclasses.replace(limits, **changed.get(f.name, {}))
            yield Leaf(path, types[f.name], value, default, f.metadata.get("help", ""), limits)


def check(config: Any, prefix: str = "config") -> None:
    """Hold every field of a nested configuration to the limits of its declaration.

    Raises:
      UserError: one line with the field's flag, its value, what is allowed and the fix.
    """
    for leaf in leaves(config):
        if wrong := _wrong(leaf):
            value, what, fix = wrong
            flag = f"{prefix}.{leaf.path}"
            raise UserError(f"{flag}={shown(value)}: {what} pass --{flag}={shown(fix)}")


def _is_typed(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type; true and false are no numbers."""
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _wrong(leaf: Leaf) -> tuple[Any, str, Any] | None:
    """Return what is wrong with a field: the value, why, and a value that would do."""
    limits, kind = leaf.limits, _KINDS[leaf.kind][1]
    values = list(leaf.value) if leaf.is_list else [leaf.value]
    first: tuple[Any, str] | None = None
    kept = []
    for value in values:
        if _is_row(value):
            kept.append(value)
            continue
        is_typed = _is_typed(value, leaf.kind)
        admitted = is_typed and limits.admit(value)
        single = _single(value) if admitted and isinstance(value, float) else value
        if admitted and bool(single) == bool(value) and limits.inside(single):
            kept.append(value)
            continue
        close = closest(value, limits.names()) if isinstance(value, str) else None
        if close is not None:
            kept.append(close)
        why = f"must be {(limits.words or 'finite') if is_typed else kind}"
        why = f"{why}, and in float32 it is {single:g}" if admitted else why
        first = first or (value, why + (f"; did you mean {close!r}?" if close else ";"))
    once = list(dict.fromkeys(kept)) if limits.distinct else kept
    if first is None and len(values) < limits.fewest:
        first = leaf.value, f"must list at least {limits.fewest};"
    elif first is None and len(once) < len(values):
        first = leaf.value, "must list each value once;"
    if first is None:
        return None
    value, why = first
    if len(once) < max(1, limits.fewest):
        return value, why, leaf.usual
    return value, why, tuple(once) if leaf.is_list else once[0]


def _single(value: float) -> float:
    """Return what a number is in float32, in which it will be computed with; a subnormal one is 0.

    >>> _single(0.99999999), _single(1e-60), _single(0.5)
    (1.0, 0.0, 0.5)
    """
    single = ctypes.c_float(value).value
    return single if abs(single) >= 2.0**-126 else 0.0


def shown(value: Any) -> str:
    """Return a value as a command line says it.

    >>> shown((1, 2)), shown(False), shown(0.001)
    ('1,2', 'false', '0.001')
    """
    if isinstance(value, (list, tuple)):
        return ",".join(str(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def replace(config: C, changes: Mapping[str, Any]) -> C:
    """Return ``config`` with dotted fields replaced: ``{"model.depth": 8}``.

    Raises:
      UserError: a path that does not exist, with the closest one that does.

    >>> model = dataclasses.make_dataclass("Model", [("depth", int, 4)], frozen=True)
    >>> fields = [("model", model, model())]
    >>> Config = dataclasses.make_dataclass("Config", fields, frozen=True)
    >>> replace(Config(), {"model.depth": 8})
    Config(model=Model(depth=8))
    """
    known = [leaf.path for leaf in leaves(config)]
    for path in changes:
        if path not in known:
            raise UserError(f"config.{path}: no such field{suggest(path, known)}")
    return _replace(config, changes)


def _replace(config: C, changes: Mapping[str, Any]) -> C:
    direct = {k: v for k, v in changes.items() if "." not in k}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        if "." in path:
            head, tail = path.split(".", 1)
            nested.setdefault(head, {})[tail] = value
    updates = {head: _replace(getattr(config, head), sub) for head, sub in nested.items()}
    return dataclasses.replace(config, **direct, **updates)  # type: ignore[type-var]


def to_dict(config: Any) -> dict[str, Any]:
    """Return a nested dict of JSON values: tuples become lists, rows of tables their names."""
    return json.loads(json.dumps(_plain(config)))


def _plain(value: Any) -> Any:
    if _is_row(value):
        return getattr(value, "name", "") or value.title
    if not dataclasses.is_dataclass(value):
        return value
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _is_row(value: Any) -> bool:
    """Whether a field holds a row of a table itself, in place of its name."""
    return hasattr(value, "record") and hasattr(value, "title")


def from_dict(config: C, values: Mapping[str, Any]) -> C:
    """Return ``config`` with the values of a dict that :func:`to_dict` made of one like it.

    Names that are no fields are passed over, absent ones keep the value in ``config``: a record of
    another version is read as far as it is known. What values may be is for :func:`check`.

    Raises:
      UserError: no dict, or a value of another kind than its field.

    >>> Config = dataclasses.make_dataclass("Config", [("depths", tuple[int, ...], ())])
    >>> from_dict(Config(), {"depths": [2, 4], "other": 1})
    Config(depths=(2, 4))
    """
    if not isinstance(values, Mapping):
        raise UserError(f"config={reprlib.repr(values)}: must be an object with fields by name")
    updates, types = {}, typing.get_type_hints(type(config))
    for each in dataclasses.fields(config):  # type: ignore[arg-type]
        if each.name not in values:
            continue
        old, new = getattr(config, each.name), values[each.name]
        if dataclasses.is_dataclass(old) and not _is_row(old):
            updates[each.name] = from_dict(old, new)
            continue
        inner = typing.get_args(types[each.name])
        listed = inner and isinstance(new, (list, tuple))
        kind = inner[0] if listed else types[each.name]
        if kind not in _KINDS or not all(_is_typed(v, kind) for v in (new if listed else [new])):
            words = f"a list, each {_KINDS[inner[0]][1]}" if inner else _KINDS[kind][1]
            raise UserError(f"config.{each.name}={reprlib.repr(new)}: must be {words}")
        updates[each.name] = tuple(new) if listed else new
    return dataclasses.replace(config, **updates)  # type: ignore[type-var]


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return what differs between two JSON values, a line "field: old -> new" each.

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ['b.c: 2 -> 3']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys((*old, *new))
        pairs = ((k, old.get(k, "absent"), new.get(k, "absent")) for k in keys)
        return [line for k, a, b in pairs for line in differences(a, b, f"{path}.{k}".lstrip("."))]
    return [] if old == new else [f"{path}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def digest(value: Any, length: int = 8) -> str:
    """Return the first ``length`` hex digits of the SHA-256 of a JSON value's canonical text.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def define_flags(config: Any, flag_values: flags.FlagValues) -> None:
    """Define one absl flag ``--config.PATH`` for every plain field of ``config``."""
    for leaf in leaves(config):
        name, module = f"config.{leaf.path}", "normjax"
        if leaf.is_list:
            flags.DEFINE(
                _TupleParser(leaf.kind), name, leaf.value, leaf.help + " (comma-separated)",
                flag_values=flag_values, serializer=_TupleSerializer(), module_name=module,
            )  # fmt: skip
            continue
        define = {
            bool: flags.DEFINE_boolean, int: flags.DEFINE_integer,
            float: flags.DEFINE_float, str: flags.DEFINE_string,
        }[leaf.type]  # fmt: skip
        flag = define(name, leaf.value, leaf.help, flag_values=flag_values)
        flag_values.register_flag_by_module(module, flag_values[flag.name])


def from_flags(config: C, flag_values: flags.FlagValues) -> C:
    """Return ``config`` with the values that the flags of :func:`define_flags` hold."""
    return replace(config, {leaf.path: flag_values[f"config.{leaf.path}"].value
                            for leaf in leaves(config)})  # fmt: skip


class _TupleParser(flags.ArgumentParser):
    """Comma-separated values of one plain type; an empty text is the empty tuple."""

    syntactic_help = "comma-separated values"

    def __init__(self, element: type):
        self._element = element

    def parse(self, argument: Any) -> tuple[Any, ...]:
        if isinstance(argument, (tuple, list)):
            return tuple(argument)
        parts = [part.strip() for part in argument.strip("()[] ").split(",")]
        try:
            return tuple(self._element(part) for part in parts if part)
        except ValueError:
            kind = {int: "whole numbers", float: "numbers"}.get(self._element, "values")
            raise ValueError(f"{argument!r} is not a list of {kind} such as 1,2,3") from None

    def flag_type(self) -> str:
        return f"comma separated {self._element.__name__}"


class _TupleSerializer(flags.ArgumentSerializer):
    def serialize(self, value: Any) -> str:
        return shown(value)
