"""The example that docs/parallel.md works out by hand, against the formulas; ranks are held to these in test_traffic."""

import dataclasses
import re
from pathlib import Path

import pytest

from outlast.config import Data, Model, Parallel, Run, Train
from outlast.plan import memory, traffic

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
SHAPE = Model(vocab_size=16, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2)
LAYOUTS = {
    "`tp`": Parallel(tp=2),
    "`tp`, `sp`": Parallel(tp=2, sp=True),
    "`tp`, `sp`, `sp_regather`": Parallel(tp=2, sp=True, sp_regather=True),
}


def run(parallel, layers=1):
    shape = dataclasses.replace(SHAPE, num_layers=layers)
    return Run(
        model=shape,
        data=Data(sequence_length=8),
        train=Train(batch=1, micro_batch=1, dtype="float32"),
        parallel=parallel,
    )


def sent_over_tp(parallel, layers):
    """Bytes of the stream, without what norms and loss add: those that a second block adds."""
    ops = traffic.step(run(parallel, layers), [1], [7])
    # The partial gradients of the norms are the only all-reduce under sp; they are counted apart in the page.
    small = {("tp", "all_reduce")} if parallel.sp else set()
    return sum(one.bytes for (axis, op), one in ops.items() if axis == "tp" and (axis, op) not in small)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_a_block(name):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |") and line.endswith("B |"))
    together = int(re.search(r"(\d+) B \|$", row)[1])
    parallel = LAYOUTS[name]
    assert sent_over_tp(parallel, 2) - sent_over_tp(parallel, 1) == together


def test_bytes_around_the_blocks():
    for parallel in (LAYOUTS["`tp`"], LAYOUTS["`tp`, `sp`"]):
        block = sent_over_tp(parallel, 2) - sent_over_tp(parallel, 1)
        two_numbers = 7 * 8  # of each learned token, to the one other rank
        assert sent_over_tp(parallel, 1) - block - two_numbers == 2 * 128


def test_activations_of_a_block():
    row = next(line for line in PAGE.splitlines() if line.startswith("| 8 tokens, 4 B each |"))
    told = [int(number) for number in re.findall(r"(\d+) B \|", row.partition("each")[2])]
    kept = []
    for parallel in (Parallel(), *LAYOUTS.values()):
        one, two = (
            memory.activations(dataclasses.replace(SHAPE, num_layers=layers), "float32", 1, 8, parallel)
            for layers in (1, 2)
        )
        kept.append(two - one)
    assert kept == told


def test_the_columns_add_up():
    table = PAGE.partition("| kept | alone |")[2].partition("| together |")[0]
    rows = [line.split("|")[2:6] for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    sums = [sum(int(re.search(r"(\d+)\s*$", row[column].strip())[1]) for row in rows) for column in range(4)]
    together = next(line for line in PAGE.splitlines() if line.startswith("| together |"))
    assert sums == [int(number) for number in re.findall(r"\d+", together)]
