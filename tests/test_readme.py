"""The README's code runs, its errors are the real ones, and its links lead somewhere."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchckpt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


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
    parts = re.split(r"^>>> ", blocks("pycon")[0], flags=re.MULTILINE)[1:]
    return [(code.split("  #")[0].strip(), text.strip()) for code, text in (part.split("\n", 1) for part in parts)]


@pytest.mark.parametrize(("code", "text"), quoted(), ids=[code for code, _ in quoted()])
def test_every_quoted_error_is_raised_in_these_words(code: str, text: str) -> None:
    scope = names()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the quoted text is the check
        eval(code, scope)
    actual = f"{type(raised.value).__name__}: {raised.value}"
    pattern = ".*".join(re.escape(part.strip()) for part in text.split("..."))
    assert re.match(pattern, actual, flags=re.DOTALL), actual


def test_every_link_and_picture_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"^make (\w+)", blocks("sh")[0], flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)
