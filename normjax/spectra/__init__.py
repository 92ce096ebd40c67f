"""Singular values: closed forms, dense, matrix-free with bounds, products over depth."""
