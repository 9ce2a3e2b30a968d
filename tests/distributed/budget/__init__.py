"""A schedule with a byte budget, or with a plan: its arguments, the measured steps, the plan, the steps that follow it."""
