"""A plan and a frontier for people: tables and SVG.

    plan_svg, frontier_svg, table     the forms
    curve             what they share: curves, and labels beside them
"""
__all__: list[str] = []
