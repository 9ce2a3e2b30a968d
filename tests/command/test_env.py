"""``env``: what the report of a bug needs, on a whole torch, on one that lacks something, and without any."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchckpt
from tests.command.lines import printed
from tests.scripts import ROOT, home_without
from torchckpt.command import env
from torchckpt.features import FEATURES, TESTED, Feature


def facts(text: str) -> dict[str, list[str]]:
    """The texts by the names at the begin of lines."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        values.setdefault(line[:11].strip(), []).append(line[11:])
    return values


def test_versions_devices_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    shown = facts(printed(capsys, "env"))
    assert shown["torchckpt"] == [f"{torchckpt.__version__}, in {Path(torchckpt.__file__).parent}"]
    assert shown["Python"][0].startswith(f"{sys.version.split()[0]} on ")
    assert shown["torch"] == [f"{torch.__version__}; tested: {', '.join(TESTED)}"]
    assert shown["devices"][0].split(", ")[0] == "cpu"
    assert ("gloo" in shown["devices"][0]) == torch.distributed.is_gloo_available()
    texts = [*shown["yes"], *shown.get("no", [])]
    assert sorted(text.split(": ")[0] for text in texts) == sorted(feature.name for feature in FEATURES)


def test_what_is_off_says_what_happens_and_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Feature("all", "2.11", ("torch:no_such_name",), "nothing happens")
    monkeypatch.setattr(env, "FEATURES", (lacking, FEATURES[0]))
    shown = facts(printed(capsys, "env"))
    assert shown["no"] == ["all: nothing happens"]
    assert shown[""] == ["without torch:no_such_name"]
    assert shown["yes"] == [FEATURES[0].name]


def test_a_package_that_is_missing_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "_EXTRAS", {"absent": ("it is slow", "fast")})
    assert facts(printed(capsys, "env"))["absent"] == ["none: it is slow: pip install 'torchckpt[fast]'"]


def test_a_driver_that_fails_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(check_available: bool) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", failing)
    assert facts(printed(capsys, "env"))["devices"] == ["cpu, and RuntimeError: the driver is too old"]


def test_an_accelerator_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Module:
        @staticmethod
        def get_device_name(index: int) -> str:
            return f"Pump {index}"

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert facts(printed(capsys, "env"))["devices"][0].startswith("cpu, cuda:0 Pump 0, cuda:1 Pump 1")


def test_without_torch_it_says_so_and_what_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchckpt", "env"]
    home = home_without(["torch"], tmp_path)
    process = subprocess.run(command, cwd=ROOT, env=home, capture_output=True, text=True, timeout=60, check=True)
    assert facts(process.stdout)["torch"] == ["none: ModuleNotFoundError: no torch here"]
    assert facts(process.stdout)["no"] == ["all but plans, schedules and errors: pip install 'torch>=2.11'"]
