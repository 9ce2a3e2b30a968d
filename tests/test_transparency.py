"""With = without: a hundred small programs, made at random, are as regions what they are as plain calls."""
from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.slow import slow
from torchckpt import checkpoint, checkpoint_module, is_recomputing
from torchckpt.errors import RecomputationError
from torchckpt.testing import assert_transparent

ROWS, WIDTH = 6, 8


class Program(nn.Module):
    """A few random steps, each from values of shape (ROWS, WIDTH) to another one; the last ones are the outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choose = choose = random.Random(seed)
        self.modules_ = nn.ModuleList()
        kinds = [name for name in dir(self) if name.startswith("make_")]
        self.steps = [getattr(self, choose.choice(kinds))() for _ in range(choose.randint(3, 12))]
        self.places = [(choose.random(), choose.random()) for _ in self.steps]
        self.outputs = choose.randint(1, 3)

    def forward(self, x, *, others, index):
        values = [x, *others.values()]
        for step, (first, second) in zip(self.steps, self.places):
            values.append(step(values[int(first * len(values))], values[int(second * len(values))], index))
        return {"outputs": values[-self.outputs :], "index": index, "detached": values[0].detach(), "rows": len(x)}

    def module(self, module: nn.Module) -> nn.Module:
        self.modules_.append(module)
        return module

    # Each makes a step: (value, another, index) -> value.

    def make_linear(self):
        linear = self.module(nn.Linear(WIDTH, WIDTH, bias=self.choose.random() < 0.5))
        return lambda x, y, index: linear(x)

    def make_dropout(self):
        p = self.choose.choice([0.1, 0.5])
        return lambda x, y, index: F.dropout(x, p)

    def make_activation(self):
        function = self.choose.choice([F.gelu, torch.tanh, torch.sigmoid, torch.sin, F.silu, F.relu])
        return lambda x, y, index: function(x)

    def make_exp(self):
        return lambda x, y, index: x.tanh().exp()

    def make_sum(self):
        return lambda x, y, index: x + y

    def make_product(self):
        return lambda x, y, index: x * y.tanh()

    def make_residual(self):
        linear = self.module(nn.Linear(WIDTH, WIDTH))
        return lambda x, y, index: x + F.dropout(linear(F.gelu(y)), 0.2)

    def make_slices(self):
        cut = self.choose.randint(1, WIDTH - 1)
        return lambda x, y, index: torch.cat([x[:, :cut], y[:, cut:]], dim=1)

    def make_wide(self):
        linear = self.module(nn.Linear(2 * WIDTH, WIDTH))
        return lambda x, y, index: linear(torch.cat([x, y], dim=1))

    def make_layer_norm(self):
        norm = self.module(nn.LayerNorm(WIDTH))
        return lambda x, y, index: norm(x)

    def make_batch_norm(self):
        norm = self.module(nn.BatchNorm1d(WIDTH, momentum=self.choose.choice([0.1, None])))
        return lambda x, y, index: norm(x)

    def make_softmax(self):
        return lambda x, y, index: (x @ y.t()).softmax(dim=-1) @ x

    def make_attention(self):
        def attention(x, y, index):
            return F.scaled_dot_product_attention(x[None], y[None], y[None], dropout_p=0.1)[0]

        return attention

    def make_indexed(self):
        return lambda x, y, index: x[index] + y

    def make_gathered(self):
        embedding = self.module(nn.Embedding(ROWS, WIDTH))
        return lambda x, y, index: embedding(index) * x

    def make_masked(self):
        return lambda x, y, index: torch.where(x > 0, x, y.sin())

    def make_noise(self):
        return lambda x, y, index: x + torch.randn_like(x) * y

    def make_view(self):
        return lambda x, y, index: x.view(-1).flip(0).view(ROWS, WIDTH)

    def make_same(self):
        return lambda x, y, index: x

    def make_half(self):
        return lambda x, y, index: (x.bfloat16() * 1.5).exp().float().tanh()

    def make_in_place(self):
        return lambda x, y, index: (x * 2).add_(y).tanh_()

    def make_complex(self):
        return lambda x, y, index: torch.view_as_real(torch.complex(x, y)[:, ::2].sin()).flatten(1).tanh()

    def make_cut_off(self):
        return lambda x, y, index: x.detach() * y

    def make_without_grad(self):
        def without_grad(x, y, index):
            with torch.no_grad():
                scale = x.sin()
            return scale * y

        return without_grad

    def make_inner_region(self):
        step = self.make_residual()
        return lambda x, y, index: checkpoint(step, x.sin(), y, index).cos()

    def make_checkpointed_module(self):
        module = self.module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)))
        checkpoint_module(module)
        return lambda x, y, index: module(x) - y


def inputs(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, y, z = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(3))
    index = torch.randint(ROWS, (ROWS,), generator=generator)
    return x.requires_grad_(seed % 4 != 0), {"y": y.requires_grad_(), "z": z}, index


@pytest.mark.parametrize("seed", [*range(50), *slow(range(50, 100))])
def test_program(seed, device):
    torch.manual_seed(seed)
    program = Program(seed).to(device)
    x, others, index = inputs(seed)
    others = {name: other.to(device) for name, other in others.items()}
    assert_transparent(program, x.to(device), others=others, index=index.to(device))


def test_programs_use_every_step():
    used = {step.__qualname__.split(".")[1] for seed in range(100) for step in Program(seed).steps}
    assert used == {name for name in dir(Program) if name.startswith("make_")}


@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_program_in_eval_mode(seed):
    torch.manual_seed(seed)
    x, others, index = inputs(seed)
    assert_transparent(Program(seed).eval(), x, others=others, index=index)


@pytest.mark.parametrize("seed", range(5, 100, 10))
def test_program_under_autocast(seed):
    torch.manual_seed(seed)
    x, others, index = inputs(seed)
    with torch.autocast("cpu", torch.bfloat16):
        assert_transparent(Program(seed), x, others=others, index=index)


# what is not transparent is found -------------------------------------------------------------------------------------

x = torch.linspace(-1, 1, 4, requires_grad=True)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("counter", torch.zeros(()))


class UnguardedCounter(Broken):
    def forward(self, x):
        self.calls += 1
        return (x * self.calls).sin()


class UnguardedBuffer(Broken):
    def forward(self, x):
        self.counter += 1
        return x.sin()


class UnguardedBufferThatIsReplaced(Broken):
    def forward(self, x):
        self.counter = self.counter + 1
        return x.sin()


class BufferOfTheReplay(Broken):
    def forward(self, x):
        self.counter.fill_(is_recomputing())
        return x.sin()


class BufferInTheGradient(Broken):
    def forward(self, x):
        self.counter += 1
        return (x * self.counter).sin()


def unreplayed(x):
    return (x if is_recomputing() else x + torch.rand_like(x)).sin()


def reseeded(x):
    torch.manual_seed(is_recomputing())
    return F.dropout(x, 0.5).sin()


def hidden_generator():
    generator_of = {"cpu": torch.Generator()}.get
    return lambda x: (x * torch.rand(x.shape, generator=generator_of("cpu"))).sin()


@pytest.mark.parametrize(
    ("function", "different"),
    [
        (UnguardedCounter(), "output 0, gradient 0"),
        (unreplayed, "gradient 0"),
        (reseeded, "gradient 0"),
        (hidden_generator(), "output 0, gradient 0"),
    ],
)
def test_function_that_is_not_transparent_is_found(function, different):
    with pytest.raises(AssertionError, match=f"is not the plain call; different: {different}"):
        assert_transparent(function, x)


BUFFERS = {
    UnguardedBuffer: "buffer UnguardedBuffer.counter",
    UnguardedBufferThatIsReplaced: "buffer UnguardedBufferThatIsReplaced.counter",
    BufferOfTheReplay: "buffer BufferOfTheReplay.counter",
    BufferInTheGradient: r"gradient 0, of shape \(4,\), buffer BufferInTheGradient.counter",
}


@pytest.mark.parametrize("make", BUFFERS)
def test_buffers_of_modules_are_lent_to_the_replay(make):
    assert_transparent(make(), x)
    module = make()
    if make is not BufferOfTheReplay:  # which asks whether it is one, so that its buffer may be under a guard
        assert_transparent(lambda x: module(x), x, modules=[module])


@pytest.mark.parametrize(("make", "different"), BUFFERS.items())
def test_buffers_of_a_module_that_the_function_has_by_a_computed_name_are_not(make, different):
    make.instance = module = make()

    def function(x):
        return getattr(make, "in" + "stance")(x)

    if make is BufferInTheGradient:  # it is saved, and so is its version
        with pytest.raises(RecomputationError, match="modified by an inplace operation"):
            assert_transparent(function, x, modules=[module])
        return
    with pytest.raises(AssertionError, match=f"is not the plain call; different: {different}"):
        assert_transparent(function, x, modules=[module])
