"""The search for an order of operations that fits a byte budget.

    planner, frontier    the whole search; its results for many budgets
    select            what classical rules keep
    eviction, improve, order, ruin    its moves ("ruin and recreate" and the like)
    shortest, exact, retention        exact: Dijkstra's algorithm for a dozen operations; CP-SAT, an optional extra
"""
__all__: list[str] = []
