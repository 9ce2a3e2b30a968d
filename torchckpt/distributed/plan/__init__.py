"""Planning within a byte budget during a run: measure the first steps, make a plan, and run the other steps by it.

Read ``within`` first.
"""

__all__: list[str] = []
