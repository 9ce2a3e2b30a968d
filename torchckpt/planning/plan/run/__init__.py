"""Plans for steps that are run: from what was measured, and beside it.

    fit_measured      a plan for all that a step takes; steps of a plan, beside it
    repair            single visits changed, until a plan fits and is short
    extra_memory      what a step takes above what regions hold
    order             a plan's order as it can be run: sums of weight gradients, pairs of actions
"""
__all__: list[str] = []
