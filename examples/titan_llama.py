"""Trains a small Llama in the order in which torchtitan builds a model, with its recomputes planned within a budget.

    torchrun --standalone --nproc-per-node 2 examples/titan_llama.py
    torchrun --standalone --nproc-per-node 4 examples/titan_llama.py --no-compile --budget 60%

For each stage: regions first, then ``block.compile(fullgraph=True)``, then ``fully_shard``, then a schedule, and that
goes through ``recompute_ahead``. Two stages; more than two processes shard each of them. With two, a stage is one
process, and FSDP2 has a mesh of one device: it gathers nothing, and the order of calls is that of a larger machine.

The same steps are made without regions, on torch's own schedule; losses and parameters are equal to the bit.
"""
from __future__ import annotations

import argparse
import gc
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from plan_llama import Block, Size, Stage
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from torchckpt import checkpoint_layers
from torchckpt.distributed import recompute_ahead

STAGES, MICRO_BATCHES = 2, 4
SMALL = Size(4, 64, 4, 2, 128, 64, 32, rows=2, stages=STAGES, dropout=0.1)
TINY = replace(SMALL, width=16, heads=2, key_heads=1, hidden=32, vocabulary=16, tokens=8, rows=1)


def main() -> None:
    options, device = parsed_options(), joined()
    mesh = init_device_mesh(device.type, (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
    plain = trained(options, mesh, device, with_regions=False)
    ours = trained(options, mesh, device, with_regions=True)
    same: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(same, all(map(torch.equal, plain["parameters"], ours["parameters"])))
    if dist.get_rank() == dist.get_world_size() - 1:  # one of those that have losses
        for number, (without, loss) in enumerate(zip(plain["losses"], ours["losses"]), 1):
            print(f"step {number:2}   loss {loss:.8f}   without regions {without:.8f}")
        print(f"parameters equal, to the bit, on ranks: {[rank for rank, equal in enumerate(same) if equal]}\n")
        print(ours["handle"], ours["report"], sep="\n\n", flush=True)
    del ours, plain
    gc.collect()  # what holds the group in a cycle goes before it does: its threads must not outlive Python
    dist.destroy_process_group()


def trained(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device, with_regions: bool) -> dict[str, Any]:
    """Losses of the last stage, parameters, and with regions also what is to be shown of them."""
    size = TINY if options.quick else SMALL
    at = mesh["pp"].get_local_rank()
    torch.manual_seed(at)
    module, handle = Stage(size, at).to(device), None
    if with_regions:
        handle = checkpoint_layers(module, Block)  # 1. before compile: what is compiled is inside of the region
    for block in module.blocks if options.compile else ():
        block.compile(fullgraph=True, backend=options.backend)  # 2. a graph for each block
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])  # 3. after compile: gathering stays outside of the graph
    fully_shard(module, mesh=mesh["dp"])

    stage = PipelineStage(module, at, STAGES, device, group=mesh["pp"].get_group())
    schedule: Any = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    if with_regions:
        schedule = recompute_ahead(schedule, budget=options.budget)  # 4. four steps are measured, then it is planned
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = [step(schedule, optimizer, mesh, size, device, number) for number in range(options.steps)]
    report = schedule.report() if with_regions else None
    parameters = [parameter.to_local().detach().clone() for parameter in module.parameters()]
    told = [loss for loss in losses if loss is not None]
    return {"losses": told, "parameters": parameters, "handle": handle, "report": report}


def step(
    schedule: Any, optimizer: Any, mesh: DeviceMesh, size: Size, device: torch.device, number: int
) -> float | None:
    """The loss, on the last stage; each part of ``dp`` has rows of its own."""
    part, is_last = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank() == STAGES - 1
    rows = torch.Generator().manual_seed(1000 * number + part)
    tokens = torch.randint(size.vocabulary, (MICRO_BATCHES * size.rows, size.tokens + 1), generator=rows).to(device)
    torch.manual_seed(100 * number + dist.get_rank())  # of the dropout
    losses: list[Tensor] = []
    if is_last:
        schedule.step(target=tokens[:, 1:], losses=losses)
    else:
        schedule.step(tokens[:, :-1])
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean().item() if losses else None


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def joined() -> torch.device:
    """The device of this process, in a group with the others."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="70%", help="bytes of a step on each rank, or a share of all kept")
    parser.add_argument("--steps", type=int, default=6, help="the first four are measured (default 6)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out step 2")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    parser.add_argument("--quick", action="store_true", help="a model that is smaller still")
    return parser.parse_args()


if __name__ == "__main__":
    main()
