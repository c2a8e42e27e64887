"""A training step beside a busy process: threads that sleep while they wait against threads that spin.

Sleeping is how outlast sets them; by default the OpenMP runtime lets them spin for a while first.

Goals: beside the busy process sleeping takes at most three quarters of the time of spinning; alone, at most 1.0 of it or inside the
spread of sleeping against itself.

The runtime takes its policy from the environment when torch is loaded, so each has a process of its own, and the two
take steps in turn.

    python -m benchmarks.busy_core [--check] [--rounds N]
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import measure

GOALS = [
    "beside a busy process: sleeping / spinning at most 0.75",
    "alone: at most 1.0, or inside the spread of sleeping against itself",
]
THREADS = 2
STEP = f"""
import sys, torch
from outlast.config import Model
from outlast.model.transformer import Packing, Transformer
torch.set_num_threads({THREADS})
model = Transformer.on(torch.device("cpu"), Model(vocab_size=257), torch.float32, 0)
tokens = torch.randint(0, 257, (4, 512))
packing = Packing.of(torch.arange(4), torch.arange(512).repeat(4, 1), ((512,),) * 4)
for _ in sys.stdin:
    (model(tokens, tokens.roll(-1, 1), packing) / tokens.numel()).backward()
    print("done", flush=True)
"""


@contextmanager
def stepping(policy: dict[str, str]) -> Iterator[Callable[[], None]]:
    """A process that takes a step whenever called."""
    told = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | policy
    with subprocess.Popen([sys.executable, "-c", STEP], env=told, stdin=-1, stdout=-1, text=True) as process:

        def step() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        try:
            yield step
        finally:
            process.kill()


@contextmanager
def busy() -> Iterator[None]:
    """A process that does nothing, without pause."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    """Measure, print, save; with --check fail where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows, missed = [], []
    with stepping({"OMP_WAIT_POLICY": "PASSIVE"}) as sleeping, stepping({}) as spinning:
        alone = measure.paired(sleeping, spinning, options.rounds)
        with busy():
            beside = measure.paired(sleeping, spinning, options.rounds)
    for place, pair, met in (
        ("alone", alone, alone.meets(1.0)),
        ("beside a busy process", beside, beside.ratio <= 0.75),
    ):
        rows.append(row(place, pair))
        missed += [] if met else [f"{place}: {pair.ratio:.3f}"]
    measure.save("busy_core", GOALS, rows, threads=THREADS)
    print("missed: " + "; ".join(missed) if missed else "met: " + ", ".join(f"{one['ratio']:.3f}" for one in rows))
    sys.exit(bool(options.check and missed))


def row(place: str, pair: measure.Pair) -> dict[str, object]:
    """One line of the table."""
    return {
        "where": place,
        "sleeping s": pair.a_seconds,
        "spinning s": pair.b_seconds,
        "ratio": pair.ratio,
        "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
    }


if __name__ == "__main__":
    main()
