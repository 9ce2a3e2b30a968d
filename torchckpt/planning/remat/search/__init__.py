"""The search for an order of operations that fits a byte budget.

    planner           the whole search; its results for many budgets
    eviction, improve    its moves: repeats added, removed ("ruin and recreate"), first runs in another order
    shortest, exact   exact: Dijkstra's algorithm for a dozen operations; CP-SAT, an optional extra
"""
__all__: list[str] = []
