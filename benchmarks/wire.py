"""What the kernel counts on each rank's network interface, against what we count and what the formulas say.

Each rank trains in a network namespace of its own, joined to the others by a bridge: whatever it sends leaves through
one interface. Bytes and packets of that interface are read at the end of the first step and of the last, so that what
lies between is steps and nothing else. Packets are as on a wire, 1500 bytes at most (the kernel is told not to pass on
larger ones), each with 66 bytes of headers: Ethernet 14, IPv4 20, TCP 32 with its time stamps. Pure acknowledgements
are packets of headers alone, and go off with the rest. So does what TCP has sent twice: on a busy machine an
acknowledgement is late, and a packet that was not lost is taken for lost.

Goals: on every rank counted equals formula to the byte; and the kernel's bytes, headers taken off, are within 1 % of it.

Needs root and Linux. Its namespaces are gone when it is, however it ends.

    python -m benchmarks.wire [--check] [--steps N]
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import hosts, measure
from outlast import cli, config, environment
from outlast.plan import traffic
from outlast.train import loop, start
from outlast.train.watchers import Watcher

GOALS: Final = (
    "counted equals formula, to the byte, on every rank",
    "the kernel's bytes, less headers and what TCP sent twice, within 1 % of counted, on every rank",
)
HEADERS: Final = 66
SEGMENT: Final = 1500 - (HEADERS - 14)
"""Bytes in a full packet."""
LAYOUTS: Final = {
    2: {
        "tp 2": {"tp": 2},
        "tp 2 + sp": {"tp": 2, "sp": True},
        "tp 2 + sp, regather": {"tp": 2, "sp": True, "sp_regather": True},
        "dp_shard 2": {"dp_shard": 2},
        "dp_replicate 2": {"dp_replicate": 2},
    },
    4: {"tp 2 + sp x dp_shard 2": {"tp": 2, "sp": True, "dp_shard": 2}},
}
"""By how many ranks they are for."""

LARGE: Final = {"data.sequence_length": 256, "train.batch": 8, "train.micro_batch": 8}
"""Training of the default model: 2 MiB of residual stream in a pass, 13 MB of weights."""


class Look(Watcher):
    """Watcher: keeps what the kernel has counted by the end of each step, and what we and the formulas count in it."""

    def __init__(self, training: start.Training) -> None:
        self.training = training
        self.seen: list[dict[str, int]] = []
        self.formula: dict[tuple[str, str], traffic.Traffic] = {}

    def batch(self, step: int, work: Any) -> None:
        """Work out the step's transfers."""
        sequences, learned = [len(one.positions_B) for one in work.batches], [one.learned for one in work.batches]
        self.formula = traffic.step(self.training.run, sequences, learned, self.training.mesh.rank, step)

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Keep what they came to."""
        counted = {name: int(number or 0) for name, number in numbers.items() if name.endswith((".bytes", ".calls"))}
        said = {f"comm.{axis}.{op}.bytes": one.bytes for (axis, op), one in self.formula.items()}
        said |= {f"comm.{axis}.{op}.calls": one.calls for (axis, op), one in self.formula.items()}
        kernel, packets, again = hosts.sent_by_kernel()
        self.seen.append(
            {
                "kernel": kernel,
                "packets": packets,
                "again": again,
                "counted": sum(number for name, number in counted.items() if name.endswith(".bytes")),
                "calls": sum(number for name, number in counted.items() if name.endswith(".calls")),
                "formula": traffic.total(self.formula),
                "equal": counted == said,
            }
        )


def rank(runs: Sequence[Sequence[str]]) -> None:
    """Train one run after the other as the rank that the environment says, and print what was seen of each."""
    seen, launched = [], environment.launched()
    for number, words in enumerate(runs):
        os.environ["MASTER_PORT"] = str(29500 + number)  # the one before may not be free yet
        command, _ = cli.read_run(cli.TrainCommand, list(words), "train")
        run = config.Run(**{field.name: getattr(command, field.name) for field in dataclasses.fields(config.Run)})
        training = start.open_run(start.settle(run, launched=launched), launched)
        look = Look(training)
        loop.train(training, [look])
        training.close("done", 0)
        training.mesh.leave()
        seen.append(look.seen)
    print(json.dumps(seen))


def words_of(layout: Mapping[str, Any], knobs: Mapping[str, Any], steps: int, folder: Path, name: str) -> list[str]:
    """The arguments of `outlast train` for a run under a layout; knobs dotted, over those here."""
    every = {
        "data.sources": corpus(folder), "data.cache": folder / "cache", "data.tokenizer": "bytes", "folder": folder / name,
        "train.steps": steps + 1, "train.dtype": "float32", "train.threads": 1, "train.device": "cpu",
        "schedule.warmup": 1, "eval.samples": 0,
    } | dict(knobs) | {f"parallel.{key}": value for key, value in layout.items()}  # fmt: skip
    told = ((f"--{key.replace('_', '-')}", value) for key, value in every.items() if value is not False)
    return [flag if value is True else f"{flag}={value}" for flag, value in told]


def measured(
    ranks: int, layouts: Sequence[Mapping[str, Any]], knobs: Mapping[str, Any], steps: int
) -> list[list[dict[str, int]]]:
    """Train under one layout after the other, each rank on a host of its own.

    Args:
        ranks: how many the layouts are for.
        layouts: knobs of [parallel].
        knobs: others, dotted.
        steps: to look at; one goes before.

    Returns:
        For each layout and rank what was sent in these steps, and whether counted always equalled formula, by operation.

    Raises:
        RuntimeError: a rank failed; with what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(ranks, counted=True) as name:
        runs = [words_of(one, knobs, steps, Path(folder), f"run{i}") for i, one in enumerate(layouts)]
        seen = hosts.told_by_ranks(name, range(ranks), ["benchmarks.wire", "--as-rank", json.dumps(runs)], limit=300)
    return [[between(one[number]) for one in seen] for number in range(len(layouts))]


def between(seen: list[dict[str, int]]) -> dict[str, int]:
    """A rank's sums from the end of the first step to that of the last."""
    first, rest = seen[0], seen[1:]
    found = {name: rest[-1][name] - first[name] for name in ("kernel", "packets", "again")}
    found |= {name: sum(one[name] for one in rest) for name in ("counted", "calls", "formula")}
    found["payload"] = found["kernel"] - HEADERS * found["packets"] - SEGMENT * found["again"]
    return found | {"equal": all(one["equal"] for one in rest)}


def corpus(folder: Path) -> Path:
    """A text of 200,000 letters or so."""
    path = folder / "texts" / "words.txt"
    if not path.exists():
        path.parent.mkdir()
        draw = random.Random(0)
        lines = (" ".join("".join(draw.choices("abcdefgh", k=6)) for _ in range(12)) for _ in range(2400))
        path.write_text("\n".join(lines))
    return path


def row(name: str, steps: int, found: list[dict[str, int]]) -> dict[str, Any]:
    """One line of the table: bytes of a step, summed over the ranks; what is judged, of the worst rank."""
    counted, calls = (sum(one[what] for one in found) for what in ("counted", "calls"))
    payload = sum(one["payload"] for one in found)
    off = max(abs(one["payload"] / one["counted"] - 1) for one in found)
    return {
        "layout": name,
        "ranks": len(found),
        "counted bytes a step": counted // steps,
        "formula": sum(one["formula"] for one in found) // steps,
        "kernel": sum(one["kernel"] for one in found) // steps,
        "less headers and repeats": payload // steps,
        "repeats": sum(one["again"] for one in found),
        "transfers a step": calls // steps,
        "more a transfer, bytes": round((payload - counted) / calls, 1),
        "counted = formula": all(one["equal"] and one["counted"] == one["formula"] for one in found),
        "kernel off by %, worst rank": round(100 * off, 3),
        "met": all(one["equal"] and one["counted"] == one["formula"] for one in found) and off <= 0.01,
    }


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figure on the last line."""
    if sys.argv[1:2] == ["--as-rank"]:
        return rank(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description="bytes on the wire against those counted")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--steps", type=int, default=4, help="steps looked at (default: 4)")
    options = parser.parse_args()
    if why := hosts.reason_not_to():
        parser.error(why)
    rows = []
    for ranks, chosen in LAYOUTS.items():
        found = measured(ranks, list(chosen.values()), LARGE, options.steps)
        rows += [row(name, options.steps, one) for name, one in zip(chosen, found, strict=True)]
    measure.show("bytes sent in a step, all ranks together", rows)
    measure.save("wire", GOALS, rows, ranks=max(one["ranks"] for one in rows))
    missed = [one for one in rows if not one["met"]]
    worst = max(missed or rows, key=lambda one: one["kernel off by %, worst rank"])
    verdict = f"{len(missed)} of {len(rows)} missed" if missed else f"all {len(rows)} met"
    print(f"{verdict}; kernel off by {worst['kernel off by %, worst rank']} % at worst ({worst['layout']})")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
