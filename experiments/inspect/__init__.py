"""What the stream of a trained model does: see :mod:`experiments.inspect.experiment`."""
