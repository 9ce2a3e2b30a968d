"""What ``checkpoint`` can be told, a pipeline can; and what changes between its forward and its backward."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchckpt import Pipe, testing
from torchckpt.errors import ArgumentError, RecomputationError

MODES: list[Any] = ["never", "except_last", "always"]
X = torch.linspace(-1, 2, 32).reshape(8, 4)


def gradients(model: nn.Module, x: Tensor = X, step: bool = False) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    if step:
        model.step(x, torch.zeros(len(x)), loss_fn=lambda y, _: y.square().sum(), reduce="sum")
    else:
        model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class MicroBatches(nn.Module):
    """The layers, micro-batch by micro-batch."""

    def __init__(self, layers: nn.Module, chunks: int = 4) -> None:
        super().__init__()
        self.layers, self.chunks = layers, chunks

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layers(rows) for rows in x.chunk(self.chunks)])


class Draws(nn.Linear):
    """From a generator of somebody else's."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(4, 4)
        self.draw = lambda shape: torch.rand(shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.draw(x.shape)).sin()


def test_generators_that_are_named() -> None:
    generator = torch.Generator()
    layers = nn.Sequential(Draws(generator), nn.Tanh(), Draws(generator))

    def seeded(model: nn.Module) -> list[Tensor]:
        generator.manual_seed(1)
        return gradients(model)

    expected = seeded(Pipe(layers, [2, 1], chunks=4, checkpoint="never"))
    pipe = Pipe(layers, [2, 1], chunks=4, checkpoint="always", generators=[generator])
    assert all(map(torch.equal, seeded(pipe), expected))
    with pytest.raises(RecomputationError, match="with other values"):
        seeded(Pipe(layers, [2, 1], chunks=4, checkpoint="always", determinism_check="values"))


@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
def test_a_layer_with_a_generator_of_its_own(step: bool) -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * torch.rand(x.shape, generator=self.generator)).sin()

    layers = nn.Sequential(Own(), nn.Tanh(), Own())

    def seeded(model: nn.Module) -> list[Tensor]:
        layers[0].generator.manual_seed(1)
        layers[2].generator.manual_seed(2)
        return gradients(model, step=step)

    expected = seeded(Pipe(layers, [2, 1], chunks=4, checkpoint="never"))
    assert all(map(torch.equal, seeded(Pipe(layers, [2, 1], chunks=4, checkpoint="always")), expected))


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_change_their_buffers(mode: Any) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        norm = parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 4)), nn.Dropout(0.5))

    plain, layers = MicroBatches(make()), make()
    pipe = Pipe(layers, [2, 2], chunks=4, checkpoint=mode)
    for _ in range(2):
        assert all(map(torch.equal, gradients(pipe), gradients(plain)))
        assert all(map(torch.equal, layers.buffers(), plain.buffers()))


def test_random_state_that_is_not_kept() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sigmoid())
    kept = gradients(Pipe(layers, [3], chunks=1, checkpoint="always"))
    other = gradients(Pipe(layers, [3], chunks=1, checkpoint="always", preserve_rng_state=False))
    assert not all(map(torch.equal, kept, other))


@pytest.mark.parametrize(("early_stop", "counted"), [(True, 0.0), (False, 1.0)])
def test_early_stop(early_stop: bool, counted: float) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)), [1], chunks=2, checkpoint="always", early_stop=early_stop)
    with testing.flops() as forward:
        output = pipe(X)
    with testing.flops() as backward:
        output.sum().backward()
    assert (backward.total - forward.total) / forward.total == counted  # but for the weight's gradient


@pytest.mark.parametrize("step", [False, True], ids=["forward", "step"])
def test_context_fn(step: bool) -> None:
    saved = torch.ops.aten.addmm.default

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator is saved else CheckpointPolicy.PREFER_RECOMPUTE

    def context_fn() -> Any:
        return create_selective_checkpoint_contexts(policy)

    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    expected = gradients(Pipe(layers, [2, 2], chunks=4, checkpoint="never"), step=step)
    pipe = Pipe(layers, [2, 2], chunks=4, checkpoint="always", context_fn=context_fn)
    assert all(map(torch.equal, gradients(pipe, step=step), expected))
    with testing.flops() as selective:
        gradients(pipe)
    with testing.flops() as never:
        gradients(Pipe(layers, [2, 2], chunks=4, checkpoint="never"))
    assert selective.total == never.total


def test_wrong_options_are_listed_with_the_others() -> None:
    with pytest.raises(ArgumentError) as raised:
        Pipe(nn.Sequential(nn.Linear(4, 4)), chunks=0, determinism_check="maybe", generators=3)  # type: ignore[arg-type]
    text = str(raised.value)
    assert text.startswith("Pipe: 3 faults\n")
    for rule in "chunks is not", "generators is not", "determinism_check is not":
        assert rule in text


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [("checkpoint", "x", 'checkpoint="except_last"'), ("chunks", 0, "chunks=8"), ("lookahead", None, "lookahead=1")],
)
def test_an_attribute_that_is_set_later_is_checked_too(name: str, value: Any, works: str) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)))
    setattr(pipe, name, value)
    for call in pipe, lambda x: pipe.step(x, x, loss_fn=nn.functional.mse_loss):
        with pytest.raises(ArgumentError) as raised:
            call(X)
        assert str(raised.value).endswith(f"received: {name}={value!r}\n  works:    {works}")


@pytest.mark.parametrize("mode", MODES)
def test_functional_call(mode: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Sigmoid())
    weights = {name: (p.detach() * 2).requires_grad_() for name, p in layers.named_parameters()}

    def learnt(model: nn.Module) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(functional_call(model, weights, (X,)).sum(), list(weights.values()))

    micro = MicroBatches(layers)
    torch.manual_seed(1)
    inner = {f"layers.{name}": weight for name, weight in weights.items()}
    expected = torch.autograd.grad(functional_call(micro, inner, (X,)).sum(), list(weights.values()))
    assert all(map(torch.equal, learnt(Pipe(layers, [3, 2], chunks=4, checkpoint=mode)), expected))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weights_that_change_before_the_backward(name: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    loss = Pipe(layers, [2, 2], chunks=2, checkpoint="always")(X).sum()
    with torch.no_grad():
        getattr(layers[0], name).mul_(2)
    with pytest.raises(RecomputationError, match="modified by an inplace operation") as caught:
        loss.backward()
    assert f"region 'Pipe stage 0 (layers 0 to 1)' reads Linear.{name}" in str(caught.value)
