"""A schedule with a byte budget, or with a plan: arguments, measured steps, the plan, and the steps that follow it."""
