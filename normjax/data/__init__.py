"""What is trained on: texts, tasks, their tokens and windows."""
