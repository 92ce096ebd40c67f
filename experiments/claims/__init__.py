"""Twenty-three statements on norms, residual streams and their derivatives, each computed."""
