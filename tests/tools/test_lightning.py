"""Lightning: a ``LightningModule`` under its ``Trainer``, and under the strategies that a CPU allows."""
from __future__ import annotations

import logging
import os
import tempfile
from importlib.util import find_spec

import pytest
import torch.distributed as dist

from tests.distributed.ranks import attempted, on_ranks
from tests.slow import few
from tests.tools.steps import STEPS, equal

pytestmark = [
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings(
        r"ignore:The '.*dataloader' does not have many workers",
        r"ignore:GPU available but not used",
        r"ignore::DeprecationWarning",  # of packages that lightning uses
        r"ignore::FutureWarning",
    ),
]


def fitted(*args, **options):
    """What was seen, and the number of replays."""
    from tests.tools import lit

    return lit.fitted(*args, **options)


@pytest.fixture
def quiet():
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("lightning", "pytorch_lightning"))]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@few(1)
@pytest.mark.parametrize("when", ["init", "configure_model"])
@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 1, "precision": "bf16-mixed"}], ids=str)
def test_trainer(tmp_path, quiet, when, options):
    expected, none = fitted(tmp_path, **options)
    tensors, recomputes = fitted(tmp_path, when, **options)
    assert none == 0
    assert recomputes == 3 * STEPS
    assert len(tensors) == STEPS * (1 + 14 + 14 + 1)
    assert equal(tensors, expected)
    assert os.listdir(tmp_path) == []


@few(1)
@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 1, "precision": "bf16-mixed"}], ids=str)
def test_trainer_with_a_budget(tmp_path, quiet, options):
    """The first step recomputes the three layers, and the others nothing."""
    expected, _ = fitted(tmp_path, **options)
    tensors, recomputes = fitted(tmp_path, "budget", **options)
    assert recomputes == 3
    assert equal(tensors, expected)


def test_keys_of_the_checkpoint_are_those_without():
    from tests.tools.lit import Lit

    assert list(Lit("init").state_dict()) == list(Lit().state_dict())


# two ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    return on_ranks(work, tmp_path_factory.mktemp("ranks"), 2, timeout=120)


def work(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="tests")
    return {
        (name, when): attempted(fitted_on_two, name, when) for name in STRATEGIES for when in (None, "configure_model")
    }


def fitted_on_two(name, when):
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import strategies

    strategy = getattr(strategies, name)(process_group_backend="gloo", **STRATEGIES[name])
    with tempfile.TemporaryDirectory() as folder:
        found = fitted(folder, when, devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
        return *found, os.listdir(folder)


STRATEGIES = {"DDPStrategy": {}, "ModelParallelStrategy": {"data_parallel_size": 2, "tensor_parallel_size": 1}}


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_on_two_ranks(reported, name):
    for report in reported:
        assert not isinstance(report[name, None], str), report[name, None]
        assert not isinstance(report[name, "configure_model"], str), report[name, "configure_model"]
        expected, none, _ = report[name, None]
        tensors, recomputes, left = report[name, "configure_model"]
        assert (none, recomputes, left) == (0, 3 * STEPS, [])
        assert len(tensors) == STEPS * (1 + 14 + 14 + 1)
        assert equal(tensors, expected)
        assert tensors[1].shape[0] == (8 if name == "ModelParallelStrategy" else 16)  # which shards in halves
