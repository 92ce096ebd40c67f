"""normjax: what normalization and residual connections do in a transformer decoder.

    python launch.py                                     the default ablation
    python launch.py --list                              all experiments and presets
    python launch.py --experiment=depth --workdir=runs/depth
    python launch.py --config.model.depth=8 --config.grid.seeds=5
    python launch.py --dry_run                           what would run, and what it would cost
    python launch.py --predict=mine.txt                  what you expect, stored first, then scored
    python launch.py --print_config                      every field and its value

Exit codes: 0 done, 2 a mistake in the command, 3 the workdir is in use, 75 stopped and saved,
130 interrupted before anything could be saved.
"""

from __future__ import annotations

import sys

from absl import app, flags

from experiments import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("experiment", "ablation", "which experiment to run; --list shows them")
flags.DEFINE_string("preset", "default", "which of the experiment's presets to start from")
flags.DEFINE_string("workdir", "", "folder of runs and report; empty: runs/EXPERIMENT-PRESET")
flags.DEFINE_string(
    "predict", "", "rank the variants before they run: a file, ask, or the name expected"
)
flags.DEFINE_boolean("dry_run", False, "print runs, cohorts, parameters, memory, time; run nothing")
flags.DEFINE_boolean("print_config", False, "print the configuration as JSON; run nothing")
flags.DEFINE_boolean("list", False, "print experiments and presets; run nothing")
flags.DEFINE_string(
    "compilation_cache", "", "compiled programs; empty: the user's cache; off: none"
)
flags.DEFINE_integer("cpu_devices", 0, "host devices on a CPU, one run on each; 0: one per core")


def main(argv: list[str]) -> int:
    """Carry out what the flags ask for."""
    return cli.carry_out(FLAGS, argv)


def run() -> None:
    """Entry point of the command line."""
    with cli.closed_pipe_is_no_error():
        app.run(
            main, argv=sys.argv, flags_parser=lambda argv: cli.parse(FLAGS, argv, __doc__ or "")
        )


if __name__ == "__main__":
    run()
