"""What benchmarks/long_context.py measures with: memory that is known, a power that is known, ranks that agree."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent.parent))

from benchmarks import long_context, long_steps
from outlast.config import Parallel
from outlast.plan import memory

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)


def holding(size):
    """The most that was resident while a tensor of so many bytes was, and then another."""
    before = long_steps.settled()
    for _ in range(2):
        torch.ones(size, dtype=torch.uint8)
    most = long_steps.resident("VmHWM") - before
    long_steps.keeping_free_memory(True)
    return most


def test_peak_memory_is_that_of_what_lives_at_once(ranks):
    [most] = ranks.run(1, holding, 64 << 20)
    assert abs(most - (64 << 20)) < 8 << 20  # pages of code that were not yet there are counted, too


def test_ranks_of_a_ring_take_the_step_of_one_process(ranks):
    alone = ranks.run(1, long_steps.on_rank, long_steps.Scheme(Parallel()), 1024, 0, 1)
    shared = ranks.run(2, long_steps.on_rank, long_steps.Scheme(Parallel(ring=2)), 1024, 0, 1)
    assert [one["tokens"] for one in shared] == [512, 512]
    assert abs(shared[0]["loss"] - alone[0]["loss"]) < 1e-5
    assert alone[0]["peak"] > memory.activations(long_steps.SHAPE, "float32", 1, 1024)


def test_torchs_context_parallelism_does_not_know_attention_on_the_cpu(ranks):
    assert "flash_attention_for_cpu" in ranks.run(2, long_steps.torchs_context_parallel)[0]


def test_a_power_is_found_again():
    slope, start = long_context.exponent([(x, 3 * x**1.5) for x in (1.0, 2.0, 5.0, 9.0)])
    assert abs(slope - 1.5) < 1e-12
    assert long_context.math.isclose(long_context.math.exp(start), 3)


def test_work_were_the_cut_contiguous():
    # One document of 8 on 4 ranks: 1+2, 3+4, 5+6, 7+8. Two of 4: 1+2, 3+4, 1+2, 3+4.
    assert long_context.contiguous((8,), 4) == [3, 7, 11, 15]
    assert long_context.contiguous((4, 4), 4) == [3, 7, 3, 7]
