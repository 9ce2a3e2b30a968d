"""Functions that make no stages, and stages that do not run: each says what works."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.costs.models import ROWS, WIDTH, Mlp, vector
from torchckpt import ArgumentError
from torchckpt.costs import pipeline_costs

RULE = "the function does not return the stages"


def stage():
    return nn.Sequential(Mlp(), Mlp())


class Asks(nn.Module):
    """Its forward depends on values."""

    def __init__(self, how) -> None:
        super().__init__()
        self.blocks, self.how = stage(), how

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.how(x))


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def picks(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def counts(x: Tensor) -> Tensor:
    return x[torch.nonzero(x[:, 0] > 0).flatten()]


def reads(x: Tensor) -> Tensor:
    return x * x.max().item()


def lists(x: Tensor) -> Tensor:
    return x * x[0].tolist()[0]


def arrays(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())


def broken():
    raise ValueError("no such file")


FUNCTION = "the first argument is not a function that makes the stages"

BAD = [
    (stage(), f"{FUNCTION}\n  received: Sequential"),
    ([stage()], f"{FUNCTION}\n  received: [Sequential]"),
    (lambda: None, f"{RULE}, and what the first is called with\n  received: NoneType"),
    (lambda: [stage()], f"{RULE}, and what the first is called with\n  received: [Sequential]"),
    (lambda: ([], vector()), "received: stages=[]"),
    (lambda: (Mlp(), vector()), "received: stages=Mlp"),
    (lambda: ([Mlp(), print], vector()), "received: stages=[Mlp, builtin_function_or_method]"),
    (lambda: ([stage()], None), "received: an example of NoneType"),
    (lambda: ([stage()], vector(), 3), "the loss that the function returns is not callable\n  received: int"),
    (broken, "the function that makes the stages failed; tensors have no values there\n  received: ValueError"),
    (lambda: ([stage()], torch.randn(int(torch.randn(())))), "the function that makes the stages failed"),
    (
        lambda: ([stage(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))], vector()),
        f"stage 1 does not run on what stage 0 returns\n  received: float32[{ROWS}, {WIDTH}]: RuntimeError: ",
    ),
    (lambda: ([stage()], torch.randn(2, 3)), "stage 0 does not run on the example\n  received: float32[2, 3]:"),
    (
        lambda: ([stage()], vector(), lambda y: y @ y),
        "stage 0 (or its loss) does not run on the example\n  received: float32",
    ),
    (
        lambda: ([nn.Linear(WIDTH, WIDTH)], vector()),
        "no stage has blocks: regions, or children of an nn.ModuleList or nn.Sequential that repeat\n  received: 1 ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BAD)
def test_wrong_stages(build, message):
    with pytest.raises(ArgumentError) as error:
        pipeline_costs(build, "h100")
    assert message in str(error.value)
    assert "works:" in str(error.value)


@pytest.mark.parametrize("how", [branches, picks, counts, reads, lists])
def test_a_forward_that_depends_on_values(how):
    with pytest.raises(ArgumentError) as error:
        pipeline_costs(lambda: ([stage(), Asks(how)], vector()), "h100")
    assert "a stage asks for the values of tensors" in str(error.value)
    assert "received: stage 1, " in str(error.value)
    assert "works:    shapes that no value decides" in str(error.value)


def test_a_forward_that_leaves_torch():
    with pytest.raises(ArgumentError, match="stage 1 does not run on what stage 0 returns"):
        pipeline_costs(lambda: ([stage(), Asks(arrays)], vector()), "h100")


def test_nothing_is_left_behind_by_an_error():
    with pytest.raises(ArgumentError):
        pipeline_costs(lambda: ([stage(), Asks(reads)], vector()), "h100", dtype="bf16")
    assert torch.get_default_dtype() == torch.float32
    x = torch.ones(2, requires_grad=True)
    assert (x * 2).sum().item() == 4.0


def test_the_users_own_error_is_the_cause():
    with pytest.raises(ArgumentError) as error:
        pipeline_costs(broken, "h100")
    assert isinstance(error.value.__cause__, ValueError)


def test_what_a_stage_returns_is_what_the_next_is_called_with():
    seen = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stage()

        def forward(self, *inputs: object) -> tuple[object, ...]:
            seen.append([(x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in inputs])
            y = self.blocks(inputs[0])
            return y, y > 0, 7

    pipeline_costs(lambda: ([Two(), Two()], vector()), "h100")
    values = [(torch.float32, True), (torch.bool, False), 7]
    assert seen[0] == [(torch.float32, False)]
    assert values in seen
