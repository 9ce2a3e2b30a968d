"""The README's code runs and its links lead somewhere; the errors that the page of limits quotes are the real ones."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torchckpt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


LIMITS = (ROOT / "docs" / "limits.md").read_text()
SITE = "https://torchckpt.github.io/torchckpt/"
SOURCE = re.compile(r"https://(?:github\.com/torchckpt/torchckpt/(?:blob|tree)|raw\.githubusercontent\.com/torchckpt/torchckpt)/main/")


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


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_the_other_snippets_run(one_rank: None) -> None:
    on_one_device, over_ranks, on_paper = blocks("python")[1:]
    exec(on_one_device, names())
    exec(on_paper, {})
    module = Layers()
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    scope = names() | {
        "module": module,
        "stage": stage,
        "Schedule1F1B": Schedule1F1B,
        "loss_fn": torch.nn.functional.mse_loss,
        "x": torch.randn(4, 8),
        "y": torch.randn(4, 8),
    }
    exec(over_ranks, scope)
    assert module.layers[0].weight.grad is not None


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_a_package_index_can_follow_every_link() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []


def test_links_to_the_repository_and_to_the_site_lead_to_files() -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", README)]
    files = [SOURCE.sub("", target) for target in targets if SOURCE.match(target)]
    pages = [target.removeprefix(SITE) for target in targets if target.startswith(SITE)]
    files += [f"docs/{page.removesuffix('html')}md" for page in pages if page]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"^make (\w+)", blocks("sh")[0], flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands == ["demo", "test"]
    assert all(re.search(rf"^{command}:", makefile, flags=re.MULTILINE) for command in commands)
