"""What holds of a step, on one process."""
