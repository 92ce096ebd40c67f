"""Where a row stands in the code, found in the files themselves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from normjax import norms, placements, plugins


class Place(NamedTuple):
    """A file, the line of a row's name in it, and the text of the row."""

    path: Path
    line: int
    text: str


def find(kind: str, name: str) -> Place | None:
    """Return where a row of a kind, "placement" or "norm", is; None where no file says so.

    Files of the user's own come first: they may replace a row.

    >>> find("norm", "rmsnorm").path.name
    'norms.py'
    """
    table = Path({"placement": placements, "norm": norms}[kind].__file__ or "")
    for path in (*(plugin.path for plugin in plugins.loaded()), table):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
            for key, value in pairs:
                if isinstance(key, ast.Constant) and key.value == name and path == table:
                    lines = source.splitlines()[key.lineno - 1 : value.end_lineno]
                    return Place(path, key.lineno, "\n".join(lines))
            if isinstance(node, ast.Call) and node.args and path != table:
                first, own = node.args[0], getattr(node.func, "attr", getattr(node.func, "id", ""))
                said = isinstance(first, ast.Constant) and first.value == name
                if said and own == f"register_{kind}":
                    text = ast.get_source_segment(source, node) or ""
                    return Place(path, first.lineno, text)
    return None
