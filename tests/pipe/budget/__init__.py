"""A byte budget for the steps of a pipe."""
