"""How much of the transfers is still waited for when they travel under the products, on links as slow as the compute.

Each rank trains on a host of its own (benchmarks/hosts.py), a thread each, its link shaped by the kernel (tc, tbf). A
step is taken in three ways in turn: transfers waited for where they are called; overlapped; and with a stand-in for the
collectives that moves nothing. Exposed is a step's time less that of the last. The rate is set in the run, so that the
transfers of a step take as long as its computation, and then half as long.

Goal: exposed, overlapped over waited for, at most 25 %.

Beside it, in the same unit: `ideal`, had all of the transfers run under all of the compute, max(compute, transfers) less
compute; and `bound`, what products cannot hide since each transfer runs only under the products that it belongs to:
what it takes longer than they do, where it has none all of it, and of one that is sent the first piece's product. It is
worked out from the products' times, measured in the same run.

TP+SP is measured in the fastest number of pieces; `same bits` says which a run takes that is not told, since it changes no bit.

On a busy machine the three ways do not meet the same machine: a row that is better than its ideal, or in which nothing
was overlapped, is told to be not sound, and misses.

Needs root and Linux. Ranks beyond the cores compute slower, and the rate is set by that.

    python -m benchmarks.exposed_communication [--check] [--rounds N] [--only WORD]
"""

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import hosts, measure, rank_steps
from outlast import parallel
from outlast.comm.collectives import Axis, InFlight, Works
from outlast.config import Model, Parallel, Run, replaced
from outlast.data.batches import MicroBatch
from outlast.parallel import chosen_pieces, flash, gradients
from outlast.parallel import mesh as grid
from outlast.parallel.inputs import inputs
from outlast.train.optimizer import Optimizer, clip

GOAL: Final = 0.25
GOALS: Final = (f"exposed seconds, overlapped over waited for, at most {GOAL}",)
WIDE: Final = Model(
    vocab_size=512, hidden_size=1024, intermediate_size=3072, num_layers=6, num_heads=16, num_kv_heads=8, head_dim=128
)
"""The widths of Qwen3-0.6B (huggingface.co/Qwen/Qwen3-0.6B, config.json)."""

NARROW: Final = Model(
    vocab_size=512, hidden_size=256, intermediate_size=704, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64
)
LONG: Final = Model(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64
)
"""Much work for few bytes: what moves a byte between hosts that are processes of one machine is its processors, which then
do not compute. So the links must be slow, for that to be a small part of a transfer."""

SHARES: Final = (1.0, 0.5)
"""How long a step's transfers take, of its computation."""

RATE: Final = "tc qdisc replace dev eth0 root tbf rate {rate}bit burst {burst} latency 500ms"


class AtOnce(Axis):
    """An axis whose transfers are waited for where they are called, whatever could be done under them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.freely = False

    def all_gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """As the axis does it over gloo."""
        self.freely = True
        whole, self.freely = super().all_gather(part, out), False
        return whole

    def reduce_scatter(self, whole: Tensor, out: Tensor | None = None) -> Tensor:
        """As the axis does it over gloo."""
        self.freely = True
        part, self.freely = super().reduce_scatter(whole, out), False
        return part

    def shift(self, tensors: Sequence[Tensor], into: Sequence[Tensor], by: int = 1) -> InFlight:
        """As the axis does it, over when it returns."""
        flight = super().shift(tensors, into, by)
        flight.wait()
        return flight


class Still(AtOnce):
    """A stand-in that moves nothing: every rank takes what it has for what it would get."""

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """As if the others had nothing to add."""
        return x

    def all_gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The rank's own part so many times."""
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:])) if out is None else out
        whole.view(self.size, *part.shape).copy_(part.expand(self.size, *part.shape).clone())
        return whole

    def reduce_scatter(self, whole: Tensor, out: Tensor | None = None) -> Tensor:
        """The rank's own summand."""
        mine = whole.view(self.size, -1, *whole.shape[1:])[self.rank]
        return mine.clone() if out is None else out.copy_(mine)

    def shift(self, tensors: Sequence[Tensor], into: Sequence[Tensor], by: int = 1) -> InFlight:
        """What the rank has itself."""
        for one, other in zip(tensors, into, strict=True):
            other.copy_(one)
        return InFlight(self, "shift", (), tensors[0].device, ())

    def post(self, outward: Any, inward: Any) -> Works:
        """Nothing."""
        return [], []


@dataclass(frozen=True)
class Scheme:
    """A way to share a run, and how to have its transfers waited for.

    Attributes:
        axis: whose transfers are looked at.
        knobs: of [parallel]; the axis has as many ranks as there are hosts.
        waited: knobs that differ where transfers are waited for.
        shape: of the model.
        tokens: in a sequence.
        bound: exposed seconds at the least, from the run, the seconds of a step's transfers, and those of its products.
    """

    axis: str
    knobs: dict[str, Any]
    waited: dict[str, Any]
    shape: Model
    tokens: int
    bound: Callable[[Run, float, dict[str, float]], float]
    sequences: Callable[[int], int] = field(default=lambda _: 1)


def tensor_parallel_bound(run: Run, transfers: float, products: dict[str, float]) -> float:
    """What the products do not hide, in seconds of a step: the transfers are all of one size."""
    layers, pieces = run.model.num_layers, run.parallel.overlap
    one = transfers / (8 * layers + 4)
    exposed = 4 * one  # of the embedding and the loss, which have no product of their own
    for name in ("attention in", "feed-forward in"):
        forward = products[name]
        exposed += layers * (max(0, one - forward) + max(0, one - 2 * forward) + forward / pieces)
    for name in ("attention out", "feed-forward out"):
        forward = products[name]
        own = forward / run.parallel.tp  # of the weight's gradient, this rank's stretch alone
        exposed += layers * (max(0, one - forward) + forward / pieces + max(0, one - forward - own))
    return exposed


def sharded_bound(run: Run, transfers: float, products: dict[str, float]) -> float:
    """The first block's weights forward and backward, and the last block's gradients: a third of the transfers each."""
    return transfers / run.model.num_layers


def ring_bound(run: Run, transfers: float, products: dict[str, float]) -> float:
    """What blocks of attention do not hide of the keys and values that pass by, and of their gradients.

    Backward half of a rank's own block hides the first keys, the other half the last gradients.
    """
    layers, steps, forward = run.model.num_layers, run.parallel.ring - 1, products["attention"]
    one, backward = transfers / (layers * steps * 3), 2.5 * forward
    ends, between = 2 * max(0, one - backward / 2), max(0, 2 * one - backward)
    return layers * (steps * max(0, one - forward) + ends + (steps - 1) * between)


SCHEMES: Final = {
    "TP+SP": Scheme("tp", {"sp": True}, {"overlap": 1}, WIDE, 512, tensor_parallel_bound),
    "FSDP": Scheme("dp_shard", {}, {}, NARROW, 1024, sharded_bound, sequences=lambda ranks: 4 * ranks),
    "ring": Scheme("ring", {}, {}, LONG, 8192, ring_bound),
}


def step_of(run: Run, mesh: grid.Mesh, sequences: int) -> Callable[[], float]:
    """A training step as train/loop.py takes it, on made-up tokens. Calling it returns the loss."""
    model, parts = parallel.build(run, mesh)
    optimizer = Optimizer(parts, run, mesh)
    length = run.data.sequence_length
    tokens, targets = rank_steps.batch_of(run.model, sequences, length)
    each = sequences // mesh.data_ranks
    mine = slice(mesh.data_rank * each, (mesh.data_rank + 1) * each)
    arrays = (torch.arange(sequences)[mine], tokens[mine], targets[mine], torch.arange(length).repeat(each, 1))
    one = MicroBatch(*(x.numpy() for x in arrays), ((length,),) * each)
    model.train()

    def step() -> float:
        loss = model(*inputs(one, mesh))
        (loss / (sequences * length)).backward()
        gradients.complete(parts, mesh)
        clip(parts, mesh, 1.0)
        optimizer.step(1e-5)
        return mesh.sum(loss.detach().double(), alike=("tp",)).item() / (sequences * length)

    return step


def products_of(run: Run, rows: int) -> dict[str, float]:
    """Seconds of each of a block's four products, and of one attention, forward, on this rank while the others do it too."""
    shape, tp = run.model, run.parallel.tp
    d, k, f = shape.hidden_size, shape.head_dim, shape.intermediate_size // tp
    q, kv = shape.num_heads // tp * k, max(1, shape.num_kv_heads // tp) * k
    widths = {"attention in": (d, q + 2 * kv), "attention out": (q, d), "feed-forward in": (d, 2 * f)}
    widths["feed-forward out"] = (f, d)
    found = {}
    for name, (i, o) in widths.items():
        x, weight = torch.randn(rows, i), torch.randn(o, i)
        dist.barrier()
        found[name] = statistics.median(_seconds(lambda x=x, weight=weight: x @ weight.T) for _ in range(9))
    here = rows // run.parallel.ring  # of which each meets half of the keys that come by
    x = torch.randn(1, here, shape.num_heads, k)
    dist.barrier()
    attend = functools.partial(flash.attend, x, x[:, : here // 2], x[:, : here // 2], False)
    found["attention"] = statistics.median(_seconds(attend) for _ in range(5))
    return found


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def shaped(rate: float) -> None:
    """Let this host send so many bits a second."""
    burst = max(1 << 17, int(rate / 8 / 200))  # what goes in a timer's tick
    subprocess.run(RATE.format(rate=int(rate), burst=burst).split(), check=True)


def on_host(name: str, rounds: int) -> list[dict[str, Any]] | None:
    """Measure a scheme as one of its ranks. The first returns what came of it, a row for each of SHARES."""
    scheme, ranks = SCHEMES[name], dist.get_world_size()
    run = replaced(Run(model=scheme.shape, parallel=Parallel()), {f"parallel.{scheme.axis}": ranks})
    run = replaced(run, {f"parallel.{key}": value for key, value in scheme.knobs.items()})
    knobs = {"train.dtype": "float32", "data.sequence_length": scheme.tokens, "train.batch": scheme.sequences(ranks)}
    run, waited = replaced(run, knobs), {f"parallel.{key}": value for key, value in scheme.waited.items()}
    mesh, sequences = grid.make(run.parallel, torch.device("cpu")), scheme.sequences(ranks)

    def other(kind: type[Axis]) -> grid.Mesh:
        axes = {axis: kind(one.name, one.group, mesh.counts) for axis, one in mesh.axes.items()}
        return replace(mesh, axes=axes, parallel=replaced(run, waited).parallel)

    ways = {
        "still": step_of(replaced(run, waited), other(Still), sequences),
        "waited": step_of(replaced(run, waited), other(AtOnce), sequences),
    }
    losses = {way: step() for way, step in ways.items() if way != "still"}
    computing = statistics.median(_together(ways["still"]) for _ in range(5))
    mesh.counts.take()
    _together(ways["waited"])
    sent = sum(tally.bytes for (axis, _), tally in mesh.counts.take().items() if axis == scheme.axis)
    found, rate = [], 8 * sent / computing
    for share in SHARES:
        rate = _slow_link(ways["waited"], computing, share, rate)
        taken = chosen_pieces.chosen(run, mesh, held_out=0)
        fastest = min(mesh.pieces, key=mesh.pieces.__getitem__, default=taken)
        overlapping = replaced(run, {"parallel.overlap": fastest})
        ways["overlapped"] = step_of(overlapping, replace(mesh, parallel=overlapping.parallel), sequences)
        losses["overlapped"] = ways["overlapped"]()
        if not math.isclose(losses["waited"], losses["overlapped"], rel_tol=0 if fastest == taken else 1e-6):
            raise AssertionError(f"overlapping changes the loss: {losses}")
        steps = [{way: _together(step) for way, step in ways.items()} for _ in range(rounds)]
        seconds = {way: statistics.median(one[way] for one in steps) for way in ways}
        products = products_of(run, scheme.tokens * sequences // mesh.data_ranks)
        bound = scheme.bound(overlapping, seconds["waited"] - seconds["still"], products)
        told = {"scheme": name, "hosts": ranks, "Mbit/s": rate / 1e6, "MB sent a step": sent / 1e6}
        found.append(told | {"same bits": taken or "-"} | _row(fastest, seconds, bound))
    mesh.leave()
    return None if mesh.rank else found


def _slow_link(step: Callable[[], object], computing: float, share: float, rate: float) -> float:
    """Find the bits a second, from a guess, at which a step's transfers take a share of its computation, and set them."""
    for _ in range(3):  # what else a transfer costs is the machine's time, not the link's: the rate makes up for it
        shaped(rate)
        transfers = statistics.median(_together(step) for _ in range(3)) / computing - 1
        rate *= min(3.0, max(0.5, transfers / share))
    shaped(rate)
    return rate


def _row(pieces: int, seconds: dict[str, float], bound: float) -> dict[str, Any]:
    still = seconds["still"]
    transfers, hidden = seconds["waited"] - still, seconds["overlapped"] - still
    ideal = max(still, transfers) - still
    sound = (
        pieces != 1 and hidden >= 0.9 * ideal
    )  # else another process's doing and not ours, or nothing was overlapped
    return {
        "pieces": pieces or "-",
        "compute s": still,
        "waited for s": seconds["waited"],
        "overlapped s": seconds["overlapped"],
        "exposed, waited s": transfers,
        "exposed, overlapped s": hidden,
        "ideal s": ideal,
        "bound s": bound,
        "overlapped / waited": hidden / transfers,
        "bound / waited": bound / transfers,
        "sound": sound,
        "met": sound and hidden / transfers <= GOAL,
    }


def _together(step: Callable[[], object]) -> float:
    """Seconds of a step that all ranks begin together, on the slowest."""
    dist.barrier()
    mine = torch.tensor(_seconds(step), dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def as_rank(name: str, rounds: int) -> None:
    """What a host runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps(on_host(name, rounds)))


def rows(rounds: int, only: str) -> Iterator[dict[str, Any]]:
    """Measure every scheme on 2 and on 4 hosts. Raises RuntimeError where a rank fails."""
    for ranks in (2, 4):
        for name in SCHEMES:
            if only not in f"{name}, {ranks} hosts":
                continue
            with hosts.hosts(ranks) as network:
                words = ["benchmarks.exposed_communication", "--as-rank", name, str(rounds)]
                yield from hosts.told_by_ranks(network, range(ranks), words, limit=500)[0]


def main() -> None:
    """Measure, print and write; with --check exit 1 where the goal is missed, the figures on the last line."""
    if sys.argv[1:2] == ["--as-rank"]:
        return as_rank(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description="exposed communication, overlapped over waited for")
    parser.add_argument("--check", action="store_true", help="exit 1 where the goal is missed")
    parser.add_argument("--rounds", type=int, default=7, help="of the three ways in turn (default: 7)")
    parser.add_argument("--only", default="", help="only those whose `SCHEME, N hosts` has this in it; nothing is kept")
    options = parser.parse_args()
    if why := hosts.reason_not_to():
        parser.error(why)
    found = []
    for row in rows(options.rounds, options.only):
        found.append(row)
        told = f"{row['scheme']}, {row['hosts']} hosts, {row['exposed, waited s'] / row['compute s']:.2f} times the compute"
        print(f"{told}: {row['overlapped / waited']:.2f}, bound {row['bound / waited']:.2f}", flush=True)
    if not found:
        parser.error(f"nothing has {options.only!r} in it")
    measure.show("seconds of a step that transfers add", found)
    if not options.only:
        measure.save("exposed_communication", GOALS, found, ranks=4)
    missed = [row for row in found if not row["met"]]
    figures = ", ".join(f"{row['scheme']} on {row['hosts']} {row['overlapped / waited']:.0%}" for row in found)
    print(f"{len(missed)} of {len(found)} missed: {figures}" if missed else f"all {len(found)} met: {figures}")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
