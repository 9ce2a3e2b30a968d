"""Fixtures of all tests: the device, the seed, and the three ways to make a region."""
from __future__ import annotations

import gc
import sys

import pytest
import torch

import torchckpt
from tests.accelerator import TYPE, take_once
from tests.device import load, why_not
from tests.device.fixtures import sim, simulator
from tests.device.unsimulated import why_unsimulated
from tests.helpers import by_hand, prefetched
from tests.little import search_little
from tests.slow import leave_out
from torchckpt.planning.remat.search import planner
from torchckpt.regions.devices import accelerator_type
from torchckpt.regions.state.ambient import settings

__all__ = ["sim", "simulator"]


for _absent in (torch.cuda, torch.xpu, torch.mtia):
    # Where there is no such device, a seed is put in a queue that nobody reads, with the stack as text. That takes half
    # a millisecond, for each test and for each seed in it.
    if not _absent.is_available() and hasattr(_absent, "manual_seed_all"):
        _absent.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    """Skip what needs an accelerator where there is none, not even a simulated one."""
    leave_out(items)
    if TYPE != "sim":
        return
    reason = why_not()
    for item in items:
        if item.get_closest_marker("accelerator") and (why := reason or why_unsimulated(item.nodeid)):
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_runtest_setup(item):
    """Tests make what stays, too: torch's compiler alone makes as many objects as all that was there before."""
    path, modules = _frozen[-1]
    if item.path != path or len(sys.modules) > modules + 100:
        freeze(item.path)


_frozen = [(None, 0)]
"""The file of the last test before which all was frozen, and how many modules there were."""


def freeze(path):
    """Hundreds of tests collect garbage. What was imported and what stays of earlier files is none, and need not be
    looked through each time: half a million objects take 0.15 s."""
    gc.collect()
    gc.freeze()
    _frozen.append((path, len(sys.modules)))


def pytest_collection_finish(session):
    """Make the simulated device before the first test, as autograd makes its threads at the first backward."""
    needed = any(item.get_closest_marker("accelerator") for item in session.items)
    if needed and TYPE == "sim" and why_not() is None:
        load()
        if accelerator_type() != "sim":
            raise pytest.UsageError("a test module makes the library look for an accelerator when it is imported")
    freeze(None)


@pytest.fixture(params=["cpu", pytest.param(TYPE, marks=pytest.mark.accelerator)])
def device(request):
    if request.param == "sim":
        request.getfixturevalue("sim")
    if request.param == TYPE:
        take_once()
    return torch.device(request.param)


@pytest.fixture
def accelerator(request):
    """The accelerator, of a test with that mark."""
    if TYPE == "sim":
        request.getfixturevalue("sim")
    take_once()
    return torch.device(TYPE, 0)


@pytest.fixture
def two_accelerators(accelerator):
    """Two devices of it."""
    if torch.accelerator.device_count() < 2:
        pytest.skip(f"needs two {TYPE} devices")
    return accelerator, torch.device(TYPE, 1)


@pytest.fixture(params=[torchckpt.checkpoint, by_hand, prefetched], ids=["checkpoint", "by_hand", "prefetched"])
def call(request):
    """Calls a function on its arguments as a region."""
    return request.param


@pytest.fixture
def quick_planner(monkeypatch):
    """Any schedule will do."""
    monkeypatch.setattr(planner, "_SEARCH_WORK", 1)


@pytest.fixture
def quick_search(monkeypatch):
    """Any plan of a pipeline will do."""
    search_little(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def settings_stay():
    """A test that leaves a setting of torch behind fails, not one after it."""
    before = settings_now()
    yield
    assert settings_now() == before


def settings_now():
    """Without whether a dispatch mode is there: one that has counted a step on the CPU stays until the next one."""
    *others, _, stance, functions_are_seen, kernels, cached = settings()
    return *others, functions_are_seen, kernels, cached, "default" if stance is None else stance.stance


@pytest.fixture
def fresh_dynamo(collected):
    """Nothing is compiled before the test, and nothing of it stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def collected():
    """What the tests of a file leave to the garbage collector is gone after the last one."""
    yield
    gc.collect()
