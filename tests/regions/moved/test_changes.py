"""What changes after it was saved: an error until it is let go of; from then on the bytes of the forward are safe."""
from __future__ import annotations

import pytest
import torch

from tests.helpers import leaf
from torchckpt.errors import RecomputationError
from torchckpt.regions.moved.region import Moved


@pytest.fixture
def x(device):
    return leaf(4, 8, device=device)


def region_of(x):
    """A region whose output is its only saved tensor, with its loss; the caller holds the output."""
    region = Moved(1)
    output = region.forward(torch.exp, (x,), {})
    return region, output, output.sum()


def test_changed_before_the_release_is_the_error_of_a_slot(x):
    region, output, loss = region_of(x)
    with torch.no_grad():
        output.add_(1)
    del output
    region.release()
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    place = "" if x.device.type == "cpu" else ":0"
    assert str(caught.value) == (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"the float32 (4, 8) on {x.device.type}{place}, saved inside a region, is at version 1; expected version 0 "
        "instead\n  works:    the operation out of place, such as h = h + 1 instead of h.add_(1)"
    )


def test_changed_without_a_release_is_the_same_error(x):
    _, output, loss = region_of(x)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_of_it_that_changes_is_the_same_error(x):
    region, output, loss = region_of(x)
    with torch.no_grad():
        output[0].zero_()
    del output
    region.release()
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        loss.backward()


def test_changed_after_it_is_back_is_the_error_of_autograd(x):
    """A saved tensor that a backward changes is not what a second one would need."""

    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            return grad * saved.add_(1)

    region = Moved(1)
    loss = region.forward(Spoils.apply, (x,), {}).sum()
    region.release()
    loss.backward(retain_graph=True)
    with pytest.raises(RecomputationError, match="modified by an inplace operation"):
        loss.backward()


def test_changed_after_the_release_is_no_matter(x):
    region, output, loss = region_of(x)
    expected, address = output.detach().clone(), output.data_ptr()
    del output
    region.release()
    others = [torch.full_like(x, 7) for _ in range(4)]
    assert address in [other.data_ptr() for other in others] or x.device.type == "cpu"  # who gets the memory writes it
    loss.backward()
    assert torch.equal(x.grad, expected)


RESIZED = (
    "the storage of a saved tensor has got another size, or other memory, before it was let go of\n"
    "  received: the float32 (4, 8) on {}, saved inside a region of torchckpt.offload\n"
    "  works:    a new tensor in place of storage.resize_; or the same after the backward"
)


def freed(storage):
    storage.resize_(0)


def grown(storage):
    storage.resize_(4096)


def freed_and_taken_again(storage):
    size, address, others = storage.nbytes(), storage.data_ptr(), []
    storage.resize_(0)
    while len(others) < 1000 and address not in [other.data_ptr() for other in others[-1:]]:  # malloc may have others
        others.append(torch.empty(size, dtype=torch.uint8, device=storage.device))
    storage.resize_(size)


@pytest.mark.parametrize("releases", [True, False], ids=["released", "here"])
@pytest.mark.parametrize("change", [freed, grown, freed_and_taken_again])
def test_a_storage_that_is_resized_is_an_error(x, change, releases):
    region, output, loss = region_of(x)
    change(output.untyped_storage())
    del output
    if releases:
        region.release()
    with pytest.raises(RecomputationError) as caught:
        loss.backward()
    assert str(caught.value) == RESIZED.format(x.device if x.device.type == "cpu" else f"{x.device.type}:0")


def test_other_data_in_the_same_tensor_leaves_the_storage_alone(x):
    region, output, loss = region_of(x)
    expected = output.detach().clone()
    output.data = torch.zeros_like(output)
    region.release()
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_a_part_that_counts_its_own_changes_goes_again(x):
    """In one storage, but with versions of its own: what was sent of it before it changed was what came back."""
    first, second = Moved(1), Moved(1)
    held, part = first.forward(lambda x: _square_of_one_half(2 * x), (x,), {})
    first.send()
    out = second.forward(lambda part: part.add_(1).square(), (part,), {})
    del part
    second.release()
    (held.sum() + out.sum()).backward()
    expected = torch.cat([8 * x.detach()[:, :4], 4 * (2 * x.detach()[:, 4:] + 1)], 1)
    assert torch.equal(x.grad, expected)


def _square_of_one_half(x):
    left, right = torch.unsafe_chunk(x, 2, -1)
    return left.square(), right


def test_what_was_changed_before_it_was_sent_goes_once(x):
    first, second = Moved(1), Moved(1)
    hidden = first.forward(lambda x: torch.relu_(2 * x), (x,), {})
    first.send()
    (storage,) = first._moving()
    piece = storage.piece
    out = second.forward(lambda hidden: hidden.view(-1).sin(), (hidden,), {})
    assert list(second._moving()) == [storage]
    assert storage.piece is piece is not None
    out.sum().backward()
