"""What is marked ``accelerator`` and does not run on the simulated device: which tests, and why."""
from __future__ import annotations

__all__ = ["UNSIMULATED", "why_unsimulated"]

UNSIMULATED = {
    # test, and what its variant's name holds
    ("tests/kernel/test_compile.py::nothing", ""): "",
}


def why_unsimulated(test: str) -> str | None:
    """The reason, of a test as pytest names it; None: it runs."""
    name, _, variant = test.partition("[")
    reasons = [reason for (of, part), reason in UNSIMULATED.items() if of == name and part in variant]
    return reasons[0] if reasons else None
