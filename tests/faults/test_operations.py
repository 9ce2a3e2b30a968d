"""An exception at an operator of a step, whichever: the next step is as if it had never been, and nothing is left.

``make test`` has a cross-section of operators; ``make faults`` has all, with four kinds of exceptions at each.
"""
from __future__ import annotations

import gc
import logging
import random
import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.distributed.ranks import one_rank
from tests.faults.operations import ERRORS, Faulty, Operations, random_state
from tests.faults.tools import TOOLS, Training, same
from tests.left_behind import module_state, thread_state
from tests.regions.moved.calls import let_cpu_move
from tests.settings import with_gloo, without_collector
from tests.slow import few, rarely
from torchckpt.regions.private import dispatch_modes_are_active

pytestmark = [with_gloo, pytest.mark.usefixtures("group", "quiet", "quick_search", "quick_planner")]

FEW = 4
"""How many operators of a step raise in ``make test``."""
LARGE, OF_LARGE = 12, 40
"""The blocks of a larger model, and how many of its operators raise."""


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def moving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    let_cpu_move(monkeypatch)
    yield
    gc.collect()  # a training that is gone leaves the mode that its last step entered
    assert dispatch_modes_are_active() == 0


@pytest.fixture
def quiet() -> Iterator[None]:
    """torch prints the schedule where a step fails; a plan takes less after a lack of memory, and says so."""
    logger = logging.getLogger("torch.distributed.pipelining")
    logger.disabled = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="checkpoint_layers: the device was out of memory")
        yield
    logger.disabled = False


class Trial:
    """A training in which steps fail, beside what a step gives that does not."""

    def __init__(self, name: str, depth: int = 2) -> None:
        self._tool, self._depth = TOOLS[name], depth
        self._begin()

    def _begin(self) -> None:
        torch.manual_seed(0)
        self._training: Training = self._tool.make(self._depth)
        for _ in range(self._tool.steps):
            self._training.step()
        self._state = self._training.state()
        self._expected = self._training.seen()
        self._training.load(self._state)
        operations = Operations()
        with operations:
            self._training.step()
        self._training.load(self._state)
        self.names, self._random = operations.names, operations.random
        self._left = self._now()

    def _now(self) -> object:
        state = thread_state()
        if self._tool.stays:
            del state["modes"]
        return state, module_state([self._training.modules])

    def problems(self, number: int, error: type[BaseException]) -> str:
        """What is not as it should be after a step in which the operator with this number raises ``error``."""
        with without_collector():
            found = "; ".join(self._problems(Faulty(number, error), number, error))
        if self._tool.plans_less and error is torch.OutOfMemoryError:
            self._begin()
        return found

    def _problems(self, faulty: Faulty, number: int, error: type[BaseException]) -> Iterator[str]:
        try:
            with faulty:
                self._training.step()
        except BaseException as raised:
            if not _is_caused(raised, error):
                yield f"{type(raised).__name__} is raised"
        else:
            yield "nothing is raised"
        if random_state() != self._random[number]:
            yield "the generator is elsewhere"
        if self._now() != self._left:
            yield "something is left"
        self._training.load(self._state)
        if not same(self._training.seen(), self._expected):
            yield "the next step differs"
        # Torch itself holds on until the next backward to what its engine had in its queue when it failed.
        self._training.optimizer.zero_grad()
        if faulty.alive(self._training.owned()):
            yield f"{faulty.alive(self._training.owned())} storages are alive"
        if self._now() != self._left:
            yield "something is left after the next step"
        self._training.load(self._state)


def _is_caused(raised: BaseException | None, error: type[BaseException]) -> bool:
    return raised is not None and (type(raised) is error or _is_caused(raised.__cause__, error))


def faults_of(trial: Trial, numbers: Sequence[int], errors: int) -> list[str]:
    """The problems of all, where ``errors`` of the kinds are raised at each operator, in turn."""
    found = []
    for place, number in enumerate(numbers):
        for kind in range(place, place + errors):
            error = ERRORS[kind % len(ERRORS)]
            problem = trial.problems(number, error)
            if problem:
                found.append(f"{error.__name__} at {number}, {trial.names[number]}: {problem}")
    return found


@few(1)
@pytest.mark.parametrize("name", TOOLS)
def test_some_operators(name: str) -> None:
    trial = Trial(name)
    step = len(trial.names) // FEW
    assert faults_of(trial, range(step // 2, len(trial.names), step), 1) == []


@pytest.mark.faults
@pytest.mark.parametrize("name", TOOLS)
def test_all_operators(name: str) -> None:
    trial = Trial(name)
    assert faults_of(trial, range(len(trial.names)), len(ERRORS)) == []


@pytest.mark.faults
@pytest.mark.parametrize("name", TOOLS)
def test_random_operators_of_a_larger_model(name: str) -> None:
    trial = Trial(name, LARGE)
    numbers = random.Random(name).sample(range(len(trial.names)), OF_LARGE)
    assert faults_of(trial, numbers, 1) == []


# steps that measure, and that plan ------------------------------------------------------------------------------------


def problem_while_measuring(name: str, steps: int, share: float, error: type[BaseException]) -> str:
    """As ``Trial.problems``, in the step after so many of a new training. All that follow up to the plan are equal."""
    torch.manual_seed(0)
    training, never = TOOLS[name].make(2), TOOLS[name].make(2)
    never.load(training.state())
    for one in (training, never):
        torch.manual_seed(1)
        for _ in range(steps):
            one.step()
    state, operations = training.state(), Operations()
    with operations:
        never.step()
    never.load(state)
    gc.collect()
    try:
        with Faulty(int(share * len(operations.names)), error):
            training.step()
    except BaseException as raised:
        if not _is_caused(raised, error):
            return f"{type(raised).__name__} is raised"
    training.load(state)
    never.load(state)
    torch.set_rng_state(state["generator"])
    expected = [never.seen() for _ in range(TOOLS[name].steps + 1)]
    torch.set_rng_state(state["generator"])
    received = [training.seen() for _ in range(TOOLS[name].steps + 1)]
    return "" if same(received, expected) else "a step that follows differs"


MEASURED = [name for name in TOOLS if TOOLS[name].steps > 2]
LONG = ["Pipe(budget=)", *(name for name in MEASURED if TOOLS[name].steps > 4)]  # Pipe(budget=).step is measured alike


@few(1)
@pytest.mark.parametrize("name", rarely(LONG, MEASURED))
def test_some_operators_of_steps_that_measure(name: str) -> None:
    shares = [(steps, (steps + 0.5) / TOOLS[name].steps) for steps in range(TOOLS[name].steps)]
    cases = [(name, *share, ERRORS[number % len(ERRORS)]) for number, share in enumerate(shares)]
    assert [case for case in cases if problem_while_measuring(*case)] == []


@pytest.mark.faults
@pytest.mark.parametrize("name", MEASURED)
def test_many_operators_of_steps_that_measure(name: str) -> None:
    shares = [(steps, (part + 0.5) / 40) for steps in range(TOOLS[name].steps) for part in range(40)]
    cases = [(name, *share, ERRORS[number % len(ERRORS)]) for number, share in enumerate(shares)]
    assert [case for case in cases if problem_while_measuring(*case)] == []
