"""Table: a measured cell beside its simulation, and the requirements on it."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.pipeline.cells.rounds import Measured
from benchmarks.turns import quartiles

__all__ = ["HEAD", "failures", "line", "row_of"]

_VARIANTS = ("none", "stock", "ours")
DEVIATION = 0.07
HIDDEN = 0.9
RATIOS = {
    ("1f1b-4-4-0", "ours / stock"): 0.86,
    ("1f1b-8-8-0", "ours / stock"): 0.88,
    ("1f1b-2-2-0", "ours / none"): 1.04,
    ("1f1b-4-16-1", "ours / none"): 1.04,
}
HEAD = f"""
{'':15}{'median, ms':>24}{'% over simulated':>24}{'(nominal costs)':>24}   {'ours / none':30}{'ours / stock':30}hidden
{'cell':15}{'none   stock    ours':>24}{'none   stock    ours':>24}{'none   stock    ours':>24}   \
{'quartiles         (simulated)':30}{'quartiles         (simulated)':30}(simulated)  exposed, ms (at most)"""


def row_of(measured: Measured) -> dict[str, Any]:
    """Medians and quartiles of the figures of each round, as numbers for a file."""
    seconds, simulated, nominal = measured.seconds, measured.measured, measured.nominal
    none, stock, ours = (seconds[name] for name in _VARIANTS)
    middle = {name: median(values) for name, values in seconds.items()}
    allowed = simulated.bound_seconds + measured.recompute_seconds + 0.02 * middle["none"]
    return {
        "cell": str(measured.cell),
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "simulated": vars(simulated),
        "simulated, nominal costs": vars(nominal),
        "deviation": {name: middle[name] / getattr(simulated, name) - 1 for name in _VARIANTS},
        "deviation, nominal costs": {
            name: middle[name] / getattr(nominal, name) - 1 for name in _VARIANTS
        },
        "ratios": {
            f"ours / {name}": quartiles([a / b for a, b in zip(ours, values)])
            for name, values in seconds.items()
            if name != "ours"
        },
        "simulated ratios": {"ours / none": nominal.ours / nominal.none, "ours / stock": nominal.ours / nominal.stock},
        "hidden": quartiles([1 - (a - c) / (b - c) for a, b, c in zip(ours, stock, none)]),
        "simulated hidden": simulated.hidden,
        "simulated hidden, nominal costs": nominal.hidden,
        "exposed seconds": median(a - c for a, c in zip(ours, none)),
        "allowed exposed seconds": allowed,
        "gradients bit-equal": measured.equal,
        "early seconds": measured.early,
        "order": measured.order,
        "rounds": len(none),
    }


def failures(row: dict[str, Any]) -> list[str]:
    """Messages for the requirements that do not hold."""
    found = []
    cell = row["cell"]
    for name, share in row["deviation"].items():
        if abs(share) > DEVIATION:
            found.append(f"{cell}: {name} {share:+.1%} from simulated, not within {DEVIATION:.0%}")
    for (of, name), most in RATIOS.items():
        if of == cell and row["ratios"][name][1] > most:
            found.append(f"{cell}: {name} {row['ratios'][name][1]:.3f}, not at most {most}")
    least = HIDDEN * row["simulated hidden, nominal costs"]
    if row["hidden"][1] < least:
        found.append(f"{cell}: hidden {row['hidden'][1]:.3f}, not at least {least:.3f}")
    if row["exposed seconds"] > row["allowed exposed seconds"]:
        exposed, allowed = row["exposed seconds"] * 1e3, row["allowed exposed seconds"] * 1e3
        simulated = (row["simulated"]["ours"] - row["simulated"]["none"]) * 1e3
        found.append(f"{cell}: exposed {exposed:.1f} ms, not at most {allowed:.1f}; simulated {simulated:.1f}")
    return found + ([] if row["gradients bit-equal"] else [f"{cell}: gradients differ"])


def line(row: dict[str, Any]) -> str:
    return "".join(_parts(row)).rstrip()


def _parts(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['cell']:15}"
    yield "".join(f"{row['seconds'][name][1] * 1e3:8.1f}" for name in _VARIANTS)
    for deviation in ("deviation", "deviation, nominal costs"):
        yield "".join(f"{row[deviation][name] * 100:8.1f}" for name in _VARIANTS)
    yield "   "
    for name, simulated in row["simulated ratios"].items():
        yield f"{_spread(row['ratios'][name])} ({simulated:.3f})".ljust(30)
    yield f"{row['hidden'][1]:.2f} ({row['simulated hidden, nominal costs']:.2f}) "
    yield f"{row['exposed seconds'] * 1e3:9.1f} ({row['allowed exposed seconds'] * 1e3:.1f})"
    yield "" if row["gradients bit-equal"] else "  gradients DIFFER"
    for name in row["ratios"].keys() - row["simulated ratios"].keys():
        yield f"\n{'':15}{name}: {_spread(row['ratios'][name])}"


def _spread(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


