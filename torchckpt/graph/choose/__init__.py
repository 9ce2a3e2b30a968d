"""From what a user asks for to a schedule.

    planner           a budget; what its error says
    keep              values by the names that users know; policies
"""
__all__: list[str] = []
