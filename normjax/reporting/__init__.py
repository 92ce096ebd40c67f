"""The parts of the report: statistics, findings in words, figures, tables, the page."""

import importlib.util
import os

_backend = os.environ.get("MPLBACKEND", "")
if _backend.startswith("module://") and not importlib.util.find_spec(_backend[9:].split(".")[0]):
    # As notebooks set it for what they start. No figure here is shown, and matplotlib cannot be
    # imported where the backend that it is told of is missing.
    del os.environ["MPLBACKEND"]
