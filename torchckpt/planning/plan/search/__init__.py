"""What to keep, recompute early or late: the search, and the bound that it is held to.

    candidates        what to keep, and how to decide: a local search
    dispatch          one step in which ranks decide as time goes by
    bound, window     what no plan goes below
    lane              the actions of a rank, what is kept of its visits, and what one visit has in memory
"""
__all__: list[str] = []
