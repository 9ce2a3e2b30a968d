"""Other people's models, plainly and in regions: a cross-section of transformers here, the rest by make peers."""
from __future__ import annotations

import importlib.util
import json
import re
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from benchmarks.peers import table
from benchmarks.peers.bits import KINDS, WAYS, Left, differing, loss_of, tensors_in, train
from benchmarks.peers.case import Case, compared, planned
from benchmarks.peers.isolated import isolated
from benchmarks.peers.libraries import LIBRARIES
from benchmarks.peers.tiny.settings import Scale, shrunk, token
from tests.scripts import ROOT, run, run_script
from tests.slow import few, rarely

TORCH, OURS = WAYS
HAS_REMAT = importlib.util.find_spec("torch_remat") is not None
STORED = table.read(table.RESULTS / "peers.jsonl")
README = (ROOT / "benchmarks" / "peers" / "README.md").read_text()


class Net(nn.Module):
    """Two layers in a region each, as the libraries write it."""

    def __init__(self, norm: type[nn.Module], dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), norm(4), nn.Dropout(dropout)) for _ in range(2))
        self.function = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.function is None else self.function(layer, x, use_reentrant=False)
        return x


@contextmanager
def switch(model, function):
    model.function = function
    yield
    model.function = None


def case_of(norm, dropout=0.2):
    return Case("Net", lambda: (Net(norm, dropout), torch.randn(8, 4)), switch)


@pytest.mark.parametrize(
    ("norm", "differs"), [(nn.BatchNorm1d, ["buffers", "predictions"]), (nn.LayerNorm, [])]
)
def test_statistics_move_twice_under_torchs_checkpointing_alone(norm, differs):
    found = compared(case_of(norm), steps=2)
    assert found["itself"] == found[OURS] == []
    assert found[TORCH] == differs
    assert found["counts"] == {TORCH: (4, 4, 0), OURS: (4, 4, 4)}
    assert found["saved"][OURS] == found["saved"][TORCH] < found["saved"]["plain"]
    assert found["is_finite"]


@pytest.mark.parametrize(("dropout", "whose"), [(0.2, "its own"), (0.0, "added")])
def test_a_region_without_dropout_gets_some(dropout, whose):
    found = compared(case_of(nn.LayerNorm, dropout), steps=1)
    assert (found["dropout"], found[OURS]) == (whose, [])


def test_a_region_that_the_loss_does_not_read_is_not_replayed():
    class Unread(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.function(self.layers[1], x, use_reentrant=False) if self.function else self.layers[1](x)
            return super().forward(x)

    found = compared(case_of(nn.LayerNorm)._replace(build=lambda: (Unread(nn.LayerNorm), torch.randn(8, 4))), steps=1)
    assert found["counts"][OURS] == (3, 2, 2)


def test_a_way_that_draws_other_numbers_is_seen():
    def careless(function, *args, use_reentrant):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    def build():
        return Net(nn.LayerNorm), torch.randn(8, 4)

    assert "gradients" in differing(train(build, None, 1), train(build, careless, 1, switch))


def test_a_plan_of_the_blocks_that_are_found():
    found = planned(case_of(nn.LayerNorm))
    assert (found["blocks"], found["first"], found["differs"], found["calls"]) == (2, "layers.0", [], 2)
    assert found["planned"] <= found["budget"] < found["everything"]


def test_torchs_function_is_back_after_the_training():
    before = torch.utils.checkpoint.checkpoint
    compared(case_of(nn.LayerNorm), steps=1)
    assert torch.utils.checkpoint.checkpoint is before


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), False),
        (torch.tensor(0.0), torch.tensor(-0.0), True),
        (torch.tensor(True), torch.tensor(True), False),
        (None, None, False),
        (None, torch.zeros(1), True),
        (torch.ones(2), torch.ones(3), True),
    ],
)
def test_bits_are_compared(one: Tensor | None, other: Tensor | None, differ: bool) -> None:
    left, right = (Left({kind: [value] for kind in KINDS}, 0) for value in (one, other))
    assert differing(left, right) == (list(KINDS) if differ else [])


def test_the_loss_reads_every_output_that_has_a_gradient():
    x = torch.ones(2, requires_grad=True)
    outputs = {"a": (x, None), "b": [x * 2, torch.ones(3)], "c": "text"}
    assert len([*tensors_in(outputs)]) == 3
    assert loss_of(outputs) == 1 + 4


def test_settings_are_made_small_by_their_names():
    large = {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4,
        "num_hidden_layers": 12, "vocab_size": 50000, "eos_token_id": 49999, "hidden_dropout_prob": 0.0,
        "layer_types": ["local", "local", "local", "full"] * 3, "hidden_act": "gelu", "patch_size": 16,
    }  # fmt: skip
    assert shrunk(large, Scale()) == {
        "hidden_size": 24, "intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1,
        "num_hidden_layers": 2, "vocab_size": 128, "eos_token_id": token(49999), "hidden_dropout_prob": 0.1,
        "layer_types": ["local", "full"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda: {"a": 1}, {"a": 1}),
        (lambda: {}["b"], {"reason": "KeyError: 'b'"}),
        (lambda: exec("while True: pass"), {"reason": "it took more than 0 s"}),
        (lambda: exec("raise SystemExit(3)"), {"reason": "SystemExit: 3"}),
        (lambda: {"a": len(bytes(1 << 40))}, {"reason": "MemoryError: "}),
    ],
    ids=["returns", "raises", "takes long", "ends", "takes much"],
)
def test_a_family_runs_in_a_process_of_its_own(function, found):
    assert isolated(function, 0.4 if "0 s" in str(found) else 20, 1 << 39) == found


# transformers ---------------------------------------------------------------------------------------------------------

CROSS_SECTION = (
    "bert", "clip", "deepseek_v3", "gpt2", "informer", "llama", "mamba", "mixtral", "t5", "vit", "wav2vec2", "whisper",
)  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("transformers", reason="transformers is not installed")
    library = LIBRARIES["transformers"]()
    if int(library.version.partition(".")[0]) < 5:
        pytest.skip(f"transformers {library.version}: its configurations are no dataclasses before 5")
    return library


@few(1)
@pytest.mark.filterwarnings("ignore")  # those of transformers
@pytest.mark.parametrize("family", rarely(["gpt2", "mixtral", "clip", "whisper"], CROSS_SECTION))
def test_a_family_of_transformers(transformers, family):
    found = compared(transformers.case(family), steps=2)
    assert found["itself"] == found[OURS] == []
    assert found[TORCH] == (["buffers", "predictions"] if family == "informer" else [])  # informer has BatchNorm
    regions, reached, replays = found["counts"][OURS]
    assert regions == reached == replays > 0
    assert found["saved"][OURS] < found["saved"]["plain"]


OTHERS = sorted((row["library"], row["family"]) for row in STORED if row["family"] not in CROSS_SECTION)


@pytest.mark.skip(reason=f"{len(OTHERS)} further families take too long here: make peers")
def test_the_other_families():
    """See ``benchmarks/results/peers.jsonl``."""


# the stored results ---------------------------------------------------------------------------------------------------


def test_stored_results_differ_nowhere_with_torchckpt():
    rows = [row for row in STORED if table.is_compared(row)]
    assert [row["family"] for row in rows if row["itself"]] == []
    assert [row["family"] for row in rows if row[OURS]] == []
    unlike = [row["family"] for row in rows if row["counts"][OURS][1] != row["counts"][OURS][2]]
    assert unlike in ([], ["efficientformer"])  # one of its regions is a reshape, which saves nothing


def test_the_page_has_the_tables_of_the_stored_results():
    for line in [*table.summary(STORED), *table.causes(STORED), *table.not_made(STORED)]:
        assert line in README
    for line in table.budget(table.read(table.RESULTS / "peers-budget.jsonl")):
        assert line in README


def test_what_the_other_pages_say_of_it():
    rows = [row for row in STORED if table.is_compared(row)]
    worse = sum(bool(row[TORCH]) for row in rows)
    said = f"Of {len(rows)} families of models in timm, transformers, diffusers and litgpt"
    assert f"{said}, `torch.utils.checkpoint` leaves {worse}" in (ROOT / "README.md").read_text().replace("\n", " ")


def test_the_script_adds_a_line_for_each_family_and_runs_none_again(tmp_path):
    file = tmp_path / "found.jsonl"
    line = {"library": "transformers", "family": "gpt2"}
    file.write_text(json.dumps(line) + "\n")
    pytest.importorskip("transformers", reason="transformers is not installed")
    arguments = ("--only", "transformers", "--families", "gpt2", "no_such_family", "--out", str(file))
    done = run_script("benchmarks/peers/run.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    assert rows[0] == line
    assert [row["family"] for row in rows] == ["gpt2", "no_such_family"]
    assert rows[1]["reason"].startswith("FileNotFoundError") or "no class of it" in rows[1]["reason"]


def test_other_ways_beside_plain_training() -> None:
    done = run_script("benchmarks/peers/ways.py")
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", done.stdout, flags=re.MULTILINE))
    assert rows["torch.utils.checkpoint"] == rows["the same, selective"] == "= | buffers, predictions | 2"
    assert rows["torchckpt"] == "= | = | 1"
    assert rows["torch.compile, activation_memory_budget 0"].endswith(" | 1")
    if HAS_REMAT:
        assert rows["torch_remat, with a hook for random numbers"] == "= | buffers, predictions | 2"


def test_the_stub_has_what_timm_asks_of_torchvision() -> None:
    code = (
        "import sys; sys.modules.pop('torchvision', None)\n"
        "from benchmarks.peers.torchvision_stub import _Finder\n"
        "sys.meta_path.insert(0, _Finder())\n"
        "from torchvision.transforms.functional import InterpolationMode\n"
        "import torchvision.transforms.functional as F\n"
        "print(InterpolationMode.NEAREST, isinstance(F.resize, type))\n"
    )
    assert run("-c", code).stdout == "InterpolationMode.NEAREST True\n"
