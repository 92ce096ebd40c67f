"""GGUF files under the names of the transformers library: settings, tensors, rotary pairs."""

from __future__ import annotations

from normjax.errors import UserError
from normjax.foreign.settings import Settings
from normjax.foreign.tensors import Gguf, Tensors


def translated(tensors: Gguf, argument: str) -> tuple[Settings, Tensors]:
    raise UserError(f"{argument}: GGUF is not read")
