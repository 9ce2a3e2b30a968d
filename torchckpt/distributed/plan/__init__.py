"""A byte budget in the run: the first steps are measured, a plan is made of them, and the others follow it.

Read ``within`` first.
"""

__all__: list[str] = []
