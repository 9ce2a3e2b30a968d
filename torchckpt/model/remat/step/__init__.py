"""One training step as operations on storages, and its memory, to the byte.

    incremental, stage_memory   a schedule that changes by one repeat, and knows its memory
    profile, flat     bytes over time, in blocks; a dataflow as flat lists
    breakdown         which bytes nobody can free
    late, separators  a set to keep as a schedule; values that cut the forward in two
    memory, dataflow  the exact simulation; the types
"""
__all__: list[str] = []
