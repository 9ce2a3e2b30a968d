"""Choose: makes a schedule of what a user asks for.

    planner           a budget; what its error says
    keep              values by the names that users know; policies
"""
__all__: list[str] = []
