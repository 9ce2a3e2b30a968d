"""What users and modules leave on the nodes of a trace: marks, regions, names.

    marks, names      ``mark``, ``region``, ``sequential``; the names of modules
    annotations       how these stand on nodes, and are read
"""
__all__: list[str] = []
