"""One training step as operations on storages, and its memory, to the byte.

    incremental       a schedule that changes by one repeat, and knows its memory
    late              sets of values to keep, chosen by classical rules, and their schedules
    memory, dataflow  the exact simulation, and which bytes nobody can free; the types, also as flat lists
"""
__all__: list[str] = []
