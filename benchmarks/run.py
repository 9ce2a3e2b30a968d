"""Runs every ``benchmarks/*/bench.py``, and writes what they measured to ``benchmarks/results/<device>.json``."""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent


def slug(device: torch.device) -> str:
    """The name of the device, as a file name."""
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def results_of(bench: Path, device: torch.device) -> object:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, str(bench), "--json", str(file)]
        if "--device" in bench.read_text():  # those that only compute on paper have none
            command += ["--device", device.type]
        subprocess.run(command, check=True, env=environment)
        return json.loads(file.read_text())


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=accelerator.type if accelerator else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results = {bench.parent.name: results_of(bench, device) for bench in sorted(HERE.glob("*/bench.py"))}
    file = arguments.out / f"{slug(device)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
