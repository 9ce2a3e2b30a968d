"""Processes: run a function on every rank of a gloo group, and have what each of them returned."""
from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.little import search_little
from tests.scripts import method_to_start, run_here


@contextmanager
def one_rank() -> Iterator[None]:
    """Within, this process is a gloo group of one, and computes in one thread."""
    threads, before = torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        os.environ.pop("GLOO_SOCKET_IFNAME")
        os.environ.update({} if before is None else {"GLOO_SOCKET_IFNAME": before})


def on_ranks(function: Callable[[int], Any], folder: Any, ranks: int = 2, timeout: float = 300) -> list[Any]:
    """What ``function(rank)`` returned on each of ``ranks`` processes, of which none outlives this.

    ``function`` is one of a module. Whatever a rank raises is raised here.
    """
    _finish(started(_work, (function, str(folder), ranks), ranks), timeout)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def script_on_ranks(path: str, *arguments: str, folder: Any, ranks: int = 2, timeout: float = 90) -> str:
    """What the script at ``path`` prints on ``ranks`` processes, which are as torchrun starts them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _finish(started(_script, (path, arguments, str(folder), ranks, store.port), ranks), timeout)
    return "".join(Path(f"{folder}/{rank}.out").read_text() for rank in range(ranks))


def started(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> mp.ProcessContext:
    """``ranks`` processes that run ``function(rank, *args)``."""
    return mp.start_processes(function, args, nprocs=ranks, join=False, start_method=method_to_start())


def _finish(processes: mp.ProcessContext, timeout: float) -> None:
    """Wait for the processes. None outlives this."""
    try:
        done = [processes.join(timeout=timeout) for _ in processes.processes]  # each returns when one more has ended
        assert any(done), "the ranks are stuck"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join()


def attempted(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns, or the traceback of what it raises: a test compares it with what it expects."""
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc()


def _script(rank: int, path: str, arguments: tuple[str, ...], folder: str, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(1)
    search_little()
    with open(f"{folder}/{rank}.out", "w") as out, redirect_stdout(out):
        run_here(path, *arguments)


def _work(rank: int, function: Callable[[int], Any], folder: str, ranks: int) -> None:
    gc.freeze()  # what is imported need not be looked through at each collection
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    search_little()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        torch.save(function(rank), f"{folder}/{rank}.pt")
    finally:
        # Modules under FSDP2 are cycles that hold the group. If it outlives Python, a thread of it aborts the process.
        gc.collect()
        dist.destroy_process_group()
