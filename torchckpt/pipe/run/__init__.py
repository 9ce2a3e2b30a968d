"""One forward and backward of a pipeline.

    step              1F1B, with a graph for each stage
    pipeline          GPipe: one forward, which draws the whole graph; which stage runs which micro-batch
    visit             one stage on one micro-batch, in both; which of its layers run as regions
    lane              look-ahead: what orders the recomputes of a stage
    links, worker     streams and copies; a thread for each device
"""
__all__: list[str] = []
