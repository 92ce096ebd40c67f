"""Training: optimizer, step, cohorts, checkpoints, a trained run opened again."""
