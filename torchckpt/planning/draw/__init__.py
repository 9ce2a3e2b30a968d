"""Timelines for people: text, SVG, traces.

    svg, gantt, trace    the three forms of a timeline, with the panel of held bytes
    layout            where rows and lines of a picture stand
    canvas, units     what all pictures share: elements, axes, grids, legends; how numbers are written
"""
__all__: list[str] = []
