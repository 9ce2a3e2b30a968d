"""Results: what files of pytest's ``--junitxml`` say, by part of the suite: ``python -m tests.results FILE...``."""
from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

PARTS = ("regions", "pipe", "distributed", "graph", "planning", "models", "command")
_ALSO = {"test_models": "models"}
_KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def part_of(case: ElementTree.Element) -> str:
    """Of the suite, such as ``regions``; files beside the folders are ``other``, but for those named after one."""
    name = case.get("classname", "").split(".")[1:2]
    part = _ALSO.get(*name, *name) if name else ""
    return part if part in PARTS else "other"


def counts(path: Path) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """By part and outcome; and, of those skipped, by part and reason."""
    found: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        outcome = next((one for one in case if one.tag in _KINDS), None)
        found[part_of(case), "passed" if outcome is None else _KINDS[outcome.tag]] += 1
        if outcome is not None and outcome.tag == "skipped":
            reasons[part_of(case), outcome.get("message", "")] += 1
    return found, reasons


def table(paths: list[Path]) -> str:
    """A row for each file, named after its folder; then why tests were skipped."""
    columns = (*PARTS, "other")
    lines = [f"| passed / skipped / failed | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    every: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        found, reasons = counts(path)
        cells = [" / ".join(str(found[part, kind]) for kind in ("passed", "skipped", "failed")) for part in columns]
        lines.append(f"| {path.parent.name} | {' | '.join(cells)} |")
        for (part, reason), count in reasons.items():
            every.setdefault((part, reason), []).append(f"{path.parent.name}: {count}")
    why = [f"{part}, skipped, {reason}: {'; '.join(those)}" for (part, reason), those in sorted(every.items())]
    return "\n".join([*lines, "", *why])


if __name__ == "__main__":
    print(table([Path(argument) for argument in sys.argv[1:]]))
