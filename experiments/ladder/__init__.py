"""All placements against each other: see :mod:`experiments.ladder.experiment`."""
