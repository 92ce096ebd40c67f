"""The command line: flags, messages, exit codes, and from them to an experiment."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shlex
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from absl import app, flags, logging

import experiments
from normjax import configs, plugins
from normjax.errors import UserError, check_choice, one_line, suggest
from normjax.runs import edge, machine, streams
from normjax.runs.experiment import Options, check_address

HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort", "-?")
USAGE = """normjax: what normalization and residual connections do in a transformer decoder.

    {program}                                     the default ablation
    {program} --list                              all experiments and presets
    {program} --experiment=depth --workdir=runs/depth
    {program} --config.model.depth=8 --config.grid.seeds=5
    {program} --dry_run                           what would run, and what it would cost
    {program} --verify=runs/depth                 whether a workdir is what its runs sealed
    {program} --predict=mine.txt                  what you expect, stored first, then scored
    {program} --print_config                      every field and its value
    {program} --plugins=mine.py                   norms, placements, tasks, texts of your own
    {program} --experiment=mine.py                an experiment of your own

Exit codes: 0 done, 1 what was checked does not hold, 2 a mistake in the command, 3 the workdir is
in use, 70 a mistake of the program, 75 stopped and saved, 130 interrupted before anything could be
saved.
"""
_MODULE = "launch"  # whose the launcher's flags are, in absl's eyes
_NOT_EXPERIMENTS = ("cli", "start")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def define_flags(values: flags.FlagValues) -> None:
    """Define the launcher's own flags; those of the configuration depend on the experiment."""
    where: Any = {"flag_values": values, "module_name": _MODULE}
    for name, default, text in (
        ("experiment", "ablation", "which experiment to run: a name of --list, or a Python file"),
        ("preset", "default", "which of the experiment's presets to start from"),
        ("workdir", "", "folder of runs and report; empty: runs/EXPERIMENT-PRESET"),
        ("verify", "", "a workdir: check every file that its runs sealed; run nothing"),
        ("predict", "", "rank the variants before they run: a file, ask, or the name expected"),
        ("compilation_cache", "", "compiled programs; empty: the user's cache; off: none"),
    ):
        flags.DEFINE_string(name, default, text, **where)
    flags.DEFINE_list(
        "plugins", [], "files or modules of your own to load first: norms, tasks, ...", **where
    )
    for name, text in (
        ("dry_run", "print runs, cohorts, parameters, memory, time; run nothing"),
        ("print_config", "print the configuration as JSON; run nothing"),
        ("list", "print experiments and presets; run nothing"),
    ):
        flags.DEFINE_boolean(name, False, text, **where)
    flags.DEFINE_integer(
        "cpu_devices", 0, "host devices on a CPU, one run on each; 0: one per core", **where
    )


def main(known: edge.Known) -> NoReturn:
    """Carry out the command line of this process and exit; ``start.py`` is what calls it."""
    define_flags(flags.FLAGS)
    app.run(
        lambda _: carry_out(flags.FLAGS, known),
        flags_parser=lambda argv: parse(flags.FLAGS, argv),
    )


def names() -> list[str]:
    """Return the names of the experiments: a module or a package each."""
    found = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    return sorted(set(found) - set(_NOT_EXPERIMENTS))


def find(name: str) -> ModuleType:
    """Return an experiment's module: it has PRESETS, get_config(preset) and run(...)."""
    if plugins.is_outside(name):
        return _from_file(name)
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


def _from_file(path: str) -> ModuleType:
    """Return an experiment that is a file of the user's."""
    module = plugins.load(path, "--experiment", counts=False).module
    missing = [
        word
        for name, word in (
            ("__doc__", "a docstring"), ("PRESETS", "PRESETS"),
            ("get_config", "get_config(preset)"), ("run", "run(config, preset, options)"),
        )
        if not getattr(module, name, None)
    ]  # fmt: skip
    if missing:
        raise UserError(
            f"--experiment={path}: has no {', no '.join(missing)}; an experiment needs them, as"
            " experiments/ablation.py has"
        )
    return module


def parse(values: flags.FlagValues, argv: list[str]) -> list[str]:
    """Parse a command line whose ``--config...`` flags depend on the experiment it names.

    A mistake prints one line and exits with code 2.
    """
    try:
        _check_text(argv)
        machine.import_jax()
        values(argv[:1] + _early(argv[1:]), known_only=True)
        _load_plugins(values)
        if values.list:
            return argv[:1]
        experiment = find(values.experiment)
        check_choice("--preset", values.preset, experiment.PRESETS)
        config = experiment.get_config(values.preset)
        configs.define_flags(config, values)
        if any(argument in HELP for argument in argv[1:]):
            print(help_text(values, experiment, config))
            sys.exit(_printed())
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


def _load_plugins(values: flags.FlagValues) -> None:
    """Load the user's files: from here on their names are the program's own."""
    if values.plugins or plugins.is_outside(values.experiment):
        _set_up(values)  # they may compute while they are loaded
    for path in values.plugins:
        plugins.load(path)


def _check_text(argv: list[str]) -> None:
    """Refuse what no file could be written with: bytes that are no UTF-8 text."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise UserError(f"{shown}: is not UTF-8 text; name it with UTF-8 letters") from None


def _set_up(values: flags.FlagValues) -> None:
    from normjax.data import cache_folder

    machine.set_up(values.cpu_devices, values.compilation_cache, cache_folder.folder(""))


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


def _printed() -> int:
    """Return the exit code of a command whose result is what it printed."""
    lost = streams.lost()
    if lost is None:
        return 0
    print(f"normjax: standard output: {lost.strerror}; write it elsewhere", file=sys.stderr)
    return edge.MISTAKE


def mistake(line: str) -> NoReturn:
    """Print one line and exit with the code of a mistake in the command."""
    print(f"normjax: {one_line(line)}", file=sys.stderr)
    sys.exit(edge.MISTAKE)


def help_text(values: flags.FlagValues, experiment: ModuleType, config: Any) -> str:
    """Return usage, the launcher's flags, and every field of the experiment's configuration."""
    script = Path(sys.argv[0]).name
    program = f"python {script}" if script.endswith(".py") else "normjax"
    lines = [USAGE.format(program=program), "Flags (default in brackets):"]
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
    return sorted(values.flags_by_module_dict()[_MODULE], key=lambda flag: flag.name)


def _entry(name: str, default: Any, text: str) -> str:
    shown = configs.shown(default)
    body = f"{text} [{shown}]" if shown else text
    column = 38
    head = f"  {name:<{column - 2}}"
    return textwrap.fill(body, 100, initial_indent=head, subsequent_indent=" " * column)


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def listing(*more: str) -> str:
    """Return every experiment with its first line and its presets, those of files given too."""
    lines = []
    for name in (*names(), *more):
        module = find(name)
        lines.append(f"{name}: {_first_line(module)}")
        lines += [
            f"    --preset={preset:<12}{text}" for preset, (text, _) in module.PRESETS.items()
        ]
    return "\n".join(lines)


def carry_out(values: flags.FlagValues, known: edge.Known | None = None) -> int:
    """Do what the parsed flags ask for and return the exit code; no exception leaves it."""
    known = known or edge.given()
    try:
        return _carried_out(values, known)
    except SystemExit:
        raise
    except BaseException as error:
        return edge.tell(error, known)


def _carried_out(values: flags.FlagValues, known: edge.Known) -> int:
    if values.list:
        print(listing(*filter(plugins.is_outside, [values.experiment])))
        return _printed()
    if values.verify:
        from normjax.runs import checking

        lines, bad = checking.check(Path(values.verify).expanduser())
        print(
            "\n".join([*lines, f"{bad} of {len(lines)} are not as sealed" if bad else "all whole"])
        )
        return _printed() or bool(bad)
    experiment = find(values.experiment)
    config = configs.from_flags(experiment.get_config(values.preset), values)
    configs.check(config)
    if values.print_config:
        print(json.dumps(configs.to_dict(config), indent=2))
        return _printed()
    logging.set_verbosity(logging.FATAL)  # Orbax tells of every file, and of what it raises
    logging.get_absl_handler().addFilter(edge.without_traceback)
    # Heavy imports wait until the command is known to be right.
    from normjax.runs.grid import ExperimentConfig

    check_address("--workdir", values.workdir)
    check_address("NORMJAX_CACHE", os.environ.get("NORMJAX_CACHE", ""))
    check_address("--config.data.cache_dir", getattr(getattr(config, "data", 0), "cache_dir", ""))
    name = plugins.short_name(values.experiment)
    workdir = Path(os.path.expanduser(values.workdir or f"runs/{name}-{values.preset}"))
    if str(workdir).startswith("~"):
        raise UserError(f"--workdir={values.workdir}: has no home here; write the path out")
    command = shlex.join([*edge.program(), *_given(values), f"--workdir={workdir}"])
    known.command, known.workdir = command, workdir
    options = Options(workdir, command, dry_run=values.dry_run, predict=values.predict)
    if values.predict and not isinstance(config, ExperimentConfig):
        raise UserError(
            f"--predict={values.predict}: --experiment={values.experiment} trains no grid whose"
            " losses could be ranked; leave it out"
        )
    _set_up(values)
    machine.check_devices()
    outcome = experiment.run(config, values.preset, options)
    if outcome is None:
        return _printed()
    print(outcome.text)
    if outcome.page is not None:
        print(f"report: {outcome.page}")
    if lost := streams.lost():
        where = outcome.page or workdir
        print(f"normjax: standard output: {lost.strerror}; see {where}", file=sys.stderr)
    return outcome.code


def _given(values: flags.FlagValues) -> list[str]:
    """Return the flags that the command line gave, but for workdir and dry_run, as they parse."""
    given = [*_launcher_flags(values), *(values[n] for n in values if n.startswith("config."))]
    return [
        flag.serialize()
        for flag in given
        if flag.present and flag.name not in ("workdir", "dry_run")
    ]
