"""A schedule with a byte budget or a plan: its arguments, the steps that are measured, and those that follow."""
