"""The table of tasks. Adding a row is all it takes to have a task trained, tested and reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from normjax.data.tasks.clock import Clock
from normjax.data.tasks.copying import Copying
from normjax.data.tasks.in_context import InContextChain
from normjax.data.tasks.markov import Markov1, Markov2
from normjax.data.tasks.modular import ModularSum
from normjax.data.tasks.recall import Recall
from normjax.data.tasks.task import Task
from normjax.errors import UserError, check_choice
from normjax.registry import Registry


@dataclasses.dataclass(frozen=True)
class Row:
    """A task with its default parameters, and what a reader wants to know of it.

    Attributes:
      title: what a heading calls it.
      description: one paragraph.
      formula: of the least loss with full information.
      source: where the field knows it from.
      build: the task for a window.
    """

    title: str
    description: str
    formula: str
    source: str
    build: Callable[[int], Task]


TASKS: Registry[Row] = Registry("task", {
    "markov1": Row(
        "Markov chain of order 1",
        "The next token depends on the current one alone, through a fixed table of four tokens. "
        "Nothing but the embedding and the output layer is needed: a control for all other tasks.",
        "H(x_t, x_{t+1}) - H(x_t)",
        "Edelman et al. 2024, arXiv 2402.11004; Makkuva et al. 2024, arXiv 2402.04161",
        Markov1,
    ),
    "markov2": Row(
        "Markov chain of order 2",
        "The next of three tokens depends on the current one and the one before, and log-odds are "
        "a sum of one term for each: attention to the previous place is needed, and no more.",
        "log V at t = 0, then the mean over (x_{t-1}, x_t) of H(P(. | x_{t-1}, x_t))",
        "Edelman et al. 2024, arXiv 2402.11004; Makkuva et al. 2024, arXiv 2402.04161",
        Markov2,
    ),
    "in_context_chain": Row(
        "Markov chain learned in context",
        "A chain of two tokens whose transition probabilities are drawn anew for each sequence. A "
        "predictor has to count what followed earlier occurrences of the current token.",
        "mean entropy of (n_xy + 1) / (n_x + 2) over the transition counts",
        "Edelman et al. 2024, arXiv 2402.11004; Olsson et al. 2022, arXiv 2209.11895",
        InContextChain,
    ),
    "recall": Row(
        "associative recall",
        "Keys and values alternate; a key has the same value throughout a sequence, by a map that "
        "is drawn anew for each. Attention has to find the key by content and fetch its value.",
        "(1 - 1/K)^i log V in pair i = 0, 1, ...",
        "Ba et al. 2016, arXiv 1610.06258; Arora et al. 2023, arXiv 2312.04927; Olsson et al. "
        "2022, arXiv 2209.11895",
        Recall,
    ),
    "copy": Row(
        "copying at a fixed distance",
        "Each token is a noisy copy of the one five places before it. Attention has to find a "
        "place by its distance, whatever stands there.",
        "H(noise)",
        "Hochreiter and Schmidhuber 1997, \"Long short-term memory\" (memory tasks); Olsson et al. "
        "2022, arXiv 2209.11895 (copying heads)",
        Copying,
    ),
    "clock": Row(
        "a clock",
        "Tokens are independent; which of four is likely depends on the position in a circle of "
        "sixteen. The current token says nothing of the next. Absolute position says all there is "
        "to say; without it the phase has to be guessed from the order of many noisy tokens.",
        "H(noise)",
        "de Bruijn 1946 for the circular word; the task is this project's own",
        Clock,
    ),
    "modular_addition": Row(
        "modular addition",
        "Two numbers and their sum modulo 5, over and over. No predictor whose logits are linear "
        "in one-hot inputs beats guessing: what two places say has to be combined nonlinearly.",
        "0",
        "Power et al. 2022, arXiv 2201.02177; Nanda et al. 2023, arXiv 2301.05217",
        ModularSum,
    ),
    "parity": Row(
        "parity",
        "Three bits and their parity, over and over. As modular addition, but of three places, and "
        "symmetric in them: the multiset of all tokens so far has the same parity.",
        "0",
        "Minsky and Papert 1969, \"Perceptrons\"; Power et al. 2022, arXiv 2201.02177",
        lambda window: ModularSum(window, modulus=2, operands=3),
    ),
})  # fmt: skip


def register_task(name: str, row: Row, *, replace: bool = False) -> Row:
    """Add a task, which ``--config.data.corpus=task:NAME`` then names, and return its row.

    Args:
      name: small letters, digits, underscores.
      row: its words, and ``build(window)``, which returns a :class:`normjax.data.tasks.task.Task`.
      replace: whether a name that is taken may get another row.

    Raises:
      UserError: a name that is none or is taken, or something that is no row.
    """
    if not isinstance(row, Row):
        raise UserError(f"task {name!r}: {type(row).__name__} is no normjax.data.tasks.table.Row")
    return TASKS.register(name, row, replace=replace)


def build(name: str, window: int) -> Task:
    """Return a task of the table for a window.

    Args:
      name: a key of :data:`TASKS`.
      window: T.

    Raises:
      UserError: no such task, or a window too short to show what it asks for.

    >>> task = build("copy", 8)
    >>> task.sample(seed=0, step=0, size=2).shape
    (2, 9)
    >>> round(task.optimum("full"), 3), round(task.optimum("current"), 3)
    (0.485, 1.099)
    """
    check_choice("task", name, TASKS)
    return TASKS[name].build(window)


def parameters(task: Task) -> dict[str, Any]:
    """Return what a task is made with besides its window.

    >>> parameters(build("parity", 9))
    {'modulus': 2, 'operands': 3}
    """
    fields = dataclasses.asdict(task)
    fields.pop("window")
    return fields
