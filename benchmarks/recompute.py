"""What recomputation costs in time and saves in memory: a training step with it against one without, in one process.

Goals: the loss is the same bits. `full` takes at most 4/3 of the step without, which is what it is in matrix products: three
passes, forward and both backward ones, become four, less the last product of each block and the loss. `attention` takes
at most 1.1 of it where attention is not most of the step (the first two cases). Each or inside the spread.

A step is forward, loss, backward and clearing the gradients, in float32, dropout off, documents of unequal lengths. The
two are timed in turn, in one run, by the CPU seconds of the process, which has one thread: on a machine where others work a
clock on the wall tells of them.

    python -m benchmarks.recompute [--check] [--rounds N]
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import measure
from outlast import parallel
from outlast.config import Model, Run
from outlast.model.transformer import Packing
from outlast.parallel import mesh
from outlast.plan import memory

GOALS: Final = (
    "the same loss and gradients, to the bit",
    "full: at most 4/3 of the step without, or inside the spread",
    "attention: at most 1.1 of it where sequences are 1,024 tokens or shorter, or inside the spread",
)
THREADS: Final = 1
SHAPE: Final = replace(Model(), vocab_size=1024)
CASES: Final = {"4 x 256 tokens": (4, 256), "2 x 1,024 tokens": (2, 1024), "1 x 2,048 tokens": (1, 2048)}
AT_MOST: Final = {"attention": 1.1, "full": 4 / 3}


def step(kind: str, batch: int, length: int) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
    """A step's work, and its gradients: the first returns the loss, and leaves no gradient behind."""
    run = Run(model=SHAPE)
    run = replace(run, train=replace(run.train, recompute=kind, dtype="float32"))
    model, _ = parallel.build(run, mesh.make(run.parallel, torch.device("cpu")))
    model.train()
    tokens = torch.randint(0, SHAPE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    documents = (length // 2, length // 4, length // 4)
    places = torch.cat([torch.arange(n) for n in documents]).repeat(batch, 1)
    fed = (tokens, tokens.roll(-1, 1), Packing.of(torch.arange(batch), places, (documents,) * batch))

    def passes() -> Tensor:
        loss = model(*fed) / tokens.numel()
        loss.backward()
        return loss.detach()

    def work() -> Tensor:
        loss = passes()
        model.zero_grad(set_to_none=True)
        return loss

    def gradients() -> list[Tensor]:
        loss = passes()
        found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
        return found

    return work, gradients


def cpu_seconds(work: Callable[[], Tensor]) -> float:
    """CPU seconds of this process that some work takes."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Measure each case with each kind. Yields a row of each."""
    for name, (batch, length) in CASES.items():
        plain, expected = step("none", batch, length)
        fed = (SHAPE, "float32", batch, length)
        for kind, most in AT_MOST.items():
            again, found = step(kind, batch, length)
            same = all(torch.equal(a, b) for a, b in zip(found(), expected(), strict=True))
            times = [(cpu_seconds(again), cpu_seconds(plain), cpu_seconds(again)) for _ in range(rounds + 1)]
            pair = measure.pair(times[1:])
            held = kind == "full" or length <= 1024
            kept = memory.activations(*fed, recompute=kind, blocks=SHAPE.num_layers)
            yield {
                "step": name,
                "recompute": kind,
                "kept, MB": kept / 1e6,
                "a block again, MB": memory.again(*fed, Run().parallel, kind) / 1e6,
                "without, MB": memory.activations(*fed) / 1e6,
                "CPU s": pair.a_seconds,
                "without, CPU s": pair.b_seconds,
                "ratio": pair.ratio,
                "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
                "same bits": same,
                "met": same and (pair.meets(most) or not held),
            }


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figures on the last line."""
    parser = argparse.ArgumentParser(description="the time that recomputation takes, and the memory it saves")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    found = []
    for one in rows(options.rounds):
        found.append(one)
        print(f"{one['step']}, {one['recompute']}: {one['ratio']:.3f}", flush=True)
    measure.show("a step with recomputation, in one process: 4 layers x 256", found)
    measure.save("recompute", GOALS, found, threads=THREADS)
    ratios = ", ".join(f"{one['recompute']} {one['ratio']:.3f}" for one in found)
    missed = [one for one in found if not one["met"]]
    print(f"{f'{len(missed)} of {len(found)} missed' if missed else f'all {len(found)} met'}: {ratios}")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
