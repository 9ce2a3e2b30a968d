"""The tables of what ``run.py`` has found, as Markdown.

    python benchmarks/peers/table.py                     # of benchmarks/results/peers.jsonl, and peers-budget.jsonl
    python benchmarks/peers/table.py --families          # a line for each family
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

__all__ = ["budget", "families", "not_made", "others", "read", "summary"]

RESULTS = Path(__file__).parents[1] / "results"
TORCH, OURS = "torch.utils.checkpoint", "torchckpt"

Row: TypeAlias = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The last line of each family."""
    rows = map(json.loads, file.read_text().splitlines())
    return [*{(row["library"], row["family"]): row for row in rows}.values()]


def is_compared(row: Row) -> bool:
    """Whether the model was trained, and made regions whose gradients are numbers."""
    return "reason" not in row and row["is_finite"] and row["counts"].get(OURS, (0,))[0] > 0


def summary(rows: list[Row]) -> Iterator[str]:
    """A line for each library, and one for all."""
    equal = "equal to themselves", "equal with torch's", "equal with torchckpt"
    yield _head("", "families", "compared", *equal, "replays a region")
    libraries = dict.fromkeys(row["library"] for row in rows)
    for library in libraries:
        yield _sums(library, [row for row in rows if row["library"] == library])
    if len(libraries) > 1:
        yield _sums("**all**", rows)


def _head(*names: str) -> str:
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


def _sums(name: str, rows: list[Row]) -> str:
    compared = [row for row in rows if is_compared(row)]
    equal = [sum(not row[way] for row in compared) for way in ("itself", TORCH, OURS)]
    reached, replays = (sum(row["counts"][OURS][place] for row in compared) for place in (1, 2))
    ratio = f"{replays / reached:.2f}" if reached else "-"
    return f"| {name} | {len(rows)} | {len(compared)} | {' | '.join(map(str, equal))} | {ratio} |"


def causes(rows: Iterable[Row]) -> Iterator[str]:
    """What differs, for each set of kinds, with the families."""
    for way in (TORCH, OURS):
        found: dict[str, list[str]] = {}
        for row in rows:
            if is_compared(row) and row[way]:
                found.setdefault(", ".join(row[way]), []).append(row["family"])
        for kinds, names in sorted(found.items(), key=lambda item: -len(item[1])):
            yield f"* {way}: {len(names)} differ in {kinds}: {', '.join(names)}."


def others(rows: Iterable[Row]) -> Iterator[str]:
    """Compared families in which not each region is replayed once, or that are not equal to themselves."""
    for row in filter(is_compared, rows):
        regions, reached, replays = row["counts"][OURS]
        if row["itself"]:
            yield f"* {row['family']}: not equal to itself in {', '.join(row['itself'])}."
        if not regions == reached == replays:
            yield f"* {row['family']}: {regions} regions, {reached} that the loss reads, {replays} replays."


def not_made(rows: Iterable[Row]) -> Iterator[str]:
    """Why a family is not compared."""
    for row in rows:
        if not is_compared(row):
            yield f"| {row['library']} | {row['family']} | {_why(row)} |"


def _why(row: Row) -> str:
    if "reason" in row:
        text = row["reason"].removeprefix("RuntimeError: ").split(" | ")[0]
        return " ".join(text.replace("|", "/").replace("`", "").replace("<", "(").replace(">", ")").split())[:160]
    return "its regions are not made" if row["is_finite"] else "losses or gradients are no numbers"


def families(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each family that is compared."""
    saved = "saved: plain, torch's, ours"
    yield _head("library", "family", "model", "inputs", "dropout", "regions", saved, TORCH, OURS)
    for row in filter(is_compared, rows):
        saved = ", ".join(f"{row['saved'].get(way, 0) / 1000:.0f}" for way in ("plain", TORCH, OURS))
        cells = [", ".join(row[way]) or "=" for way in (TORCH, OURS)]
        inputs = ", ".join(row["inputs"]) or "picture"
        head = f"| {row['library']} | {row['family']} | {row['model']} | {inputs} | {row['dropout']}"
        yield f"{head} | {row['counts'][OURS][0]} | {saved} kB | {' | '.join(cells)} |"


def budget(rows: list[Row]) -> Iterator[str]:
    """What ``checkpoint_layers(model, budget="60%")`` finds, plans and takes."""
    fits = "planned within the budget", "measured within the budget", "measured / planned"
    yield _head("", "models", "blocks found", "plan", "equal", "measured", *fits)
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        planned = [row for row in own if row.get("planned")]
        measured = [row for row in planned if row.get("measured")]
        equal = sum(not row["differs"] for row in planned)
        fits = [sum(row[peak] <= row["budget"] for row in measured) for peak in ("planned", "measured")]
        ratio = median(row["measured"] / row["planned"] for row in measured) if measured else 0.0
        found = sum("blocks" in row for row in own)
        cells = [library, len(own), found, len(planned), equal, len(measured), *fits, f"{ratio:.3f}"]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=RESULTS / "peers.jsonl")
    parser.add_argument("--budget", type=Path, default=RESULTS / "peers-budget.jsonl")
    parser.add_argument("--families", action="store_true", help="a line for each family, too")
    options = parser.parse_args()
    rows = read(options.file)
    parts = [summary(rows), causes(rows), others(rows), not_made(rows)]
    if options.families:
        parts.append(families(rows))
    if options.budget.exists():
        parts.append(budget(read(options.budget)))
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
