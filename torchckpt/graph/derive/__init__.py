"""Derivatives as graphs, to look at and to change.

    gradient, gradients    what users call
    adjoint, derivative    the graph of a derivative; how it is traced
    primal            what is differentiated: a function or a module, its inputs, its state
    inspect, simplify    separators and simulation; fewer operations for the same values
"""
__all__: list[str] = []
