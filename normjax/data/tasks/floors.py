"""Which information each ablated decoder has: below which loss it cannot get, and why.

Every floor is a lower bound on the expected loss, by what can reach the output at all. ``reached``
says whether decoders of that kind, wide enough and with weights large enough, come as close to it
as one likes; where it is False only the bound is claimed. None of this says that training gets
there: where the information is all there, what is measured is learning, not ability.

Two limits of attention stand behind many entries. Softmax attention is a mean, so where all tokens
up to a place are alike, every place gets the same: with rotary or no positions such prefixes look
the same at any length. And a mean shows shares, not numbers: one block without positions sees
less than the multiset of tokens whose value its floor is.

References:
  Haviv et al. 2022, "Transformer Language Models without Positional Encodings Still Learn
  Positional Information", arXiv 2203.16634; Kazemnejad et al. 2023, "The Impact of Positional
  Encoding on Length Generalization in Transformers", arXiv 2305.19466.
"""

from __future__ import annotations

import dataclasses

from normjax.data.tasks.table import TASKS
from normjax.data.tasks.task import Task
from normjax.errors import check_choice

DECODERS = {
    "full": "causal attention with rotary positions, MLP, norms, residual path; two blocks or more",
    "no-attention": "no attention, and with it no rotary positions",
    "no-attention-learned-positions": "no attention; a learned vector for each position",
    "no-positions": "attention without positions, two blocks or more",
    "no-positions-one-block": "attention without positions, one block",
    "no-mlp": "attention with rotary positions, no MLP",
    "no-norm": "no norm anywhere",
    "no-residual": "each branch passes on only what it computes",
    "post-norm": "the norm behind the addition",
}
"""The decoders that floors are stated for."""

INFORMATION_OF = {
    "full": "full",
    "no-attention": "current",
    "no-attention-learned-positions": "current_position",
    # The causal mask gives each position another prefix, and a second block can compare prefixes.
    "no-positions": "full",
    "no-positions-one-block": "unordered",
    "no-mlp": "full",  # attention is nonlinear too: "linear" bounds no decoder
    "no-norm": "full",
    "no-residual": "full",
    "post-norm": "full",
}
"""The level of information of each decoder, the same for all tasks."""


@dataclasses.dataclass(frozen=True)
class Floor:
    """The information that a decoder has for a task.

    Attributes:
      information: the level whose optimum is a lower bound on the decoder's expected loss.
      reached: whether that bound is also the infimum over decoders of this kind.
      reason: what it can and cannot reach, and why, in one sentence.
    """

    information: str
    reached: bool
    reason: str


_CURRENT = "It maps each token to an answer and sees nothing else"
_PLACED = "It maps each token and position to an answer and sees no other token"
_MASK = (
    "The floor is only a bound: order has to be recovered from the causal mask over two blocks, and"
)
_SHARES = "One block sees the current token and shares of the earlier ones, so"
_PAST = "The current token reaches the output past attention: nothing is lost."
_NORM = "Norms carry no information: the bound is unchanged, and what is measured is learning."
_RESIDUAL = (
    "Attention can pass the current token on by looking at it, so the bound is unchanged; what is"
    " measured is learning through products of branches."
)
_POST = "The same parts in another order: the bound is unchanged, and what is measured is learning."
_ALIKE = {
    "no-norm": (False, _NORM), "no-residual": (False, _RESIDUAL), "post-norm": (False, _POST),
}  # fmt: skip

_REASONS: dict[str, dict[str, tuple[bool, str]]] = {
    "markov1": {
        "full": (True, "The table of the current token is all that is needed."),
        "no-attention": (True, f"{_CURRENT}, which is all that matters here: nothing is lost."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}; the current token is all that matters: nothing is lost.",
        ),
        "no-positions": (True, _PAST),
        "no-positions-one-block": (True, _PAST),
        "no-mlp": (
            True, "The answer is linear in the current token, so embedding and output suffice.",
        ),
    },
    "markov2": {
        "full": (
            False, "One head can look at the place before; only the first position, which has none,"
            " may cost a little where x_0 and a pair of equal tokens look alike.",
        ),
        "no-attention": (True, f"{_CURRENT}: it cannot see the token before."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}: it cannot see the token before.",
        ),
        "no-positions": (False, f"{_MASK} the token before has no mark of its own."),
        "no-positions-one-block": (
            False, f"{_SHARES} it knows what came earlier but not what came last.",
        ),
        "no-mlp": (
            False, "The answer is linear in two tokens that two heads fetch, so the MLP is not"
            " missed; the first position is as for the full decoder.",
        ),
    },
    "in_context_chain": {
        "full": (
            False, "Two blocks can mark what followed what and count it, but a mean gives shares,"
            " and the rule of succession needs numbers.",
        ),
        "no-attention": (True, f"{_CURRENT}: it cannot learn this sequence's chain."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}: it cannot learn this sequence's chain.",
        ),
        "no-positions": (False, f"{_MASK} a transition is a pair of neighbours."),
        "no-positions-one-block": (
            False, f"{_SHARES} it knows how frequent each token was but no transition.",
        ),
        "no-mlp": (
            False, "Counting is a mean, which attention takes by itself; the bound is that of full"
            " information, and what is measured is what an MLP adds.",
        ),
    },
    "recall": {
        "full": (
            False, "Two blocks can do it: one joins each value to the key before it, the next finds"
            " the key; certainty, a loss of 0 for keys seen, is a limit.",
        ),
        "no-attention": (True, f"{_CURRENT}: the key alone says nothing of its value."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}: key and position say nothing of the value.",
        ),
        "no-positions": (False, f"{_MASK} which value followed which key is a matter of order."),
        "no-positions-one-block": (
            False, f"{_SHARES} it knows which keys and values came but not which belong together.",
        ),
        "no-mlp": (
            False, "Finding and fetching are what attention does, so nothing is known to be lost;"
            " the bound is that of full information.",
        ),
    },
    "copy": {
        "full": (True, "One head with rotary positions looks five places back, ever more sharply."),
        "no-attention": (True, f"{_CURRENT}: it cannot see the token to copy."),
        "no-attention-learned-positions": (True, f"{_PLACED}: it cannot see the token to copy."),
        "no-positions": (False, f"{_MASK} the place to copy from differs in its distance only."),
        "no-positions-one-block": (
            False, f"{_SHARES} it knows that the token to copy is among them but not which it is.",
        ),
        "no-mlp": (True, "The answer is linear in one token that one head fetches: nothing lost."),
    },
    "clock": {
        "full": (
            False, "Only a bound: rotary positions are relative, so the phase has to be inferred"
            " from the order of earlier tokens and the edge of the causal mask.",
        ),
        "no-attention": (True, f"{_CURRENT}: without the time it can only guess."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}, and the position is the answer: nothing is lost.",
        ),
        "no-positions": (False, f"{_MASK} the number of earlier tokens tells the time."),
        "no-positions-one-block": (
            False, "The number of earlier tokens would tell the time, but one block sees shares of"
            " tokens only, so the bound is weak.",
        ),
        "no-mlp": (
            False, "Only a bound: as in the full decoder, the phase is inferred from order.",
        ),
    },
    "modular_addition": {
        "full": (
            True, "A head fetches the first number and the MLP holds the table of sums; certainty,"
            " a loss of 0, is a limit.",
        ),
        "no-attention": (True, f"{_CURRENT}: one number says nothing of the sum."),
        "no-attention-learned-positions": (True, f"{_PLACED}: one number says nothing of the sum."),
        "no-positions": (False, f"{_MASK} the first number is known by its place only."),
        "no-positions-one-block": (
            False, f"{_SHARES} it knows that the first number is among them but not which it is.",
        ),
        "no-mlp": (
            False, "No map that is linear in the inputs beats guessing, but attention and norms are"
            " not linear, so the proven bound is that of full information.",
        ),
    },
    "parity": {
        "full": (
            True, "Heads fetch the bits and the MLP holds the table; certainty, a loss of 0, is a"
            " limit.",
        ),
        "no-attention": (True, f"{_CURRENT}: one bit says nothing of the parity of three."),
        "no-attention-learned-positions": (
            True, f"{_PLACED}: one bit says nothing of the parity of three.",
        ),
        "no-positions": (
            False, "Only a bound: the multiset would do, since the parity of all bits so far is the"
            " answer, but a mean shows shares and their parity is hard to read.",
        ),
        "no-positions-one-block": (
            False, "The parity of all bits so far is the answer, so the bound is 0; but shares of"
            " tokens do not tell their number, and it is weak.",
        ),
        "no-mlp": (
            False, "No map that is linear in the inputs beats guessing, but attention and norms are"
            " not linear, so the proven bound is that of full information.",
        ),
    },
}  # fmt: skip

FLOORS: dict[str, dict[str, Floor]] = {
    task: {
        decoder: Floor(INFORMATION_OF[decoder], *(reasons | _ALIKE)[decoder])
        for decoder in DECODERS
    }
    for task, reasons in _REASONS.items()
}
"""The floor of every decoder for every task."""


def _bound(decoder: str) -> Floor:
    """Return what holds of a decoder for every task."""
    return Floor(INFORMATION_OF[decoder], False, "Only a bound: this task is not in the table.")


def floor(name: str, task: Task, decoder: str) -> tuple[float | None, Floor]:
    """Return the loss that a decoder cannot get below on a task, and why.

    Args:
      name: of the task, a key of :data:`normjax.data.tasks.table.TASKS`.
      task: the task for a window.
      decoder: a key of :data:`DECODERS`.

    Returns:
      Nats per scored token, None where the level has no exact value, and the entry of the table.

    Raises:
      UserError: unknown names.

    >>> from normjax.data.tasks.table import build
    >>> loss, entry = floor("recall", build("recall", 32), "no-attention")
    >>> round(loss, 3), entry.information
    (1.386, 'current')
    """
    check_choice("task", name, TASKS)
    check_choice("decoder", decoder, DECODERS)
    entry = FLOORS[name][decoder] if name in FLOORS else _bound(decoder)
    return task.optimum(entry.information), entry
