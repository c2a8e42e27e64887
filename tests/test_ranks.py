"""Worker groups: answers in rank order, and what a failure, a death and a hang look like."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks, mesh, once

HERE = Path(__file__).parent


def summed(x, scale=1.0):
    y = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return dist.get_rank(), y, y[:1].to(torch.bfloat16), torch.get_num_threads(), os.getpid()


def fails_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.all_reduce(torch.ones(4))


def waits_for_rank_0_in_a_collective():
    if dist.get_rank():
        dist.all_reduce(torch.ones(4))
    else:
        signal.pause()


def stops_rank_1():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))


def dies(by):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), by)
    dist.all_reduce(torch.ones(4))


def warns():
    warnings.warn("torch.jit is old", DeprecationWarning, stacklevel=1)  # ignored, as by pytest
    warnings.warn("beware", UserWarning, stacklevel=1)


def leaves_a_collective_unmatched():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def leaves_without_process_group():
    dist.destroy_process_group()
    return os.getpid()


def over_columns():
    grid = mesh(row=2, column=2)
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=grid.get_group("column"))
    return x.item(), id(grid), once(os.getpid)


def test_answers_come_in_rank_order_and_tensors_are_copied(ranks):
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)[:, 1]
    for rank, y, bf16, threads, _ in answered(ranks.run(3, summed, x, scale=2.0), 3):
        assert torch.equal(y, x * 12)
        assert not y.is_shared()
        assert (bf16.dtype, bf16.shape) == (torch.bfloat16, (1,))
        assert threads == 1, rank


def answered(results, n):
    assert [result[0] for result in results] == list(range(n))
    return results


def test_groups_are_kept_and_live_side_by_side(ranks):
    begin = time.perf_counter()
    ranks.run(2, summed, torch.ones(2))
    first = time.perf_counter() - begin
    pids = {n: [result[-1] for result in ranks.run(n, summed, torch.ones(2))] for n in (2, 3)}
    assert not set(pids[2]) & set(pids[3])
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        assert [result[-1] for result in ranks.run(2, summed, torch.ones(2))] == pids[2]
        times.append(time.perf_counter() - begin)
    parents = {psutil.Process(pid).ppid() for pid in pids[2] + pids[3]}
    assert [psutil.Process(pid).num_threads() for pid in parents] == [1]  # one template, fit to fork
    print(f"first {first:.3f} s, warm {sorted(times)[10] * 1000:.1f} ms")
    assert min(times) < 0.05


def test_meshes_are_made_once(ranks):
    first, again = ranks.run(4, over_columns), ranks.run(4, over_columns)
    assert [result[0] for result in first] == [1, 1, 5, 5]
    assert first == again


def test_the_first_cause_is_told_first_and_the_group_is_started_anew(ranks):
    with pytest.raises(RankError) as error:
        ranks.run(3, fails_on, 1)
    text = str(error.value)
    assert text.splitlines()[:2] == ["test_ranks:fails_on on 3 ranks", "rank 1 raised"]
    assert text.index("ValueError: rank 1 has had enough") < text.index("RuntimeError")
    assert 'raise ValueError(f"rank' in text
    assert len(ranks.run(3, summed, torch.ones(1))) == 3


def test_a_hang_shows_the_stacks(ranks):
    with pytest.raises(RankError) as error:
        ranks.run(2, waits_for_rank_0_in_a_collective, limit=1.5)
    zero, one = str(error.value).split("rank 1 had not answered after 1.5 s")
    assert "rank 0 had not answered" in zero
    assert "in waits_for_rank_0_in_a_collective" in zero
    assert "in waits_for_rank_0_in_a_collective" in one
    assert "in all_reduce" in one
    assert ranks.group(2).pids == []


def test_a_stopped_rank_cannot_show_its_stacks(ranks):
    with pytest.raises(RankError, match=r"rank 1 had not answered after 1.5 s\nit is stopped"):
        ranks.run(2, stops_rank_1, limit=1.5)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_before_those_who_miss_it(ranks, by):
    with pytest.raises(RankError) as error:
        ranks.run(3, dies, by)
    assert str(error.value).splitlines()[1] == f"rank 1 was ended by {by.name} without a word"
    assert ("Segmentation fault" in str(error.value)) == (by == signal.SIGSEGV)


def test_a_rank_that_died_between_calls_is_told(ranks):
    ranks.run(2, summed, torch.ones(1))
    os.kill(ranks.group(2).pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 was ended by SIGKILL"):
        ranks.run(2, summed, torch.ones(1))


def test_warnings_are_errors(ranks):
    with pytest.raises(RankError, match=r"rank 0, 1 raised\n(.*\n)*UserWarning: beware"):
        ranks.run(2, warns)


def test_unmatched_collectives_are_found_where_they_were_left(ranks):
    with pytest.raises(RankError, match="leaves_a_collective_unmatched"):
        ranks.run(2, leaves_a_collective_unmatched, limit=1)


def test_a_group_without_process_group_is_started_anew(ranks):
    pids = ranks.run(2, leaves_without_process_group)
    assert not set(pids) & {result[-1] for result in ranks.run(2, summed, torch.ones(1))}


@pytest.mark.slow
def test_a_killed_template_takes_its_ranks_along_and_is_replaced():
    with Ranks() as own:
        pids = [result[-1] for result in own.run(2, summed, torch.ones(1))]
        processes = [psutil.Process(pid) for pid in pids]
        processes[0].parent().kill()
        assert psutil.wait_procs(processes, timeout=10)[1] == []
        with pytest.raises(RankError, match="template ended with -9"):
            own.run(2, summed, torch.ones(1))
        assert len(own.run(2, summed, torch.ones(1))) == 2


def test_a_function_must_be_importable(ranks):
    with pytest.raises(TypeError, match="top level"):
        ranks.run(2, lambda: 0)


INNER = """
import os
import signal
import pytest
from ranks import Ranks

@pytest.fixture(scope="session")
def ranks():
    with Ranks() as groups:
        yield groups

def sleeps():
    os.write(1, b"asleep\\n")  # in one piece: two ranks write to the same pipe
    signal.pause()

def test(ranks):
    ranks.run(2, sleeps)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_nothing_outlives_the_session(tmp_path, by):
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-qsp", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    with subprocess.Popen(
        [*command, tmp_path], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(HERE)}
    ) as session:
        try:
            for _ in range(2):
                line = session.stdout.readline()
                while line and "asleep" not in line:
                    line = session.stdout.readline()
                assert line
        finally:
            session.send_signal(by)
        begin = time.perf_counter()
        session.stdout.read()  # ends when the last process that could write there has
        print(f"all gone after {time.perf_counter() - begin:.2f} s")
