"""Files of one's own, loaded into the program: norms, placements, tasks, texts, experiments.

    --plugins=mine.py,mypackage.norms        loaded before anything is looked up by name
    --experiment=mine.py                     an experiment that is a file

What has been loaded is remembered with the SHA-256 of its content, and is part of what defines a
run: an edited plug-in makes other runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

from normjax import named_files, registry
from normjax.errors import UserError, suggest

MOST_BYTES = 16 << 20
"""Of a file of source code."""
_ALLOWED = "name a Python file, such as mine.py, or a module, such as mypackage.mine"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A loaded file.

    Attributes:
      path: where it was.
      name: its file name without suffix, or the dotted name of its module.
      sha256: of its content, in hex.
      module: what it defines.
    """

    path: Path
    name: str
    sha256: str
    module: ModuleType = dataclasses.field(compare=False, repr=False)


_LOADED: dict[str, Plugin] = {}
"""By SHA-256."""
_COUNTED: set[str] = set()


def load(path: str | os.PathLike[str], argument: str = "--plugins", counts: bool = True) -> Plugin:
    """Load a Python file, or a module by its dotted name, once for every content.

    Modules beside a file that it imports are loaded with it and count as plug-ins too. What a file
    that fails has added to tables is taken out again.

    Args:
      path: a file ending in ``.py``, or a dotted name.
      argument: what messages call it.
      counts: whether it is part of what defines a run even where it adds no row to any table.

    Raises:
      UserError: no such file, or one that cannot be loaded: one line with file, line and reason.
    """
    text = os.fspath(path)
    file, name = _found(text, argument)
    try:
        content = named_files.read(file, f"{argument}={text}", MOST_BYTES, _ALLOWED)
    except FileNotFoundError as error:
        raise UserError(f"{argument}={text}: no such file ({error.filename}); {_ALLOWED}") from None
    key = hashlib.sha256(content).hexdigest()
    if key not in _LOADED:
        before, rows = set(sys.modules), registry.added()
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # last: it shadows nothing
        with _in_one_line(f"{argument}={text}", file):
            own = text if _is_dotted(text) else f"normjax_plugin_{key[:16]}"
            module = _executed(file, content, own)
        _LOADED[key] = Plugin(file, name, key, module)
        beside = [key, *_beside(file, set(sys.modules) - before)]
        if counts or registry.added() > rows:
            _COUNTED.update(beside)
    elif counts:
        _COUNTED.add(key)
    return _LOADED[key]


def loaded() -> tuple[Plugin, ...]:
    """Return what is part of the runs from here on, sorted by name."""
    found = (_LOADED[key] for key in _COUNTED)
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.sha256)))


def record() -> list[dict[str, str]]:
    """Return the same as plain JSON. Where a file lay is no part of what it is.

    >>> record()
    []
    """
    return [{"name": plugin.name, "sha256": plugin.sha256} for plugin in loaded()]


def entry() -> dict[str, list[dict[str, str]]]:
    """Return :func:`record` under its name, and nothing where there are no plug-ins.

    What is written without any is then what it was before there were plug-ins.
    """
    return {"plugins": record()} if _COUNTED else {}


def is_outside(text: str) -> bool:
    """Whether a name is that of a file or a module rather than one of the program's own.

    >>> is_outside("mine.py"), is_outside("lab.mine"), is_outside("depth")
    (True, True, False)
    """
    return "." in text or os.sep in text


def short_name(text: str) -> str:
    """Return the last part of a file's or a module's name, without suffix.

    >>> short_name("lab/mine.py"), short_name("lab.mine"), short_name("depth")
    ('mine', 'mine', 'depth')
    """
    return Path(text).stem if text.endswith(".py") else text.rpartition(".")[2]


def _is_dotted(text: str) -> bool:
    plain = not text.endswith(".py") and os.sep not in text
    return plain and all(part.isidentifier() for part in text.split("."))


def _found(text: str, argument: str) -> tuple[Path, str]:
    """Return the file and the name of a plug-in."""
    allowed = _ALLOWED
    if _is_dotted(text):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # as for `python -m`, but last
        with _in_one_line(f"{argument}={text}", None):
            spec = importlib.util.find_spec(text)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise UserError(f"{argument}={text}: no such module; {allowed}")
        return Path(spec.origin), text
    file = Path(os.path.expanduser(text)).absolute()
    if file.is_dir() or (file.exists() and file.suffix != ".py"):
        what = "a folder" if file.is_dir() else "no Python file"
        raise UserError(f"{argument}={text}: is {what}; {allowed}")
    if not file.exists():
        beside = [str(Path(text).with_name(p.name)) for p in file.parent.glob("*.py")]
        raise UserError(f"{argument}={text}: no such file{suggest(text, beside)}; {allowed}")
    return file, file.stem


def _executed(file: Path, content: bytes, name: str) -> ModuleType:
    """Return the module of a file; of a failed one nothing stays, in no table either.

    What is executed is the content that was hashed, not a compiled file that may be older.
    """
    if name in sys.modules:
        return sys.modules[name]  # imported before by its dotted name
    rows = registry.added()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the file ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(content, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        registry.take_back(rows)
        raise
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _beside(file: Path, names: set[str]) -> list[str]:
    """Remember the modules below a file's folder that came with it; return their keys."""
    keys = []
    for name in sorted(names):
        module = sys.modules[name]
        path = Path(getattr(module, "__file__", None) or os.devnull)
        if path.suffix == ".py" and path != file and path.is_relative_to(file.parent):
            key = hashlib.sha256(path.read_bytes()).hexdigest()
            _LOADED.setdefault(key, Plugin(path, name, key, module))
            keys.append(key)
    return keys


@contextlib.contextmanager
def _in_one_line(argument: str, file: Path | None) -> Generator[None]:
    """Turn whatever a file raises into one line with the line of the file that it came from."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if file is not None and frame.filename == str(file)
        ]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines = [error.lineno]
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        reason = " ".join(reason.split())
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        where = f" line {lines[-1]}" if lines and lines[-1] else ""
        at = f"{file}{where}: " if file is not None else ""
        raise UserError(f"{argument}: {at}{reason}") from error
