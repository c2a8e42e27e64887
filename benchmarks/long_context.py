"""Sequences of 4k to 131k tokens on 1, 2 and 4 ranks: memory a rank, speed, and how even the ranks' work is.

Goals:
  * under ring, Ulysses and both together peak memory grows as (tokens / ranks)^a with a from 0.9 to 1.1, up to 131,072
    tokens on 4 ranks for the first two;
  * on 4 ranks each of the three needs at most 0.35 of one process's peak, for the same 8k tokens or more;
  * at 131,072 tokens no rank's peak comes near a matrix of tokens x tokens, 64 GiB in float32, nor near the 4 GiB of one
    rank's tokens against another's: at most a tenth of the latter;
  * every rank has as many tokens as any other, and every loss equals one process's to 1e-4, peers' too;
  * causal work under the ring: the busiest rank at most 5 % above the mean for one document, 10 % for packed ones;
  * a step takes no longer than the peer's in the same ranks, or is inside the spread of ours against itself.

A step is forward, loss, backward, clipping and AdamW, in float32 on the CPU, on one sequence of one document, of a model
of one layer, 64 wide, with 4 heads and 4 key/value heads of 16 channels and a vocabulary of 128. A rank has
cores // ranks threads, at least one; 4 ranks on 2 cores take turns, and their seconds say little of 4 machines.

Peak memory: processes made anew for each line take a step of 256 tokens, which loads kernels and connections; then
another model is built, free memory is given back, and the resident set is read; then its first step is taken. The peak is
the most that was resident during that step (VmHWM, begun anew through /proc/self/clear_refs) less what was before it, on
the fullest rank. So weights are not in it; gradients and AdamW's moments are, which `state MB` (plan/memory.py) tells
together with weights. Beside it what the formula of plan/memory.py says is kept for the backward pass: the rest of the
peak is what passes work with.

Tokens/s: the median step after the first, on the slowest rank; of 131,072 tokens there is a first alone. `CPU s` is
processor time of all ranks together, which other load on the machine bears on little. `exposed s` is what a rank waits
for transfers, the mean of all ranks; where ranks outnumber cores, the others' turns are in it.

Peers: transformers' Llama (SDPA) in one process, torch's own tensor and sequence parallelism over ranks; and in the same
ranks, in turn, for the ratio of times at 8,192 tokens. torch's own context parallelism is tried, and what it says is kept:
it knows CUDA's attention kernels alone.

    python -m benchmarks.long_context [--check] [--upto TOKENS] [--rounds N] [--only steps|pairs|evenness]
"""

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks import long_steps, measure
from benchmarks.long_steps import SHAPE, Scheme
from outlast.config import Parallel
from outlast.parallel import zigzag
from outlast.plan import memory

LENGTHS: Final = (4096, 8192, 16384, 32768)
LONGEST: Final = 131072
PAIRED: Final = 8192
EVEN: Final = 16384
LIMIT_S: Final = 3600.0
ONE: Final = "one process"
SHARING: Final = ("ring", "ulysses", "ring x ulysses")
SCHEMES: Final = {
    (ONE, 1): Scheme(Parallel()),
    ("transformers", 1): Scheme(Parallel(), by="transformers"),
    ("ring", 2): Scheme(Parallel(ring=2)),
    ("ulysses", 2): Scheme(Parallel(ulysses=2)),
    ("tp + sp", 2): Scheme(Parallel(tp=2, sp=True)),
    ("tp + sp, regather", 2): Scheme(Parallel(tp=2, sp=True, sp_regather=True)),
    ("torch tp + sp", 2): Scheme(Parallel(tp=2, sp=True), by="torch"),
    ("ring", 4): Scheme(Parallel(ring=4)),
    ("ulysses", 4): Scheme(Parallel(ulysses=4)),
    ("ring x ulysses", 4): Scheme(Parallel(ring=2, ulysses=2)),
    ("tp + sp", 4): Scheme(Parallel(tp=4, sp=True)),
    ("tp + sp, regather", 4): Scheme(Parallel(tp=4, sp=True, sp_regather=True)),
    ("torch tp + sp", 4): Scheme(Parallel(tp=4, sp=True), by="torch"),
}
"""By name and ranks."""
PEERS: Final = {1: ("transformers", 1), 2: ("torch tp + sp", 2), 4: ("torch tp + sp", 4)}
GOALS: Final = {
    "steps": (
        "ring, ulysses, ring x ulysses on 4 ranks: at most 0.35 of one process's peak from 8,192 tokens on",
        "131,072 tokens: peak at most a tenth of 4 GiB, one rank's tokens against another's in float32 (all: 64 GiB)",
        "tokens equal on all ranks; losses of one process to 1e-4",
    ),
    "growth": ("ring, ulysses, ring x ulysses: exponent of peak memory in tokens / ranks from 0.9 to 1.1",),
    "pairs": ("median ratio ours / theirs at most 1.0, or inside the spread of ours against itself",),
    "evenness": ("work of the busiest rank over the mean: at most 1.05 for one document, 1.10 for packed ones",),
}

Row = dict[str, Any]


def threads(ranks: int) -> int:
    """Of each rank."""
    return max(1, int(measure.machine()["cores"]) // ranks)


def fresh(groups: Any, ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ranks that are made for it, and ended after it, return."""
    try:
        return groups.run(ranks, work, *args, limit=LIMIT_S)
    finally:
        groups.group(ranks).end()


def steps(groups: Any, upto: int) -> Iterator[Row]:
    """A row of each length and scheme."""
    cases = [(length, *key) for length in LENGTHS for key in SCHEMES]
    cases += [(LONGEST, "ring", 4), (LONGEST, "ulysses", 4)]
    alone: dict[int, tuple[float, float]] = {}  # of one process, by length: peak and loss
    for length, name, ranks in cases:
        if length > upto:
            continue
        scheme = SCHEMES[name, ranks]
        repeats = 0 if length == LONGEST else max(1, 4 * LENGTHS[0] // length)
        told = fresh(groups, ranks, long_steps.on_rank, scheme, length, repeats, threads(ranks))
        row = of_ranks(told, scheme, length)
        if name == ONE:
            alone[length] = row["peak MB"], row["loss"]
        peak, loss = alone.get(length, (math.nan, math.nan))
        told_of_one = {"of one process": row["peak MB"] / peak, "loss off": abs(row["loss"] - loss)}
        if length not in alone:
            told_of_one = dict.fromkeys(told_of_one, "")
        yield {"tokens": length, "scheme": name, "ranks": ranks, "threads": threads(ranks)} | row | told_of_one


def of_ranks(told: Sequence[Row], scheme: Scheme, length: int) -> Row:
    """What the ranks tell of a scheme, as one row."""
    peak = max(one["peak"] for one in told)
    kept = memory.activations(SHAPE, "float32", 1, length, scheme.layout)
    state = memory.state(SHAPE, "float32", "adamw", scheme.layout)
    seconds = statistics.median(map(max, zip(*(one["seconds"] for one in told), strict=True)))
    tokens = sorted({one["tokens"] for one in told})
    ours = scheme.by == "ours"
    return {
        "tokens a rank": tokens[0] if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}",
        "peak MB": peak / 1e6,
        "kept, formula MB": kept / 1e6 if ours else "",
        "peak / kept": peak / kept if ours else "",
        "state MB": state.total / 1e6,
        "tokens/s": length / seconds,
        "CPU s": statistics.median(map(sum, zip(*(one["cpu"] for one in told), strict=True))),
        "exposed s": statistics.fmean(one["waited"] for one in told) if ours else "",
        "loss": told[0]["loss"],
    }


def fits(rows: Sequence[Row]) -> Iterator[Row]:
    """How each scheme's peak memory grows with the tokens a rank has: a line through the logarithms, all ranks together."""
    for name in dict.fromkeys(row["scheme"] for row in rows):
        points = [(row["tokens"] / row["ranks"], row["peak MB"]) for row in rows if row["scheme"] == name]
        if len({tokens for tokens, _ in points}) < 3:
            continue
        slope, start = exponent(points)
        off = max(abs(peak / (math.exp(start) * tokens**slope) - 1) for tokens, peak in points)
        yield {
            "scheme": name,
            "points": len(points),
            "tokens / ranks": f"{min(points)[0]:.0f} to {max(points)[0]:.0f}",
            "exponent": slope,
            "farthest from the line, %": 100 * off,
            "bytes a token, most": 1e6 * max(points)[1] / max(points)[0],
        }


def exponent(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of log y over log x, by least squares."""
    x, y = ([math.log(one) for one in axis] for axis in zip(*points, strict=True))
    return tuple(statistics.linear_regression(x, y))


def pairs(groups: Any, rounds: int, length: int) -> Iterator[Row]:
    """Each of our schemes against the peer in the same ranks."""
    for (name, ranks), scheme in SCHEMES.items():
        if scheme.by != "ours":
            continue
        theirs = SCHEMES[PEERS[ranks]]
        told = fresh(groups, ranks, long_steps.against, scheme, theirs, length, rounds, threads(ranks))
        pair = long_steps.rank_steps.of_slowest([one["rounds"] for one in told])
        a, b = told[0]["losses"]
        yield {
            "scheme": name,
            "ranks": ranks,
            "threads": threads(ranks),
            "against": PEERS[ranks][0],
            "ours, tokens/s": length / pair.a_seconds,
            "theirs, tokens/s": length / pair.b_seconds,
            "ratio of times": pair.ratio,
            "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
            "losses off": abs(a - b),
            "met": pair.meets(1.0),
        }
    said = fresh(groups, 2, long_steps.torchs_context_parallel)[0]
    empty = dict.fromkeys(
        ("threads", "ours, tokens/s", "theirs, tokens/s", "ratio of times", "A/A spread", "losses off"), ""
    )
    yield (
        {"scheme": "", "ranks": 2, "threads": "", "against": f"torch context_parallel: {said or 'works'}"}
        | empty
        | {"met": ""}
    )


def packings(length: int) -> dict[str, tuple[int, ...]]:
    """Documents of a sequence, by what they are like; those by chance from seed 0."""
    chance = random.Random(0)
    cuts = sorted(chance.sample(range(1, length), 11))
    many = sorted(chance.sample(range(1, length), 99))
    return {
        "one document": (length,),
        "12 documents by chance": tuple(b - a for a, b in itertools.pairwise((0, *cuts, length))),
        "100 documents by chance": tuple(b - a for a, b in itertools.pairwise((0, *many, length))),
        "half of it one, 64 short": (length // 2, *(length // 128,) * 64),
    }


def contiguous(documents: Sequence[int], ranks: int) -> list[int]:
    """Pairs of a query and a key that it sees, for each rank, were each given the next S/R tokens."""
    seen = [place + 1 for length in documents for place in range(length)]
    each = len(seen) // ranks
    return [sum(seen[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def evenness(groups: Any, length: int, ranks: int = 4) -> Iterator[Row]:
    """Work and seconds of attention on each rank of a ring, for each packing."""

    def uneven(shares: Sequence[float]) -> float:
        return max(shares) / statistics.fmean(shares)

    for name, documents in packings(length).items():
        work = zigzag.work(documents, ranks)
        seconds = groups.run(ranks, long_steps.attention_seconds, documents, 3, limit=LIMIT_S)
        yield {
            "documents": name,
            "work, millions of pairs a rank": ", ".join(f"{one / 1e6:.2f}" for one in work),
            "busiest / mean": uneven(work),
            "were the cut contiguous": uneven(contiguous(documents, ranks)),
            "attention, CPU s a rank": ", ".join(f"{one:.3f}" for one in seconds),
            "slowest / mean": uneven(seconds),
        }


def missed(steps: Sequence[Row], growth: Sequence[Row], pairs: Sequence[Row], evenness: Sequence[Row]) -> Iterator[str]:
    """A sentence for each goal that is."""
    for row in steps:
        yield from (f"{row['scheme']}, {row['ranks']} ranks, {row['tokens']} tokens: {what}" for what in missed_by(row))
    for row in growth:
        if row["scheme"] in SHARING and not 0.9 <= row["exponent"] <= 1.1:
            yield f"{row['scheme']}: exponent {row['exponent']:.3f}"
    for row in pairs:
        what = f"{row['scheme']}, {row['ranks']} ranks, against {row['against']}"
        if row["met"] is False:
            yield f"{what}: {row['ratio of times']:.3f} of its time"
        if row["losses off"] != "" and not row["losses off"] <= 1e-4:
            yield f"{what}: losses off by {row['losses off']:.2e}"
    for row in evenness:
        if row["busiest / mean"] > (1.05 if row["documents"] == "one document" else 1.10):
            yield f"{row['documents']}: busiest rank {row['busiest / mean']:.3f} of the mean"


def missed_by(row: Row) -> Iterator[str]:
    """What a step falls short of."""
    if isinstance(row["tokens a rank"], str):
        yield f"{row['tokens a rank']} tokens a rank"
    if row["tokens"] == LONGEST and not row["peak MB"] * 1e6 <= (LONGEST // row["ranks"]) ** 2 * 4 / 10:
        yield f"peak {row['peak MB']:.0f} MB"
    if row["of one process"] == "":
        return
    if not row["loss off"] <= 1e-4:
        yield f"loss off by {row['loss off']:.2e}"
    if row["scheme"] in SHARING and row["ranks"] == 4 and row["tokens"] >= 8192 and not row["of one process"] <= 0.35:
        yield f"{row['of one process']:.3f} of one process's peak"


def shown(rows: Iterator[Row], title: str) -> list[Row]:
    """The rows, each told as it comes, then all as a table."""
    found = []
    for row in rows:
        print(
            ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()), flush=True
        )
        found.append(row)
    if found:
        measure.show(title, found)
    return found


def main() -> None:
    """Measure, print, save what was measured in full; with --check exit 1 where a goal is missed, the sentences last."""
    parser = argparse.ArgumentParser(description="long sequences: memory, speed and evenness")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument(
        "--upto", type=int, default=LONGEST, help="longest sequence; below the default nothing is saved"
    )
    parser.add_argument("--rounds", type=int, default=15, help="against the peers")
    parser.add_argument("--only", choices=("steps", "pairs", "evenness"), default="", help="one part of it")
    options = parser.parse_args()
    begun, upto, whole = time.perf_counter(), options.upto, options.upto >= LONGEST
    found: dict[str, list[Row]] = {"steps": [], "growth": [], "pairs": [], "evenness": []}
    with measure.worker_groups() as groups:
        if options.only in ("", "evenness"):
            found["evenness"] = shown(evenness(groups, min(EVEN, upto)), f"a ring of 4, {min(EVEN, upto)} tokens")
        if options.only in ("", "pairs"):
            found["pairs"] = shown(pairs(groups, options.rounds, min(PAIRED, upto)), "steps in turn, in the same ranks")
        if options.only in ("", "steps"):
            found["steps"] = shown(steps(groups, upto), "a step on one sequence, in processes of its own")
            found["growth"] = shown(fits(found["steps"]), "peak memory as a power of tokens / ranks")
    for name, rows in found.items():
        if rows and whole:
            told = "long_context" if name == "steps" else f"long_context_{name}"
            measure.save(told, GOALS[name], rows, threads=1 if name == "evenness" else threads(1), ranks=4)
    sentences = list(missed(**found))
    print(f"{time.perf_counter() - begun:.0f} s in all, load {os.getloadavg()[0]:.1f} at the end")
    print("missed: " + "; ".join(sentences) if sentences else "all goals met")
    sys.exit(bool(options.check and sentences))


if __name__ == "__main__":
    main()
