"""Derivatives as graphs, to look at and to change.

    gradient          what users call: ``gradient``, ``gradients``
    adjoint           the graph of a derivative
    derivative        what is differentiated, and how it is traced
    simplify          fewer operations for the same values
"""
__all__: list[str] = []
