"""The commands, a file each: ``add`` tells the parser of it, ``run`` does it. None imports torch before it runs.

    fit, balance      one model: a plan within a byte budget; its layers cut into stages
    memory            a script: which of its lines keep memory
    job               of plan: a described model in a layout
    plan, costs       a pipeline within a byte budget; the costs of its stages, and the options of a model
    env               versions, devices and features, for the report of a bug
    simulate          one step of a schedule, with ways to recompute side by side
    target            what ``module:function`` names
    shared            the parser, its types, options of a schedule, and errors of one line
"""
from __future__ import annotations

__all__: list[str] = []
