"""What to keep, recompute early or late: the search, and the bound that it is held to.

    search            what to keep, and how to decide
    dispatch          one step in which ranks decide as time goes by
    bound, window     what no plan goes below
    replay            a step that is decided, played
"""
__all__: list[str] = []
