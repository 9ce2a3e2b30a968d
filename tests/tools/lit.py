"""What Lightning is given, apart from the tests: to import Lightning takes seconds."""
from __future__ import annotations

import warnings

import torch
from torch.utils.data import DataLoader

from tests.tools.steps import ROWS, STEPS, Block, Model, local, rows
from torchckpt import checkpoint_layers
from torchckpt.testing import count_recomputes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that it imports
    import lightning


class Lit(lightning.LightningModule):
    """The model, with what a trainer asks for."""

    def __init__(self, when=None) -> None:
        super().__init__()
        self.when, self.model, self.seen = when, Model(), []
        if when == "init":
            self.handle = checkpoint_layers(self.model, Block)
        if when == "budget":
            self.handle = checkpoint_layers(self.model, Block, budget="1GiB")

    def configure_model(self):
        if self.when == "configure_model" and not hasattr(self, "handle"):
            self.handle = checkpoint_layers(self, "model.layers.*")
        if getattr(self, "mesh", None) is None and self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            self.mesh = self.device_mesh["data_parallel"]
            for layer in self.model.layers:
                fully_shard(layer, mesh=self.mesh)
            fully_shard(self.model, mesh=self.mesh)

    def training_step(self, batch, number):
        torch.manual_seed(100 * number + self.global_rank)
        loss = self.model(batch).square().mean()
        self.seen.append(local(loss))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen += [local(parameter.grad) for parameter in self.parameters()]

    def on_train_batch_end(self, outputs, batch, number):
        self.seen += [*map(local, self.parameters()), torch.rand(2)]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fitted(folder, when=None, **options):
    """What was seen, and the number of replays."""
    module = Lit(when)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=str(folder), **options,
    )  # fmt: skip
    with count_recomputes() as recomputes:
        trainer.fit(module, DataLoader(rows(), batch_size=ROWS))
    return module.seen, recomputes.total
