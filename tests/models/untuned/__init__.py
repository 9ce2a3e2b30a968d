"""Untuned: models of many kinds, small, whose operations nobody had in mind when the planner was written.

Each is a module that takes random inputs and returns a loss, so that all that a step allocates is in its trace.
"""
from __future__ import annotations

from tests.models.untuned import algebra, layers, sequences, shapes, wholes
from tests.models.untuned.model import UNTUNED

__all__ = ["UNTUNED", "algebra", "layers", "sequences", "shapes", "wholes"]
