"""README does what it says, and the errors that the page of limits quotes are real."""
from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import torchckpt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


LIMITS = (ROOT / "docs" / "limits.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def names() -> dict[str, Any]:
    """What the ten lines define."""
    scope: dict[str, Any] = {"Mean": Mean}
    exec(blocks("python")[0], scope)
    return scope


def test_the_ten_lines_run_and_do_what_their_comments_say() -> None:
    with torchckpt.testing.count_recomputes() as recomputes:
        scope = names()
    assert scope["block"].calls == 2
    # The block; two stages but for the last micro-batch; of a step, the first stage; the region by hand.
    assert recomputes.total == 1 + 2 * 3 + 4 + 1
    assert scope["region"].is_recomputed


def quoted() -> list[tuple[str, str]]:
    parts = re.split(r"^>>> ", blocks("pycon", LIMITS)[0], flags=re.MULTILINE)[1:]
    return [(code.split("  #")[0].strip(), text.strip()) for code, text in (part.split("\n", 1) for part in parts)]


@pytest.mark.parametrize(("code", "text"), quoted(), ids=[code for code, _ in quoted()])
def test_every_quoted_error_is_raised_in_these_words(code: str, text: str) -> None:
    scope = names()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the quoted text is the check
        eval(code, scope)
    actual = f"{type(raised.value).__name__}: {raised.value}"
    pattern = ".*".join(re.escape(part.strip()) for part in text.split("..."))
    assert re.match(pattern, actual, flags=re.DOTALL), actual


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"^make (\w+)", blocks("sh")[0], flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)


MAKE = """#!/bin/sh
echo "$1 $([ -e "${2#VENV=}" ] && echo there || echo new) ${2#VENV=} $PYTHONPATH" >> made
mkdir -p "${2#VENV=}"
[ "$1" != "$FAILS" ]
"""


@pytest.mark.parametrize("fails", ["", "demo", "test"])
def test_ci_runs_both_commands_each_in_a_new_environment_that_is_gone_then(tmp_path: Path, fails: str) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails, "PYTHONPATH": "here"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, timeout=60, **pipes)
    made = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert [line[:2] for line in made] == [["demo", "new"], ["test", "new"]]
    assert len({line[2] for line in made}) == 2
    assert all(len(line) == 3 and not (tmp_path / line[2]).exists() for line in made)
    assert bool(done.returncode) == bool(fails)
    assert done.stderr == (f"== make {fails} failed\n" if fails else "")
