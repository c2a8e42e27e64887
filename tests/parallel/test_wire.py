"""Bytes counted against bytes that the kernel has sent, each rank in a network namespace of its own."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))

from benchmarks import hosts, wire  # noqa: E402

SMALL = {
    "model.hidden_size": 128, "model.intermediate_size": 256, "model.num_layers": 2, "model.num_heads": 2,
    "model.num_kv_heads": 2, "data.sequence_length": 128, "train.batch": 8, "train.micro_batch": 8,
}  # fmt: skip
"""A stream of 512 KiB: small enough to be quick, large against what gloo sends to get a transfer going."""


@pytest.fixture(scope="module")
def found():
    if why := hosts.reason_not_to():
        pytest.skip(why)
    return dict(zip((False, True), wire.measured(2, [{"tp": 2}, {"tp": 2, "sp": True}], SMALL, 2), strict=True))


@pytest.mark.parametrize("sp", [False, True])
def test_the_kernel_counts_what_we_do(found, sp):
    for one in found[sp]:
        assert one["equal"]
        assert one["counted"] == one["formula"]
        print(f"sp {sp}: {one}")
        assert 0.99 * one["counted"] <= one["payload"] <= 1.01 * one["counted"]


def test_sequence_parallelism_sends_as_many_bytes(found):
    # But for the gradients of norm weights, which each rank then has a summand of: 5 vectors of 128 numbers of 4 bytes,
    # once a step, of which each of two ranks sends as many bytes as there are.
    for plain, shared in zip(found[False], found[True], strict=True):
        assert shared["counted"] - plain["counted"] == 2 * 5 * 128 * 4


def test_nothing_is_left(found):
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"ol{os.getpid()}-" not in names


def test_nothing_is_left_when_it_is_killed(found):
    code = "import time; from benchmarks import hosts\nwith hosts.hosts(1) as name: print(name, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        name = process.stdout.readline().strip()
        guard = psutil.Process(process.pid).children()[0]
        there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        process.kill()
    guard.wait(20)  # not a child of ours: psutil looks till it has gone
    assert f"ol{name}-0" in there
    assert (
        f"ol{name}-" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )
