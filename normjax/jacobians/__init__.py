"""Jacobians of norms, branches, placements and blocks: closed forms, verified, and views."""
