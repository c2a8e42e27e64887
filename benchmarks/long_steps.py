"""Steps on long sequences and the memory they need: the half of long_context.py that runs inside worker groups.

Linux only: /proc/self/status tells the most memory a process ever had, and /proc/self/clear_refs has it begin anew.
"""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from benchmarks import rank_steps, torch_peers
from outlast import parallel
from outlast.config import Model, Parallel, Run
from outlast.model.transformer import Packing, Transformer
from outlast.parallel import flash
from outlast.parallel import mesh as grid
from outlast.parallel.inputs import places

SHAPE: Final = replace(
    Model(), vocab_size=128, hidden_size=64, intermediate_size=176, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16,
    tie_embeddings=False, init_std=0.2,
)  # fmt: skip
"""One layer, and few tokens in the vocabulary: it is attention that is long here. Weights so large that the loss hangs on
what each token attends to."""
WARMING: Final = 256
"""Tokens of the step before: it loads what a process loads once, kernels and connections."""

_M_TRIM_THRESHOLD: Final = -1  # of malloc.h
_M_MMAP_THRESHOLD: Final = -3


@dataclass(frozen=True)
class Scheme:
    """Who takes the step, and how ranks share it."""

    layout: Parallel
    by: Literal["ours", "transformers", "torch"] = "ours"


def run_of(layout: Parallel) -> Run:
    """Of the shape, in float32, from seed 0."""
    run = Run(model=SHAPE, parallel=layout)
    return replace(run, train=replace(run.train, dtype="float32", seed=0))


def step_of(scheme: Scheme, length: int) -> tuple[Callable[[], float], grid.Mesh | None]:
    """A step on one sequence; calling it returns the mean loss. And our grid."""
    run = run_of(scheme.layout)
    if scheme.by == "ours":
        return rank_steps.ours(run, 1, length)
    if scheme.by == "torch":
        return rank_steps.theirs(run, 1, length), None
    from benchmarks import step_time  # transformers take seconds to import, and other ranks do without

    weights = Transformer.on(torch_peers.CPU, SHAPE, torch.float32, 0)
    return step_time.theirs(SHAPE, weights, *rank_steps.batch_of(SHAPE, 1, length)), None


def resident(what: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process in memory now, or the most there were."""
    told = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if told is None:
        raise RuntimeError(f"/proc/self/status has no {what}")
    return int(told[1]) * 1024


def keeping_free_memory(keeps: bool) -> None:
    """Have glibc give each block its own pages and give them back at once; or keep what is free, as by itself it comes to.

    Raises:
        RuntimeError: it will not.
    """
    libc = ctypes.CDLL(None)
    mmap_from, trim_from = (32 << 20, 64 << 20) if keeps else (128 << 10, 128 << 10)
    if not (libc.mallopt(_M_MMAP_THRESHOLD, mmap_from) and libc.mallopt(_M_TRIM_THRESHOLD, trim_from)):
        raise RuntimeError("mallopt refused")


def settled() -> int:
    """Give memory that is free back to the system, have the most there was begin anew, and tell what is left in bytes."""
    gc.collect()
    keeping_free_memory(False)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def on_rank(scheme: Scheme, length: int, repeats: int, threads: int) -> dict[str, Any]:
    """Take a step whose memory is measured, then some more.

    Args:
        scheme: who, and on which ranks.
        length: tokens of the one sequence.
        repeats: how many more.
        threads: of this rank.

    Returns:
        `loss` of the first step; `peak`, bytes that it needed above what the process had before it; `tokens` of the
        sequence that this rank has; and of each step after the first, or of that where it is the only one: wall clock
        `seconds`, `cpu` seconds of this rank and those it `waited` for transfers.
    """
    torch.set_num_threads(threads)
    step_of(scheme, WARMING)[0]()
    step, mesh = step_of(scheme, length)
    if mesh:
        mesh.counts.take()
    before, seconds, cpu = settled(), [], []
    loss, peak = 0.0, 0
    for number in range(1 + repeats):
        if number == 1:
            seconds, cpu = [], []
            if mesh:
                mesh.counts.take()
        dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        found = step()
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - worked)
        if number == 0:
            loss, peak = found, resident("VmHWM") - before
            keeping_free_memory(True)
    waited = sum(tally.seconds for tally in mesh.counts.take().values()) / len(seconds) if mesh else None
    here = places(((length,),), length, mesh).shape[1] if mesh else length
    shared = scheme.layout.tp if scheme.layout.sp else 1
    return {"loss": loss, "peak": peak, "tokens": here // shared, "seconds": seconds, "cpu": cpu, "waited": waited}


def against(ours: Scheme, theirs: Scheme, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """Both in the same ranks, in turn: `losses` of the first step, and `rounds` of three times in seconds."""
    torch.set_num_threads(threads)
    a, b = step_of(ours, length)[0], step_of(theirs, length)[0]
    losses = a(), b()
    return {"losses": losses, "rounds": rank_steps.in_turn(a, b, rounds)}


def attention_seconds(documents: tuple[int, ...], rounds: int) -> float:
    """CPU seconds that this rank of a ring spends in attention's kernels, forward and backward: the least of some rounds.

    The thread's own time: what else the machine does, and what the rank waits for, is not in it.
    """
    torch.set_num_threads(1)
    layout = Parallel(ring=dist.get_world_size())
    model, _ = parallel.build(run_of(layout), grid.make(layout, torch_peers.CPU))
    here = sum(documents) // layout.ring
    q, k, v = (torch.randn(1, here, SHAPE.num_heads, SHAPE.head_dim, requires_grad=True) for _ in range(3))
    packing = Packing.of(torch.zeros(1, dtype=torch.int64), torch.zeros(1, here, dtype=torch.int64), (documents,))
    spent: list[float] = []

    def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun = time.thread_time()
            found = kernel(*args)
            spent[-1] += time.thread_time() - begun
            return found

        return run

    kernels = {name: timed(getattr(flash, name)) for name in ("attend", "attend_backward")}
    with mock.patch.multiple(flash, **kernels):
        for _ in range(1 + rounds):
            spent.append(0.0)
            model.seams.attend(q, k, v, packing, 0).sum().backward()
    return min(spent[1:])


def torchs_context_parallel() -> str:
    """What torch's own context parallelism has to say to attention on the CPU: the error, or nothing where it works."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers: list[Tensor] = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    with torch.no_grad(), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        try:
            F.scaled_dot_product_attention(*buffers, is_causal=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
