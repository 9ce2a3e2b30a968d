"""One forward and backward of a pipeline.

    step              1F1B, with a graph for each stage
    pipeline          GPipe: one forward, which draws the whole graph
    lane              look-ahead: what orders the recomputes of a stage
    links, worker, clock_cycles     streams and copies; a thread for each device; which stage runs which micro-batch
"""
__all__: list[str] = []
