"""The training step, evaluation and metrics."""
