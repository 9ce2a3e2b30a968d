"""Timelines for people: text, SVG, traces. Pictures of a traced step are in ``planning/remat``.

    svg, gantt, trace    the three forms of a timeline; ``svg`` has the panel of held bytes
    canvas, units     what all pictures share: elements, axes, grids, legends; how numbers are written
"""
__all__: list[str] = []
