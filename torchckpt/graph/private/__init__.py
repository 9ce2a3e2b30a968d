"""Every name of torch's that the graph level uses and that is private, or new in some release, in one place.

Operators, AOTAutograd's trace of a call and its derivatives, what runs beside a trace, Dynamo's backends, Inductor.
"""
from __future__ import annotations

__all__: list[str] = []
