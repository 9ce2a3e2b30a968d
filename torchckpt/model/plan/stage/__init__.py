"""What a planner knows of a stage: blocks in seconds and bytes, what a visit holds, what fits a rank.

    lane              the actions of a rank, and what is kept of its visits under a budget
    holding           what one visit (a micro-batch on a stage) has in memory
    stage, limit      blocks; what a user writes for memory
"""
__all__: list[str] = []
