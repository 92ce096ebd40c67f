"""A prediction asked for on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from normjax.errors import UserError
from normjax.predictions import parsing
from normjax.predictions.prediction import VARIANTS, Candidate, Prediction

Ask = Callable[[str], str]


def ask(
    candidates: Sequence[Candidate], argument: str, read: Ask = input, say: Ask | None = None
) -> Prediction:
    """Show the variants, ask for their order or for losses, and ask again until it is one.

    Args:
      candidates: what may be named.
      argument: ``--predict=ask``.
      read: shows a question and returns the line that is typed.
      say: shows a text.

    Raises:
      UserError: the input ends before the answer.
    """
    show = say or (lambda text: print(text) or "")
    shown = [c for c in candidates if c.planned and c.subject == VARIANTS]
    show("Which variant will end at the lowest validation loss?\n")
    wide = max(len(c.name) for c in shown)
    for number, c in enumerate(shown, start=1):
        head = f"  {number:>2}  {c.name:<{wide}}  "
        show(textwrap.fill(c.description, 98, initial_indent=head,
                           subsequent_indent=" " * len(head)) or head.rstrip())  # fmt: skip
    show("")
    try:
        while True:
            try:
                lines = _answers(shown, read, show)
                parsing.parse("\n".join(lines), argument, candidates)
                break
            except UserError as error:
                show(str(error).removeprefix(f"{argument}: ") + "\n")
        for key in ("author", "reason"):
            said = read(f"{key} (may be empty): ").strip()
            lines += [f"{key}: {said}"] if said else []
    except EOFError:
        raise UserError(
            f"{argument}: the input ended before the answer; answer, or pass --predict=FILE"
        ) from None
    return parsing.parse("\n".join(lines), argument, candidates)


def _answers(shown: Sequence[Candidate], read: Ask, show: Ask) -> list[str]:
    """Return what was typed as the lines of a file."""
    order = read(
        "Names or numbers, lowest loss first, separated by commas, = between equals\n"
        "(Enter: state losses instead): "
    )
    lines = []
    if order.strip():
        for group in order.split(","):
            parts = [part.strip() for part in group.split("=")]
            lines.append(" = ".join(_name(part, shown) for part in parts))
    else:
        show("Expected losses in nats, such as 2.1 or 2.1 (1.9 to 2.3), the interval at 80 %;")
        for candidate in shown:
            stated = read(f"  {candidate.name} (Enter leaves it out): ").strip()
            lines += [f"{candidate.name}: {stated}"] if stated else []
    return lines


def _name(part: str, shown: Sequence[Candidate]) -> str:
    if part.isdecimal() and len(part) < 9 and 1 <= int(part) <= len(shown):
        return shown[int(part) - 1].name
    return part
