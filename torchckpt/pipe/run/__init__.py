"""One forward and backward of a pipeline.

    step              1F1B, with a graph for each stage
    pipeline          GPipe: one forward, which draws the whole graph; which stage runs which micro-batch; look-ahead,
                      by what orders the recomputes of a stage
    visit             one stage on one micro-batch, in both; which of its layers run as regions
    links, worker     streams and copies; a thread for each device
"""
__all__: list[str] = []
