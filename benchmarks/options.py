"""Options: the command line options of all benchmarks that run on a device."""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["options", "write"]


def options(question: str | None, rounds: int) -> argparse.ArgumentParser:
    """Takes ``--device``, ``--rounds``, ``--rehearse`` and ``--json``, which ``benchmarks/run.py`` gives to each."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator such as cuda (default: cpu)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"at least 20 (default: {rounds})")
    parser.add_argument("--rehearse", action="store_true", help="only see whether all of it runs: small and few")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def write(results: dict[str, Any], file: Path | None) -> None:
    """Write the results as JSON, if a file is given."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
