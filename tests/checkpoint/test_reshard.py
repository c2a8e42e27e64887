"""What one layout saved any other loads: full tensors and moments bit for bit, and the next step the same.

cases: torchtitan#1136: a vocabulary of 33, which 2 and 4 ranks split unevenly, saved under the one and loaded under the
other.
"""

import math
from pathlib import Path

import layouts
import one_step
import pytest
import torch
from layouts import Kept
from one_step import batch, run_of

from outlast.checkpoint.shards import Shard, whole
from outlast.checkpoint.store import Store, contents, verify
from outlast.errors import OutlastError
from outlast.places import Place
from outlast.train import start
from outlast.train.optimizer import Optimizer, clip

LAYOUTS = {
    "one process": {},
    "dp_shard 3": {"dp_shard": 3},
    "tp 2": {"tp": 2},
    "tp 4 + sp": {"tp": 4, "sp": True},
    "tp 2 + sp x dp_shard 2": {"tp": 2, "sp": True, "dp_shard": 2},
    "dp_replicate 2 x dp_shard 2": {"dp_replicate": 2, "dp_shard": 2},
    "ring 2 x ulysses 2, sharing weights": {"ring": 2, "ulysses": 2, "shard_sequence_ranks": True},
}


def work_of(step, data_ranks):
    """The same five sequences for any number of data ranks, masked unevenly, in the same number of passes for each."""
    every = [batch([range(step % 3, 8 - i)], first=10 * step + i) for i in range(5)]
    passes = math.ceil(5 / data_ranks)
    return [(every[rank::data_ranks] + [batch([])] * passes)[:passes] for rank in range(data_ranks)]


def opened(layout, optimizer):
    run = run_of(layout, optimizer)
    mesh, model, parts = one_step.spread(run)
    return run, mesh, model, parts, Optimizer(parts, run, mesh)


def step_of(step, run, mesh, model, parts, optimizer):
    one_step.gradients(run, mesh, model, parts, work_of(step, mesh.data_ranks))
    clip(parts, mesh, 1.0)
    optimizer.step(0.01)


def kept(parts, optimizer):
    return Kept(
        tensors={name: (shard.tensor.clone(), shard.place) for name, shard in start.tensors(parts, optimizer).items()}
    )


def saved(layout, optimizer, folder):
    """Take two steps and save. Returns what was saved, and what a third step makes of it."""
    there = opened(layout, optimizer)
    _, mesh, _, parts, optimizers = there
    for step in (1, 2):
        step_of(step, *there)
    before = kept(parts, optimizers)
    Store(folder, 1, mesh.axes.get("checkpoint")).save(2, start.tensors(parts, optimizers), {})
    step_of(3, *there)
    return before, kept(parts, optimizers)


def loaded(layout, optimizer, folders):
    """Load each checkpoint into a model of other weights. Returns what was loaded, and what the next step makes of it."""
    told = []
    for folder in folders:
        run, mesh, model, parts, optimizers = opened(layout, optimizer)
        with torch.no_grad():
            for part in parts:
                part.parameter.fill_(math.nan)
        store = Store(folder, 1, mesh.axes.get("checkpoint"))
        newest = store.newest()
        optimizers.make_room(contents(newest))
        store.load(newest, start.tensors(parts, optimizers))
        before = kept(parts, optimizers)
        step_of(3, run, mesh, model, parts, optimizers)
        told.append((before, kept(parts, optimizers)))
    return told


def on(ranks, layout, function, *args):
    """On a group of ranks, or in this process; each of the results put together from all ranks' parts."""
    n = layouts.ranks_of(layout)
    return ranks.run(n, function, layout, *args) if n > 1 else [function(layout, *args)]


@pytest.fixture(scope="module", params=["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def checkpoints(request, tmp_path_factory, ranks):
    """By layout: the folder it saved to, what it saved and what came next."""
    folder = tmp_path_factory.mktemp("saved")
    told = {}
    for name, layout in LAYOUTS.items():
        place = folder / name
        by_rank = on(ranks, layout, saved, request.param, place)
        told[name] = (place, *(layouts.put_together(list(one)) for one in zip(*by_rank, strict=True)))
    return request.param, told


def same(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.shape == other.tensors[name].shape
        assert tensor.numpy().tobytes() == other.tensors[name].numpy().tobytes(), name


@pytest.mark.parametrize("into", LAYOUTS)
def test_every_pair_of_layouts(ranks, checkpoints, into):
    optimizer, told = checkpoints
    by_rank = on(ranks, LAYOUTS[into], loaded, optimizer, [folder for folder, *_ in told.values()])
    worst = 0.0
    for (name, (_, before, after)), *results in zip(told.items(), *by_rank, strict=True):
        came, followed = (layouts.put_together(list(one)) for one in zip(*results, strict=True))
        same(came, before)
        moments = {kind.rsplit(".", 1)[1] for kind in came.tensors if kind.startswith("optim.")}
        assert moments == {"step", "exp_avg", "exp_avg_sq"} | ({"momentum"} if optimizer == "muon" else set())
        assert came.tensors["model.embed_tokens.weight"].shape == (33, 16)
        difference = max(layouts.furthest(followed, after).values())
        assert difference <= 1e-13, name
        worst = max(worst, difference)
        if name == into:
            same(followed, after)  # the same layout: the same bits
    print(f"{optimizer}, loaded under {into}: next step worst {worst:.1e}")


def told_of(work, *args):
    """What a rank says of work that should fail: the class of the error, and its words."""
    try:
        work(*args)
    except OutlastError as error:
        return type(error).__name__, error.what
    return None


def filling(folder: Path):
    """Rank 1 has more to write than there is room for, rank 0 next to nothing."""
    _, mesh, *_ = opened({"dp_shard": 2}, "adamw")
    store = Store(folder, 1, mesh.axes["checkpoint"])
    rows = [100, 1_000_000][mesh.rank]
    place = Place((1_000_100,), (0 if mesh.rank == 0 else 100,), (rows,))
    words = told_of(store.save, 2, {"x": Shard(torch.zeros(rows, dtype=torch.float64), place)}, {})
    mesh.largest(0)  # rank 0 has cleared up once it is here
    seen = sorted(path.name for path in folder.iterdir())
    small = Place((4,), (2 * mesh.rank,), (2,))
    store.save(3, {"x": Shard(torch.arange(2) + 2.0 * mesh.rank, small)}, {})
    return words, seen


def test_a_disk_full_for_one_rank_is_an_error_on_all(ranks, small_disk):
    folder = small_disk / "checkpoints"
    Store(folder, 1).save(1, whole({"x": torch.zeros(10)}), {})
    words = ("StorageError", "cannot write the checkpoint of step 2: No space left on device")
    assert ranks.run(2, filling, folder) == [(words, ["step-00000001"])] * 2
    newest = Store(folder, 1).newest()  # and the one after that is whole
    verify(newest)
    into = torch.zeros(4)
    Store(folder, 1).load(newest, whole({"x": into}))
    assert into.tolist() == [0, 1, 2, 3]


def loading(layout, folder):
    _, mesh, _, parts, optimizers = opened(layout, "adamw")
    store = Store(folder, 1, mesh.axes.get("checkpoint"))
    newest = store.newest()
    optimizers.make_room(contents(newest))
    return told_of(store.load, newest, start.tensors(parts, optimizers))


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp_shard": 3}], ids=str)
def test_a_damaged_file_is_found_whichever_rank_reads_it(ranks, tmp_path, layout):
    ranks.run(4, saved, LAYOUTS["tp 2 + sp x dp_shard 2"], "adamw", tmp_path)
    newest = Store(tmp_path, 1).newest()
    assert sorted(newest.files) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    assert on(ranks, layout, loading, tmp_path) == [None] * layouts.ranks_of(layout)
    for name in sorted(newest.files)[1:]:
        file = newest.path / name
        good = file.read_bytes()
        file.write_bytes(good[:-9] + bytes([good[-9] ^ 4]) + good[-8:])
        told = on(ranks, layout, loading, tmp_path)
        assert [kind for kind, _ in told] == ["StorageError"] * layouts.ranks_of(layout)
        assert all(words.startswith(f"checkpoint step-00000002 is damaged: {name} has") for _, words in told)
        file.write_bytes(good)
    (newest.path / "__3_0.distcp").unlink()
    assert on(ranks, layout, loading, tmp_path)[0][1].endswith("__3_0.distcp is missing")


def test_loading_does_not_ask_for_more_than_its_own_part(tmp_path):
    """A part that crosses the pieces of those who wrote it, and one that is empty."""
    store = Store(tmp_path, 1)
    whole_of = torch.arange(60.0).view(10, 6)
    store.save(1, {"x": Shard(whole_of, Place.all_of((10, 6)))}, {})
    for place in (Place((10, 6), (3, 2), (4, 3)), Place((10, 6), (10, 0), (0, 6)), Place((10, 6), (0, 5), (10, 1))):
        part = torch.full(place.shape, math.nan)
        store.load(store.newest(), {"x": Shard(part, place)})
        assert torch.equal(part, whole_of[place.slices])
