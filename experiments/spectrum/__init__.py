"""Surveys of decoders: what their Jacobians do in every block, and what theory says of it."""
