"""From what a user asks for to a schedule.

    planner, refusal  a budget; what its error says
    keep              names, marks, policies
"""
__all__: list[str] = []
