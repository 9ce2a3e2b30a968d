"""What a step costs, in words: simulated, measured, and beside its bound.

    report            what the command prints
    comparison        a measured step beside the simulated one
"""
__all__: list[str] = []
