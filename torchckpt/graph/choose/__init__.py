"""From what a user asks for to a schedule.

    planner           a budget; what its error says
    keep              names, marks, policies
"""
__all__: list[str] = []
