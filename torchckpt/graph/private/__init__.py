"""Private: all names of torch that the graph level uses and that are private, or new in some release.

The modules cover operators, AOTAutograd's traces, the state of torch around a trace, Dynamo's backends, and Inductor.
"""
from __future__ import annotations

__all__: list[str] = []
