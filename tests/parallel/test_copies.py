"""Copies that send less than all of their gradients: what they end with, what they owe, and that a checkpoint keeps it."""

import dataclasses
import math

import layouts
import one_step
import pytest
import torch
from one_step import batch, run_of

from outlast.checkpoint.store import Store, contents
from outlast.parallel.agreement import replicas_equal_shards_different
from outlast.plan import memory
from outlast.train import start
from outlast.train.optimizer import Optimizer, clip

HYBRID = {"dp_replicate": 2, "dp_shard": 2}
WITH_TP = {"dp_replicate": 2, "tp": 2}
EXACT_STEPS = 3


def compressed(layout, kind, **knobs):
    run = run_of(layout)
    told = {"dp_compress": kind, "dp_topk": 0.1, "dp_exact_steps": EXACT_STEPS} | knobs
    return dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **told))


def work_of(step, data_ranks):
    """The same twelve sequences for 2 and for 4 data ranks, masked unevenly."""
    every = [batch([range(step % 3, 8 - i % 5)], first=20 * step + i) for i in range(12)]
    return [every[rank::data_ranks] for rank in range(data_ranks)]


class Taken:
    """A run taken step by step, as train/loop.py does."""

    def __init__(self, run):
        self.run = run
        self.mesh, self.model, self.parts = one_step.spread(run)
        self.optimizer = Optimizer(self.parts, run, self.mesh)
        self.norms = []

    def step(self, number, largest=1.0):
        copies = self.optimizer.copies
        work = work_of(number, self.mesh.data_ranks)
        one_step.gradients(self.run, self.mesh, self.model, self.parts, work, copies.sums(number))
        self.norms.append(clip(self.parts, self.mesh, largest, apart=copies.apart(number)))
        self.optimizer.step(0.01, number)

    def tensors(self):
        return {
            name: (shard.tensor.clone(), shard.place)
            for name, shard in start.tensors(self.parts, self.optimizer).items()
        }

    def save(self, step, folder):
        Store(folder, 1, self.mesh.axes.get("checkpoint")).save(step, start.tensors(self.parts, self.optimizer), {})

    def load(self, folder):
        with torch.no_grad():
            for part in self.parts:
                part.parameter.fill_(math.nan)
        store = Store(folder, 1, self.mesh.axes.get("checkpoint"))
        self.optimizer.make_room(contents(store.newest()))
        store.load(store.newest(), start.tensors(self.parts, self.optimizer))
        self.optimizer.copies.settle()


def whole(by_rank):
    """The whole tensors from all ranks' parts; those that several have must be the same bits."""
    return layouts.put_together([layouts.Kept(tensors=one) for one in by_rank]).tensors


def after(run, steps):
    taken = Taken(run)
    for number in range(1, steps + 1):
        taken.step(number)
    replicas_equal_shards_different(taken.parts, taken.mesh)  # the check at every start holds
    return taken.tensors(), taken.norms


def weights_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("owed.")}


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, HYBRID, WITH_TP], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "topk", "onebit"])
def test_copies_stay_equal_and_owe_what_they_did_not_send(ranks, kind, layout):
    run = compressed(layout, kind)
    tensors, norms = zip(*ranks.run(layouts.ranks_of(layout), after, run, 6), strict=True)
    for rank, one in enumerate(tensors):
        here = sum(tensor.nbytes for name, (tensor, _) in one.items() if name.startswith("owed."))
        assert memory.state(run.model, "float64", "adamw", run.parallel, rank).owed == here
    assert all(one == norms[0] for one in norms)
    found = whole(tensors)  # replicas that differed in a bit would raise
    owed = {name: tensor for name, tensor in found.items() if name.startswith(f"owed.{kind}.")}
    of_owners = [name for name in found if name.startswith("owed.owner.")]
    names = [name.removeprefix("model.") for name in found if name.startswith("model.")]
    assert len(owed) == (0 if kind == "bf16" else len(names))
    assert len(of_owners) == (len(names) if kind == "onebit" else 0)
    for name, tensor in owed.items():
        assert tensor.shape == (2, *found["model." + name.removeprefix(f"owed.{kind}.")].shape)
        assert not torch.equal(tensor[0], tensor[1]), name


def test_all_of_it_by_top_k_is_the_exact_sum(ranks):
    exact, _ = zip(*ranks.run(4, after, run_of(HYBRID), 4), strict=True)
    all_sent, _ = zip(*ranks.run(4, after, compressed(HYBRID, "topk", dp_topk=1.0), 4), strict=True)
    one, other = whole(exact), whole(all_sent)
    for name, tensor in one.items():
        assert (other[name] - tensor).norm() <= 1e-13 * tensor.norm(), name
    assert all(not tensor.any() for name, tensor in other.items() if name.startswith("owed."))


def test_rounding_alone_is_what_bf16_changes(ranks):
    run = compressed({"dp_replicate": 2}, "bf16")
    exact, norms = zip(*ranks.run(2, after, run_of({"dp_replicate": 2}), 1), strict=True)
    rounded, others = zip(*ranks.run(2, after, run, 1), strict=True)
    one, other = (whole(tensors)["optim.layers.1.mlp.up_proj.weight.exp_avg"] for tensors in (exact, rounded))
    assert 1e-6 < ((one - other).norm() / one.norm()).item() < 2**-7
    assert norms[0] != others[0]


def test_exact_steps_of_1_bit_are_adamws_to_the_bit(ranks):
    exact, norms = zip(*ranks.run(2, after, run_of({"dp_replicate": 2}), EXACT_STEPS), strict=True)
    ours, told = zip(*ranks.run(2, after, compressed({"dp_replicate": 2}, "onebit"), EXACT_STEPS), strict=True)
    found = whole(ours)
    same(weights_of(found), whole(exact))
    assert norms == told
    assert not any(tensor.any() for name, tensor in found.items() if name.startswith("owed."))


def by_hand(run):
    """On a rank: a compressed step, and the same worked out from all copies' gradients by another way of writing it."""
    taken = Taken(run)
    for number in range(1, EXACT_STEPS + 1):
        taken.step(number)
    optim, told = run.optim, {}
    adamw = taken.optimizer.optimizers[0]
    for number in (EXACT_STEPS + 1, EXACT_STEPS + 2):
        before = {part.name: part.parameter.detach().clone() for part in taken.parts}
        kept = {part.name: {k: v.clone() for k, v in adamw.state[part.parameter].items()} for part in taken.parts}
        copies = taken.optimizer.copies
        owed = {name: one.clone() for name, one in copies.owed.items()}
        of_owner = {name: one.clone() for name, one in copies.owed_by_owner.items()}
        work = work_of(number, 2)
        one_step.gradients(run, taken.mesh, taken.model, taken.parts, work, copies.sums(number))
        norm = clip(taken.parts, taken.mesh, 1.0, apart=True)
        grads = {part.name: part.parameter.grad.clone() for part in taken.parts}
        taken.optimizer.step(0.01, number)
        every = taken.mesh.world.gather_objects((owed, of_owner, grads))
        squares = sum((2 * g).square().sum() for _, _, some in every for g in some.values()) / 2
        told[f"clip {number}"] = (norm, min(1.0, 1.0 / (norm + 1e-6)), squares.sqrt().item())
        for part in taken.parts:
            name, state = part.name, kept[part.name]
            unit = (state["exp_avg_sq"] / (1 - optim.beta2**EXACT_STEPS)).sqrt() + optim.eps
            copies_hold = [
                o[name][0] + optim.beta1 * state["exp_avg"] + (1 - optim.beta1) * 2 * g[name] for o, _, g in every
            ]
            half = -(-part.parameter.shape[0] // 2)
            result = []
            for owner, rows in enumerate((slice(0, half), slice(half, None))):
                said = [signed(one[rows]) for one in copies_hold]
                result.append(signed(sum(said) / 2 + every[owner][1][name]))
            m = torch.cat(result)
            decay = optim.weight_decay if part.name.startswith("layers.") and part.parameter.dim() == 2 else 0.0
            moved = before[name] * (1 - 0.01 * decay) - 0.01 * (m / (1 - optim.beta1**number) / unit).clamp(-1, 1)
            now = adamw.state[part.parameter]
            told[f"{name} {number}"] = (
                (part.parameter.detach() - moved).abs().max().item(),
                (now["exp_avg"] - m).abs().max().item(),
                torch.equal(now["exp_avg_sq"], state["exp_avg_sq"]),
                now["step"].item(),
            )
    return told


def signed(x):
    """Signs and their mean magnitude."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype) * (x.abs().mean() if x.numel() else 1.0)


def test_steps_of_1_bit_as_another_would_write_them(ranks):
    for told in ranks.run(2, by_hand, compressed({"dp_replicate": 2}, "onebit")):
        for name, found in told.items():
            if name.startswith("clip"):
                norm, scale, from_clipped = found
                assert norm * scale == pytest.approx(from_clipped, rel=1e-12)
            else:
                weight, momentum, frozen, steps = found
                assert weight <= 1e-13, name
                assert momentum <= 1e-13, name
                assert frozen, name
                assert steps == EXACT_STEPS


def bound(run):
    """The norm that is told while gradients are apart, and the true one."""
    taken = Taken(run)
    one_step.gradients(run, taken.mesh, taken.model, taken.parts, work_of(1, 2), taken.optimizer.copies.sums(9))
    told = clip(taken.parts, taken.mesh, 0.0, apart=True)
    one_step.gradients(run, taken.mesh, taken.model, taken.parts, work_of(1, 2))
    return told, clip(taken.parts, taken.mesh, 0.0)


@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"dp_replicate": 2, "tp": 2, "sp": True}], ids=str)
def test_the_norm_of_gradients_apart_is_a_bound(ranks, layout):
    told = ranks.run(layouts.ranks_of(layout), bound, compressed(layout, "onebit"))
    assert all(one == told[0] for one in told)
    most, true = told[0]
    print(f"bound over norm: {most / true:.2f}")
    assert true < most < 2 * true


def cut(run, folder, first, last):
    """Take steps to `first`, save, load into other weights and go on to `last`; and straight to it."""
    straight, taken = Taken(run), Taken(run)
    for number in range(1, last + 1):
        straight.step(number)
    for number in range(1, first + 1):
        taken.step(number)
    taken.save(first, folder)
    again = Taken(run)
    again.load(folder)
    for number in range(first + 1, last + 1):
        again.step(number)
    return straight.tensors(), again.tensors()


@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"dp_replicate": 4}, HYBRID, WITH_TP], ids=str)
@pytest.mark.parametrize("kind", ["topk", "onebit"])
def test_going_on_is_bitwise(ranks, tmp_path, layout, kind):
    for straight, again in ranks.run(layouts.ranks_of(layout), cut, compressed(layout, kind), tmp_path, 5, 7):
        same({n: t for n, (t, _) in straight.items()}, {n: t for n, (t, _) in again.items()})


def saved(run, folder):
    taken = Taken(run)
    for number in range(1, 6):
        taken.step(number)
    taken.save(5, folder)
    return taken.tensors()


def loaded(run, folder):
    taken = Taken(run)
    taken.load(folder)
    before = taken.tensors()
    taken.step(6)
    return before, taken.tensors()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"dp_replicate": 4}, {"dp_replicate": 2}),
        ({"dp_replicate": 3}, WITH_TP),
        (HYBRID, WITH_TP),
        pytest.param({"dp_replicate": 2}, {"dp_replicate": 4}, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 4}, HYBRID, marks=pytest.mark.slow),
        pytest.param(HYBRID, {"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param(WITH_TP, HYBRID, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["topk", "onebit"])
def test_another_layout_owes_as_much(ranks, tmp_path, kind, first, then):
    before = whole(ranks.run(layouts.ranks_of(first), saved, compressed(first, kind), tmp_path))
    told = ranks.run(layouts.ranks_of(then), loaded, compressed(then, kind), tmp_path)
    came, _ = (whole(one) for one in zip(*told, strict=True))  # the step after it finds its copies equal
    same(weights_of(came), weights_of(before))
    was, now = first["dp_replicate"], then["dp_replicate"]
    for name, tensor in before.items():
        if name.startswith("owed.owner."):
            assert torch.equal(came[name], tensor)
        elif name.startswith("owed."):
            assert came[name].shape == (now, *tensor.shape[1:])
            ours, theirs = came[name].sum(0), tensor.sum(0) * (now / was if kind == "onebit" else 1)
            assert (ours - theirs).norm() <= 1e-15 * theirs.norm() * was
            if was == now:
                assert torch.equal(came[name], tensor)


def changed(run, other, folder):
    """From one way of sending to another."""
    taken = Taken(run)
    for number in range(1, 6):
        taken.step(number)
    taken.save(5, folder)
    again = Taken(other)
    again.load(folder)
    before = again.tensors()
    again.step(6)
    return before, again.tensors()


@pytest.mark.parametrize(("kind", "other"), [("none", "onebit"), ("topk", "onebit"), ("onebit", "none")])
def test_another_way_of_sending_begins_with_nothing_owed(ranks, tmp_path, kind, other):
    layout = {"dp_replicate": 2}
    told = ranks.run(2, changed, compressed(layout, kind), compressed(layout, other), tmp_path)
    came, later = (whole(one) for one in zip(*told, strict=True))
    assert not any(tensor.any() for name, tensor in came.items() if name.startswith("owed."))
    assert {name.split(".")[1] for name in came if name.startswith("owed.")} == (
        {"onebit", "owner"} if other == "onebit" else set()
    )
    assert not torch.equal(later["model.norm.weight"], came["model.norm.weight"])


def test_an_element_without_a_second_moment_goes_no_further_than_adam_would(ranks):
    assert ranks.run(2, no_moment, compressed({"dp_replicate": 2}, "onebit")) == [True] * 2


def no_moment(run):
    taken = Taken(run)
    for number in range(1, EXACT_STEPS + 1):
        taken.step(number)
    for kept in taken.optimizer.optimizers[0].state.values():
        kept["exp_avg_sq"].zero_()
    before = [part.parameter.detach().clone() for part in taken.parts]
    taken.step(EXACT_STEPS + 1)
    decay = 0.01 * run.optim.weight_decay
    return all(
        ((part.parameter - old).abs() <= 0.01 * (1 + 1e-12) + decay * old.abs()).all().item()
        for part, old in zip(taken.parts, before, strict=True)
    )
