"""What users and modules leave on the nodes of a trace: marks, regions, names.

    marks             ``mark``, ``region``, ``sequential``
    annotations       how these and the names of modules stand on nodes, and are read
"""
__all__: list[str] = []
