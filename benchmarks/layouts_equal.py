"""Every layout against one process, in float64: five steps of training, everything there is to compare.

Goal: loss, gradient norm (2 and infinity) and each tensor's ‖a − b‖ / ‖b‖, over every gradient of every step, weight
and moment, at most 1e-9 of one process. Expected is 1e-13: rounding alone.

Each run has clipping, dropout, packed documents, masks that differ from rank to rank, query and key norms, biases, a
vocabulary of 257 that divides by nothing, and micro-batches of two. AdamW as runs have it, and plain SGD, since Adam
hides a gradient of the wrong scale.

    python -m benchmarks.layouts_equal [--check] [--only WORD]
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import measure

GOAL: Final = 1e-9
GOALS: Final = ("largest relative difference of anything at most 1e-9",)
OPTIMIZERS: Final = {"AdamW": "", "SGD": "sgd", "Muon": ""}
EIGHT: Final = {"train__batch": 8}
VARIANTS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "8 sequences": ((), EIGHT),
    "one key/value head": (
        ("tp 2", "tp 2 + sp", "tp 4", "tp 4 + sp", "ulysses 2", "ulysses 4", "ring 2 x ulysses 2"),
        {"model__num_kv_heads": 1, **EIGHT},
    ),
    "output of its own": (
        ("tp 2 + sp", "dp_shard 2", "tp 2 + sp x dp_shard 2", "ring 2 x ulysses 2, sharing weights"),
        {"model__tie_embeddings": False},
    ),
    "64 sequences": (("tp 2 + sp, regather x dp_shard 3",), {"train__batch": 64}),
    "2 sequences": (("dp_shard 3", "dp_replicate 2 x dp_shard 2"), {"train__batch": 2}),
    "documents run on": (("ring 2", "ring 4", "ulysses 2", "ring 2 x tp 2 + sp"), {"data__attend_across": True}),
    "Muon": (
        ("tp 2 + sp", "dp_shard 3", "tp 2 x dp_shard 2", "ring 2 x ulysses 2, sharing weights"),
        {"optim__name": "muon"},
    ),
}
"""What is trained: under which layouts of tests/layouts.py (none: all), and the knobs that differ from there."""


def compared(groups: Any, folder: Path, only: str) -> Iterator[dict[str, Any]]:
    """Train each variant alone and under its layouts. Yields a row of each layout: the worse of its optimizers."""
    import layouts

    runs = itertools.count()

    def train(layout: dict[str, Any], knobs: dict[str, Any], optimizer: str) -> Any:
        words = layouts.words(folder, layout, str(next(runs)), **knobs)
        return layouts.put_together(
            groups.run(layouts.ranks_of(layout), layouts.on_rank, words, OPTIMIZERS[optimizer], limit=300)
        )

    for variant, (names, knobs) in VARIANTS.items():
        chosen = [name for name in names or layouts.LAYOUTS if only in f"{variant}: {name}"]
        optimizers = ["Muon"] if variant == "Muon" else ["AdamW", "SGD"]
        alone = {which: train({}, knobs, which) for which in optimizers if chosen}
        for name in chosen:
            found = [layouts.furthest(train(layouts.LAYOUTS[name], knobs, which), alone[which]) for which in optimizers]
            worse = {what: max(one[what] for one in found) for what in found[0]}
            yield row(name, variant, ", ".join(optimizers), layouts.ranks_of(layouts.LAYOUTS[name]), worse)


def row(layout: str, variant: str, optimizers: str, ranks: int, found: dict[str, float]) -> dict[str, Any]:
    """One line of the table."""
    differences = {
        "loss": max(found["loss"], found["held_out"]),
        "2-norm": found["norm"],
        "largest gradient": found["largest"],
        "gradients": found["gradient"],
        "weights": found["model"],
        "moments": found["optim"],
        "worst": max(found.values()),
    }
    rounded = {what: float(f"{difference:.1e}") for what, difference in differences.items()}
    return {"layout": layout, "trained": variant, "by": optimizers, "ranks": ranks} | rounded


def main() -> None:
    """Measure, print and write; with --check exit 1 where the goal is missed, the figure on the last line."""
    parser = argparse.ArgumentParser(description="every layout against one process")
    parser.add_argument("--check", action="store_true", help="exit 1 where the goal is missed")
    parser.add_argument("--only", default="", help="only those whose `trained: layout` has this in it; nothing is kept")
    options = parser.parse_args()
    with measure.worker_groups() as groups, tempfile.TemporaryDirectory() as folder:
        rows = []
        for one in compared(groups, Path(folder), options.only):
            rows.append(one)
            print(f"{one['trained']}: {one['layout']}: {one['worst']:.1e}", flush=True)
    if not rows:
        parser.error(f"nothing has {options.only!r} in it")
    measure.show("largest relative difference from one process", rows)
    if not options.only:
        measure.save("layouts_equal", GOALS, rows, ranks=max(row["ranks"] for row in rows))
    worst = max(rows, key=lambda row: row["worst"])
    missed = [row for row in rows if not row["worst"] <= GOAL]
    verdict = f"{len(missed)} of {len(rows)} missed" if missed else f"all {len(rows)} met"
    print(f"{verdict}; worst {worst['worst']:.1e} ({worst['trained']}: {worst['layout']})")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
