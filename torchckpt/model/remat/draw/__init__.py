"""A plan and a frontier for people: tables and SVG.

    plan_svg, frontier_svg, table, notebook     the forms
    curve, labels, scale              what they share
"""
__all__: list[str] = []
