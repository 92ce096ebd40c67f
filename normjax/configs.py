"""Frozen, typed configurations: to flags, to JSON, to a hash, and back.

A configuration is a frozen dataclass whose fields are bool, int, float, str, a tuple of those, or
another configuration. Fields are named by dotted paths: ``model.depth``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from absl import flags

from normjax.errors import UserError, suggest

C = TypeVar("C")


def field(default: Any, help: str) -> Any:
    """Declare a dataclass field with a default and the help text of its flag.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Example:
    ...     depth: int = field(4, "number of blocks")
    >>> Example().depth
    4
    """
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One plain field of a nested configuration."""

    path: str
    type: Any
    value: Any
    help: str


def leaves(config: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every plain field of a nested configuration in the order of declaration."""
    types = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, path = getattr(config, f.name), prefix + f.name
        if dataclasses.is_dataclass(value) and not _is_row(value):
            yield from leaves(value, path + ".")
        else:
            yield Leaf(path, types[f.name], value, f.metadata.get("help", ""))


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
    return hasattr(value, "record") and not isinstance(value, type)


def from_dict(config: C, values: Mapping[str, Any]) -> C:
    """Return ``config`` with the values of a dict that :func:`to_dict` made of one like it.

    Names that are no fields are passed over, absent ones keep the value in ``config``: a record of
    another version is read as far as it is known.

    >>> Config = dataclasses.make_dataclass("Config", [("depths", tuple[int, ...], ())])
    >>> from_dict(Config(), {"depths": [2, 4], "other": 1})
    Config(depths=(2, 4))
    """
    updates = {}
    for each in dataclasses.fields(config):  # type: ignore[arg-type]
        if each.name not in values:
            continue
        old, new = getattr(config, each.name), values[each.name]
        if dataclasses.is_dataclass(old):
            new = from_dict(old, new)
        elif isinstance(new, list):
            new = tuple(new)
        elif type(new) is not type(old) and not (isinstance(old, float) and isinstance(new, int)):
            raise ValueError(f"{each.name}={new!r}: must be like {old!r}")
        updates[each.name] = new
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
        if typing.get_origin(leaf.type) is tuple:
            element = typing.get_args(leaf.type)[0]
            flags.DEFINE(
                _TupleParser(element), name, leaf.value, leaf.help + " (comma-separated)",
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
        return ",".join(str(v) for v in value)
