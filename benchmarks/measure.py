"""What the benchmarks share: two ways of doing a thing timed side by side, the machine told, results shown and kept.

Run a benchmark from the repository's root as a module, `python -m benchmarks.lru_cache`: run as a file, it would take
any file beside it for the module of the standard library that has its name.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Pair:
    """What `paired` measured.

    Args:
        a_seconds: median time of one run of a.
        b_seconds: of b.
        ratio: median over the rounds of a's time over b's; below 1, a is faster.
        spread: between two runs of a in the same round, as ratios: the middle half of them, from low to high.
        rounds: how many there were.
    """

    a_seconds: float
    b_seconds: float
    ratio: float
    spread: tuple[float, float]
    rounds: int

    def meets(self, goal: float) -> bool:
        """Whether the ratio is at most the goal, or above it by no more than the spread."""
        return self.ratio <= goal * max(1.0, self.spread[1])


def machine() -> dict[str, str | int]:
    """CPU model and number of cores this process may run on."""
    told = Path("/proc/cpuinfo")  # of Linux only
    facts = told.read_text(encoding="utf-8") if told.exists() else ""
    models = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": models[0] if models else platform.processor() or platform.machine(), "cores": cores}


def paired(a: Callable[[], object], b: Callable[[], object], rounds: int) -> Pair:
    """Time a against b in rounds of a, b, a, so that what else the machine does falls on both.

    A round's ratio takes the mean of its two runs of a, which lie on either side of b: a machine that steadily
    slows down or speeds up then favours neither. One round goes before, untimed.

    Args:
        a: does its whole work when called, a millisecond's or more, waits for any accelerator, and can be called again.
        b: the same.
        rounds: at least 2; the spread means little below 15.
    """
    return pair([(_seconds(a), _seconds(b), _seconds(a)) for _ in range(rounds + 1)][1:])


def pair(rounds: Sequence[tuple[float, float, float]]) -> Pair:
    """What rounds of a, b, a come to, timed by whoever could; the untimed one left out. Arguments as of :func:`paired`."""
    first, other, second = zip(*rounds, strict=True)
    ratios = [(x + z) / (2 * y) for x, y, z in zip(first, other, second, strict=True)]
    low, _, high = statistics.quantiles((z / x for x, z in zip(first, second, strict=True)), n=4, method="inclusive")
    median = statistics.median
    return Pair(median(first + second), median(other), median(ratios), (low, high), len(rounds))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def worker_groups() -> Iterator[Any]:
    """Groups of ranks by their size, as the tests have them (tests/ranks.py): `groups.run(2, function, *args)`.

    The function must be of a module's top level. Each rank has one thread.
    """
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from ranks import Ranks

    with Ranks() as groups:
        yield groups


def show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows as a table, a column a key; floats with three significant digits."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
        table.add_row(*map(Text, cells))  # as Text, since rich reads [words in brackets] in a string as markup
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def save(
    name: str, goals: Sequence[str], rows: Sequence[Mapping[str, object]], *, threads: int = 1, ranks: int = 1
) -> Path:
    """Write benchmarks/results/<name>.json: what was run, where, when, the goals as sentences, and the rows.

    Args:
        name: the benchmark's.
        goals: what was to be reached.
        rows: one measurement each, the units in the keys.
        threads: how many the measured work used; of each rank, where it had several.
        ranks: processes that worked together, the most of any row.
    """
    record = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "threads": threads,
        "ranks": ranks,
        "goals": list(goals),
        "rows": [dict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
