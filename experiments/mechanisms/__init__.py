"""Which part of a decoder is needed to compute a task, which only to learn it."""
