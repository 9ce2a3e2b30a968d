"""What is marked ``accelerator`` and does not run on the simulated device: which tests, and why."""
from __future__ import annotations

__all__ = ["UNSIMULATED", "why_unsimulated"]

_COMPILE = "tests/regions/compiled/test_compile.py"
UNSIMULATED = {
    # a test, and what the name of its variant holds
    **dict.fromkeys(
        [
            (f"{_COMPILE}::test_region_inside_a_full_graph_is_that_of_torch", "sim"),
            (f"{_COMPILE}::test_region_that_compares_values_inside_a_graph_compares_nothing", "sim"),
            (f"{_COMPILE}::test_early_stop_is_torchs_inside_a_graph", "sim"),
            (f"{_COMPILE}::test_checkpointed_layers_of_a_compiled_model", "sim"),
            (f"{_COMPILE}::test_nested_and_keyword_regions_inside_a_full_graph", "sim"),
        ],
        "a graph that torch compiles keeps random states of CPU, CUDA, HPU and XPU alone",
    ),
}


def why_unsimulated(test: str) -> str | None:
    """The reason, of a test as pytest names it; None: it runs."""
    name, _, variant = test.partition("[")
    reasons = [reason for (of, part), reason in UNSIMULATED.items() if of == name and part in variant]
    return reasons[0] if reasons else None
