"""Timelines for people: text, SVG, traces.

    svg, gantt, trace the three forms of a timeline
    axis, canvas, style, units      what they share
"""
__all__: list[str] = []
