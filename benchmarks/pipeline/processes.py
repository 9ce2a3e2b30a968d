"""Processes: run each rank of a pipeline in its own process on this machine."""
from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.pipeline.sleeping.block import sleep_precisely

__all__ = ["on_processes"]


def on_processes(p: int, work: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Run ``work(rank, tell, *args)`` on each of ``p`` processes of one process group; yield what they ``tell``."""
    method = "forkserver" if sys.platform == "linux" else "spawn"  # forks of a process that has only imported torch
    mp.set_forkserver_preload(["torch.distributed"])
    told = mp.get_context(method).SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        processes = mp.start_processes(_started, (p, meet, work, told, args), p, join=False, start_method=method)
        ended = False
        while not ended:
            ended = processes.join(timeout=0.1)
            while not told.empty():
                yield told.get()


def _started(rank: int, p: int, meet: str, work: Callable[..., None], told: Any, args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sleep_precisely()
    gc.disable()  # collect only between steps
    gc.collect()
    gc.freeze()  # imported objects are not scanned
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=p)
    work(rank, told.put, *args)
    dist.destroy_process_group()
