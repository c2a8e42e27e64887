"""Each algorithm of each collective and the library's own, on hosts with links of a given rate; and which we would take.

Goals: our choice, made from the links measured there, is within 10 % of the fastest or inside the spread of the two, and
never more than 25 % slower than it.

Hosts are network namespaces of this machine, each with an interface of a rate in either direction (tc tbf). Ranks run at
real-time priority: they mostly wait for the links, and it is these that are to be seen, not what else the machine does.
Over gloo the library's all-gather, reduce-scatter and all-to-all are the direct ones: `library` stands for both.

    python -m benchmarks.algorithms --check          needs root and iproute2; five minutes or so
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks import hosts, measure
from outlast import links
from outlast.comm import algorithms
from outlast.comm.collectives import Axis, Counts
from outlast.comm.measure import measure as measure_links
from outlast.schedules import ALGORITHMS, schedule

GOALS: Final = (
    "the choice within 10 % of the fastest, or inside the interquartile spread",
    "the choice never more than 25 % slower than the fastest",
)
PLACES: Final = {
    "equal links": ([0, 1, 2, 3], [400, 400, 400, 400]),
    "one slow link": ([0, 1, 2, 3], [800, 800, 800, 200]),
    "2 ranks a host": ([0, 0, 1, 1], [400, 400]),
}
"""Host of each rank, and megabits a second of each host's interface."""
SIZES: Final = {1 << 10: (7, 10), 1 << 14: (7, 10), 1 << 18: (5, 3), 1 << 22: (3, 1), 1 << 26: (2, 1)}
"""Bytes of the whole: how many times it is timed, and how many in a row each time."""


def rank(place: str, ops: list[str], most: int) -> None:
    """Time everything as the rank that the environment says; the first prints what was seen."""
    torch.set_num_threads(1)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group")
    axis = Axis("world", group, Counts())
    begun = time.perf_counter()
    profile = measure_links(PLACES[place][0], {"world": axis}, torch.device("cpu"))
    took = time.perf_counter() - begun
    chosen = links.Choices(profile, profile.group(range(axis.size)), axis.rank)
    rows = []
    for op in ops:
        for size, (rounds, row) in SIZES.items():
            if size <= most:
                rows += timed(axis, op, size, rounds, row, chosen)
    if axis.rank == 0:
        print(json.dumps({"profile": links.dataclasses.asdict(profile), "seconds": took, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def ways(axis: Axis, op: str, size: int, chosen: links.Choices) -> dict[str, Callable[[], object]]:
    """Everything there is to do a collective by: the library's own, and each algorithm."""
    n, whole = axis.size, torch.ones(size // 4)
    parts, into = list(whole.chunk(n)), list(torch.empty(size // 4).chunk(n))
    library = {
        "all_reduce": lambda: axis.all_reduce(whole),
        "all_gather": lambda: axis.all_gather(parts[axis.rank], whole),
        "reduce_scatter": lambda: axis.reduce_scatter(whole, into[axis.rank]),
        "all_to_all": lambda: axis.all_to_all(parts, into),
    }
    found: dict[str, Callable[[], object]] = {"library": library[op]}
    for algorithm in ALGORITHMS[op]:
        if algorithm == "direct" and op != "all_reduce":
            continue  # what the library's is
        segments = links.best_segments(size, chosen.group, chosen.profile) if algorithm == "tree" else 1
        plan = schedule(op, algorithm, size, chosen.group, segments)
        if op == "all_to_all":
            found[algorithm] = functools.partial(algorithms.exchange, parts, into, plan, axis.rank, axis.group)
        elif op == "reduce_scatter":
            found[algorithm] = functools.partial(scattered, whole, into[axis.rank], plan, axis)
        else:
            found[algorithm] = functools.partial(algorithms.work, whole, plan, axis.rank, axis.group)
    return found


def scattered(whole: torch.Tensor, part: torch.Tensor, plan: Any, axis: Axis) -> None:
    """As Axis.reduce_scatter does it."""
    flat = whole.clone()
    algorithms.work(flat, plan, axis.rank, axis.group)
    part.copy_(flat.chunk(axis.size)[axis.rank])


def timed(axis: Axis, op: str, size: int, rounds: int, row: int, chosen: links.Choices) -> list[dict[str, Any]]:
    """Seconds of each way, one after the other in each round; of the slowest rank."""
    works, mark = ways(axis, op, size, chosen), torch.zeros(1)
    seen: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + (rounds > 2)):
        for name, work in works.items():
            dist.all_reduce(mark)
            begun = time.perf_counter()
            for _ in range(row):
                work()
            took = max(axis.gather_objects((time.perf_counter() - begun) / row))
            if number or rounds <= 2:  # the first goes untimed, but of those that take seconds
                seen[name].append(took)
    choice = chosen.of(op, size)
    found = []
    for name, all_of_it in seen.items():
        segments = links.best_segments(size, chosen.group, chosen.profile) if name == "tree" else 1
        told = links.seconds(op, name, size, chosen.group, chosen.profile, segments=segments)
        low, middle, high = statistics.quantiles(all_of_it, n=4, method="inclusive")
        found.append({"op": op, "bytes": size, "algorithm": name, "seconds": middle, "low": low, "high": high,
                      "predicted": told, "chosen": name == choice.algorithm, "segments": segments})  # fmt: skip
    if choice.algorithm == "direct" and "direct" not in seen:
        found[0]["chosen"] = True
    return found


def run(place: str, ops: list[str], most: int) -> dict[str, Any]:
    """Everything on one set of hosts."""
    where, rates = PLACES[place]
    with hosts.hosts(len(rates)) as name:
        for host, rate in enumerate(rates):
            hosts.shape(name, host, rate)
        words = ["benchmarks.algorithms", "--as-rank", place, "--ops", ",".join(ops), "--most", str(most)]
        return hosts.told_by_ranks(name, where, words, limit=900)[0]


def judged(place: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: all ways of one collective of one size."""
    best, library = min(rows, key=lambda one: one["seconds"]), rows[0]
    choice = next(one for one in rows if one["chosen"])
    ratio = choice["seconds"] / best["seconds"]
    told = {"links": place, "op": rows[0]["op"], "bytes": rows[0]["bytes"]}
    told |= {name: next((round(1000 * one["seconds"], 2) for one in rows if one["algorithm"] == name), "")
             for name in ("library", *ALGORITHMS["all_reduce"])}  # fmt: skip
    told["segments"] = max(one["segments"] for one in rows)
    told |= {"chosen": choice["algorithm"], "predicted ms": round(1000 * choice["predicted"], 2)}
    told |= {"over fastest": round(ratio, 3), "library over it": round(library["seconds"] / choice["seconds"], 3)}
    return told | {"met": ratio <= 1.1 or (ratio <= 1.25 and choice["low"] <= best["high"])}


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figure on the last line."""
    parser = argparse.ArgumentParser(description="collective algorithms on shaped links")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--detail", action="store_true", help="print every time beside what was predicted")
    parser.add_argument("--as-rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--places", default=",".join(PLACES), help="which links (default: all)")
    parser.add_argument("--ops", default=",".join(ALGORITHMS), help="which collectives (default: all)")
    parser.add_argument("--most", type=int, default=1 << 26, help="bytes of the largest (default: 64 MiB)")
    options = parser.parse_args()
    if options.as_rank:
        return rank(options.as_rank, options.ops.split(","), options.most)
    if why := hosts.reason_not_to():
        parser.error(why)
    rows, load = [], os.getloadavg()[0]
    for place in options.places.split(","):
        begun = time.perf_counter()
        told = run(place, options.ops.split(","), options.most)
        print(f"{place}: links measured in {told['seconds']:.1f} s, all in {time.perf_counter() - begun:.0f} s")
        print({name: value for name, value in told["profile"].items() if name != "hosts"})
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for one in told["rows"]:
            groups.setdefault((one["op"], one["bytes"]), []).append(one)
        if options.detail:
            for one in told["rows"]:
                print(
                    f"{one['op']:15}{one['bytes']:>10} {one['algorithm']:13} {1000 * one['seconds']:9.2f} [{1000 * one['low']:9.2f} {1000 * one['high']:9.2f}] predicted {1000 * one['predicted']:9.2f} {'*' if one['chosen'] else ''}"
                )
        rows += [judged(place, one) for one in groups.values()]
    measure.show("milliseconds of the slowest rank", rows)
    if list(ALGORITHMS) == options.ops.split(",") and len({one["links"] for one in rows}) == len(PLACES):
        measure.save("algorithms", (*GOALS, f"load of the machine at the start: {load:.1f}"), rows, ranks=4)
    missed = [one for one in rows if not one["met"]]
    worst = max(rows, key=lambda one: one["over fastest"])
    print(f"{len(rows) - len(missed)} of {len(rows)} met; at worst {worst['over fastest']} of the fastest "
          f"({worst['links']}, {worst['op']} of {worst['bytes']} bytes)")  # fmt: skip
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
