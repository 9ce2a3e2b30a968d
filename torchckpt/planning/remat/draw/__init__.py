"""A plan and a frontier for people: tables and SVG.

    plan_svg, frontier_svg, table     the forms
    curve, labels     what they share
"""
__all__: list[str] = []
