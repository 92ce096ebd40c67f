"""From a command line to an experiment: parsing, messages, exit codes.

launch.py defines the flags.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import shlex
import shutil
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from absl import flags, logging

import experiments
from normjax import configs
from normjax.errors import UserError, check_choice, suggest

EXIT_MISTAKE, EXIT_LOCKED, EXIT_STOPPED, EXIT_INTERRUPTED = 2, 3, 75, 130
HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort", "-?")
_NOT_EXPERIMENTS = ("cli",)
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def names() -> list[str]:
    """Return the names of the experiments: a module or a package each."""
    found = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    return sorted(set(found) - set(_NOT_EXPERIMENTS))


def find(name: str) -> ModuleType:
    """Return an experiment's module: it has PRESETS, get_config(preset) and run(...)."""
    if name not in names():
        raise UserError(
            f"--experiment={name}: must be one of {', '.join(names())}{suggest(name, names())}"
        )
    found = importlib.import_module(f"experiments.{name}")
    return (
        importlib.import_module(f"{found.__name__}.experiment")
        if hasattr(found, "__path__")
        else found
    )


def parse(values: flags.FlagValues, argv: list[str], usage: str) -> list[str]:
    """Parse a command line whose ``--config...`` flags depend on the experiment it names.

    A mistake prints one line and exits with code 2.
    """
    try:
        values(argv[:1] + _early(argv[1:]), known_only=True)
        if values.list:
            return argv[:1]
        experiment = find(values.experiment)
        check_choice("--preset", values.preset, experiment.PRESETS)
        config = experiment.get_config(values.preset)
        configs.define_flags(config, values)
        if any(argument in HELP for argument in argv[1:]):
            print(help_text(values, usage, experiment, config))
            sys.exit(0)
        values.unparse_flags()
        rest = values(argv)
        if len(rest) > 1:
            hint = "; flags are written --name=value" if "=" in rest[1] else ""
            raise UserError(f"{rest[1]}: left over, it belongs to no flag{hint}")
        return rest
    except UserError as error:
        mistake(str(error))
    except flags.Error as error:
        mistake(explain(values, error))


def _early(arguments: list[str]) -> list[str]:
    """Keep what is no configuration and no help: those are understood in the second pass."""
    return [a for a in arguments if not a.startswith(("--config.", "-config.")) and a not in HELP]


def explain(values: flags.FlagValues, error: flags.Error) -> str:
    """Return absl's complaint as one line that says what is allowed."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        return f"--{name}: no such flag{suggest(name, list(values))}; --help lists all"
    text = " ".join(str(error).split())
    if isinstance(error, flags.IllegalFlagValueError) and text.startswith("flag --"):
        assignment = text.removeprefix("flag ").split(": ", 1)[0]
        name = assignment.removeprefix("--").split("=", 1)[0]
        kind = _KINDS.get(values[name].flag_type()) if name in values else None
        if kind:
            usual = configs.shown(values[name].default)
            return f"{assignment}: must be {kind}; pass --{name}={usual}"
    return text


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Generator[None]:
    """Let ``launch.py --help | head`` end quietly: the reader has seen what it wanted."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def mistake(line: str) -> NoReturn:
    """Print one line and exit with the code of a mistake in the command."""
    print(f"normjax: {line}", file=sys.stderr)
    sys.exit(EXIT_MISTAKE)


def help_text(values: flags.FlagValues, usage: str, experiment: ModuleType, config: Any) -> str:
    """Return usage, the launcher's flags, and every field of the experiment's configuration."""
    lines = [textwrap.dedent(usage).strip(), "", "Flags (default in brackets):"]
    lines += [_entry(f"--{f.name}", f.default, f.help) for f in _launcher_flags(values)]
    lines += ["", f"Experiment {values.experiment}: {_first_line(experiment)}", "Presets:"]
    lines += [f"  {name:<12}{text}" for name, (text, _) in experiment.PRESETS.items()]
    section = ""
    for leaf in configs.leaves(config):
        head = leaf.path.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines += ["", f"Configuration, {section} (with preset {values.preset}):"]
        lines.append(_entry(f"--config.{leaf.path}", leaf.value, leaf.help))
    return "\n".join(lines)


def _launcher_flags(values: flags.FlagValues) -> list[flags.Flag]:
    by_module = values.flags_by_module_dict()
    own = by_module.get("launch", []) or by_module.get(sys.argv[0], [])
    return sorted(own, key=lambda flag: flag.name)


def _entry(name: str, default: Any, text: str) -> str:
    shown = configs.shown(default)
    body = f"{text} [{shown}]" if shown else text
    column = 38
    head = f"  {name:<{column - 2}}"
    return textwrap.fill(body, 100, initial_indent=head, subsequent_indent=" " * column)


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def listing() -> str:
    """Return every experiment with its first line and its presets."""
    lines = []
    for name in names():
        module = find(name)
        lines.append(f"{name}: {_first_line(module)}")
        lines += [
            f"    --preset={preset:<12}{text}" for preset, (text, _) in module.PRESETS.items()
        ]
    return "\n".join(lines)


def carry_out(values: flags.FlagValues, argv: list[str]) -> int:
    """Do what the parsed flags ask for and return the exit code."""
    if values.list:
        print(listing())
        return 0
    experiment = find(values.experiment)
    config = configs.from_flags(experiment.get_config(values.preset), values)
    try:
        configs.check(config)
    except UserError as error:
        mistake(str(error))
    if values.print_config:
        print(json.dumps(configs.to_dict(config), indent=2))
        return 0
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
    # Heavy imports wait until the command is known to be right.
    from normjax.runs import devices
    from normjax.runs.experiment import Interrupted, Options
    from normjax.runs.grid import ExperimentConfig
    from normjax.runs.locking import LockedError

    workdir = Path(values.workdir or f"runs/{values.experiment}-{values.preset}").expanduser()
    command = shlex.join([_python(), sys.argv[0], *_given(values), f"--workdir={workdir}"])
    options = Options(workdir, command, dry_run=values.dry_run, predict=values.predict)
    if values.predict and type(config) is not ExperimentConfig:
        mistake(
            f"--predict={values.predict}: --experiment={values.experiment} trains no grid whose"
            " losses could be ranked; leave it out"
        )
    try:
        devices.set_up(values.cpu_devices, values.compilation_cache)
        outcome = experiment.run(config, values.preset, options)
    except UserError as error:
        mistake(str(error))
    except LockedError as error:
        print(f"normjax: {error}", file=sys.stderr)
        return EXIT_LOCKED
    except Interrupted as stop:
        print(f"normjax: {stop}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print(f"normjax: interrupted, not saved; go on with: {command}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if outcome is None:
        return 0
    print(outcome.text)
    if outcome.page is not None:
        print(f"report: {outcome.page}")
    return outcome.code


def _python() -> str:
    """Return what a person types for this interpreter: its path, where `python` is another one."""
    found = shutil.which("python")
    here = found is not None and Path(found).absolute() == Path(sys.executable).absolute()
    return "python" if here else sys.executable


def _given(values: flags.FlagValues) -> list[str]:
    """Return the flags that the command line gave, but for workdir and dry_run, as they parse."""
    given = [*_launcher_flags(values), *(values[n] for n in values if n.startswith("config."))]
    return [
        flag.serialize()
        for flag in given
        if flag.present and flag.name not in ("workdir", "dry_run")
    ]
