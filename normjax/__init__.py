"""normjax: what normalization and residual connections do in a transformer decoder."""

__version__ = "0.1.0"
