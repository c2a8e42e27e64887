"""Checkpoints: whole or invisible, found by order of commit, never loaded damaged."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from outlast.checkpoint import store
from outlast.checkpoint.shards import whole
from outlast.checkpoint.store import Store
from outlast.errors import OutlastError, StorageError


def tensors(value):
    return whole(
        {
            "model.a": torch.full((3, 5), float(value)),
            "optim.a.step": torch.tensor(float(value)),
            "b": torch.arange(4) + value,
        }
    )


def test_round_trip_bit_for_bit(tmp_path):
    kept = Store(tmp_path / "checkpoints", keep=3)
    assert kept.newest() is None
    odd = {
        "x": torch.tensor([0.1, -0.0, float("inf"), float("nan"), 1e-45]),
        "y": torch.randn(2, 3, dtype=torch.float64),
    }
    saved = kept.save(7, whole(odd), {"position": 42})
    assert kept.trim() == []
    assert (saved.step, saved.about) == (7, {"position": 42})
    assert kept.newest() == saved
    assert store.contents(saved) == {name: tensor.shape for name, tensor in odd.items()}
    into = {name: torch.zeros_like(tensor) for name, tensor in odd.items()}
    store.verify(saved)
    kept.load(saved, whole(into))
    assert all(into[name].numpy().tobytes() == odd[name].numpy().tobytes() for name in odd)


def test_newest_is_by_order_of_commit_and_the_last_are_kept(tmp_path):
    kept = Store(tmp_path, keep=2)
    for step in (1000, 5000):
        kept.save(step, tensors(step), {})
    # Rolled back to 3000: what was committed last counts, not the largest number.
    kept.save(3500, tensors(1), {})
    removed = kept.trim()
    assert kept.newest().step == 3500
    assert [old.step for old in removed] == [1000]
    assert [one.step for one in kept.all()] == [5000, 3500]
    again = kept.save(5000, tensors(2), {})
    assert kept.newest().path == again.path
    into = {"b": torch.zeros(4, dtype=torch.int64)}
    kept.load(again, whole(into))
    assert into["b"].tolist() == [2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00003500", "step-00005000"]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_found(tmp_path, harm):
    saved = Store(tmp_path, keep=2).save(1, tensors(1), {})
    for name in saved.files:
        file = saved.path / name
        good = file.read_bytes()
        if harm == "flip":
            file.write_bytes(good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :])
        elif harm == "cut":
            file.write_bytes(good[:-1])
        else:
            file.unlink()
        with pytest.raises(StorageError, match=f"damaged: {name}"):
            store.verify(saved)
        file.write_bytes(good)
    store.verify(saved)


@pytest.mark.parametrize("harm", [("8", "9"), ("{", ""), ('"commit"', '"comit"')])
def test_a_changed_manifest_is_found(tmp_path, harm):
    kept = Store(tmp_path, keep=2)
    manifest = kept.save(8, tensors(1), {"position": 8}).path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(*harm, 1))
    with pytest.raises(StorageError, match=r"checkpoint step-00000008 is damaged: manifest.json") as caught:
        kept.newest()
    assert "move its folder away" in caught.value.fix


def test_another_shape_or_name_is_refused(tmp_path):
    kept = Store(tmp_path, keep=2)
    saved = kept.save(1, tensors(1), {})
    with pytest.raises(OutlastError, match=r"model.a is \(3, 5\), wanted \(5, 3\)"):
        kept.load(saved, whole({"model.a": torch.zeros(5, 3)}))
    with pytest.raises(OutlastError, match="missing"):
        kept.load(saved, whole({"model.z": torch.zeros(5, 3)}))


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_killed_at_every_call_the_newest_whole_one_is_found(tmp_path, call):
    """SIGKILL at the n-th write, fsync or rename, for every n until a save gets through."""
    Store(tmp_path, keep=1).save(1, tensors(1), {})
    code = f"""
import os, signal, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint import filesystem
from outlast.checkpoint.shards import whole
from outlast.checkpoint.store import Store
left = int(sys.argv[1])
def deadly(function):
    def called(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return called
if {call!r} == "write":
    filesystem._write_item = deadly(filesystem._write_item)
else:
    setattr(os, {call!r}, deadly(getattr(os, {call!r})))
    Path.replace = deadly(Path.replace) if {call!r} == "rename" else Path.replace
while True:  # forked at each point, so that torch is loaded once
    point = int(sys.stdin.readline())
    child = os.fork()
    if child == 0:
        left = point
        kept = Store(Path({str(tmp_path)!r}), keep=1)
        kept.save(2, whole({{"b": torch.arange(4) + 2}}), {{}})
        kept.trim()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            for point in range(1, 60):
                process.stdin.write(f"{point}\n")
                process.stdin.flush()
                ended = int(process.stdout.readline())
                newest = Store(tmp_path, keep=1).newest()
                store.verify(newest)
                into = {"b": torch.zeros(4, dtype=torch.int64)}
                Store(tmp_path, keep=1).load(newest, whole(into))
                assert into["b"].tolist() == [newest.step + i for i in range(4)]
                if ended == 0:
                    assert newest.step == 2
                    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
                    break
                assert ended == -signal.SIGKILL
            else:
                pytest.fail("no save got through")
            assert point > 1
        finally:
            process.kill()


def test_a_full_disk_leaves_the_old_one_and_no_half(tmp_path, small_disk):
    kept = Store(small_disk / "checkpoints", keep=1)
    kept.save(1, whole({"x": torch.zeros(1000)}), {})
    with pytest.raises(StorageError, match="cannot write the checkpoint of step 2: No space left") as caught:
        kept.save(2, whole({"x": torch.zeros(2_000_000)}), {})
    assert "free some space" in caught.value.fix
    assert caught.value.exit_code == 70
    assert [path.name for path in kept.folder.iterdir()] == ["step-00000001"]
    store.verify(kept.newest())
    kept.save(3, whole({"x": torch.zeros(1000)}), {})
    assert [old.step for old in kept.trim()] == [1]
    assert kept.newest().step == 3


def test_a_failing_write_is_told_whatever_the_system_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        Store(tmp_path, keep=1).save(1, tensors(1), {})
    assert list(tmp_path.iterdir()) == []
