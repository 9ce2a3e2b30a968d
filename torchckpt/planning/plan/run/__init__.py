"""Plans for steps that are run: from what was measured, and beside it.

    fit_measured      a plan for all that a step takes
    repair            single visits changed, until a plan fits and is short
    extra_memory      what a step takes above what regions hold
    gradient_sums     weight gradients in the order in which they are added up
    measured          steps of a plan, beside it
"""
__all__: list[str] = []
