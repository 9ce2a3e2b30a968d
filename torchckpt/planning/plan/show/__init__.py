"""A plan for people and for files.

    text, draw        tables and the line that says what it is worth; SVG
    stored            JSON, and back
"""
__all__: list[str] = []
