"""Faults found in others' parallel training, each on the smallest input that shows it (cases: the project they are from).

The reference is one process with the same weights. Gradients, both norms and the weights after a plain gradient step are
compared: an adaptive optimizer hides a wrong scale.
"""

from types import SimpleNamespace

import layouts
import one_step
import pytest
import torch
from one_step import batch, run_of

from outlast.config import Eval, Train
from outlast.parallel.mesh import make
from outlast.train import loop

EVERY = list(range(8))
TP2, TP2_SP, TP4, TP4_SP = {"tp": 2}, {"tp": 2, "sp": True}, {"tp": 4}, {"tp": 4, "sp": True}
AGAIN = {"tp": 2, "sp": True, "sp_regather": True}
REPLICATE, SHARD = {"dp_replicate": 2}, {"dp_shard": 2}


def differences(ranks, layout, work, largest=0.0, **shape):
    """The step under a layout against one process that takes all the work itself; prints and returns the largest."""
    alone = [[one for batches in work for one in batches if len(one.positions_B)]]
    reference = layouts.put_together([one_step.on_rank(run_of({}, **shape), alone, largest)])
    n = layouts.ranks_of(layout)
    kept = layouts.put_together(ranks.run(n, one_step.on_rank, run_of(layout, **shape), work, largest))
    found = layouts.furthest(kept, reference)
    worst = max(found, key=found.get)
    print(f"{layout}: {found[worst]:.1e} at {worst}")
    return found[worst], kept, reference


def equal(ranks, layout, work, **more):
    worst, kept, reference = differences(ranks, layout, work, **more)
    assert worst <= 1e-12
    assert all(tensor.norm() > 0 for name, tensor in reference.tensors.items() if "k_proj.bias" not in name)
    return kept, reference


@pytest.mark.parametrize("layout", [TP2_SP, AGAIN], ids=str)
def test_norm_weights_are_summed_under_sequence_parallelism(ranks, layout):
    """cases: Megatron-LM#1446, gpt-neox#1257."""
    equal(ranks, layout, [[batch([range(4)], length=4)]], num_layers=1)


@pytest.mark.parametrize("layout", [TP2, TP2_SP, TP4, TP4_SP], ids=str)
def test_what_is_whole_but_used_on_some_heads_is_summed_with_sequence_parallelism_off_too(ranks, layout):
    """cases: Megatron-LM#7452: query and key norms; masks uneven over positions, sequences and documents."""
    work = [[batch([[0, 3, 4], [7]], cuts=[3]), batch([[1, 2, 3, 4, 5, 6]], first=2, cuts=[3])]]
    equal(ranks, layout, work)


@pytest.mark.parametrize("layout", [TP2_SP, TP4_SP, REPLICATE, SHARD], ids=str)
def test_one_learned_token_of_all(ranks, layout):
    """cases: Megatron-LM#7513: a mean for each shard and then over shards would weigh it by how many there are."""
    work = [[batch([[2]])], [batch([[]], first=1)]]
    equal(ranks, layout, work if layout in (REPLICATE, SHARD) else work[:1])


@pytest.mark.parametrize("layout", [TP2, TP2_SP, TP4_SP, REPLICATE, SHARD], ids=str)
def test_a_rank_whose_tokens_are_all_masked(ranks, layout):
    """cases: Megatron-LM#1764, the first half of it: nothing is divided by that rank's own count, which is 0."""
    work = [[batch([range(4), range(3)])], [batch([[], []], first=2)]]
    equal(ranks, layout, work if layout in (REPLICATE, SHARD) else work[:1])


@pytest.mark.parametrize("layout", [{}, TP2, TP2_SP, AGAIN, REPLICATE, SHARD], ids=str)
def test_a_batch_in_which_nothing_is_learned(ranks, layout):
    """cases: Megatron-LM#1764, the second half: zero gradients, finite, and weights that stay."""
    work = [[batch([[], []])], [batch([[]], first=2)]]
    work = work if layout in (REPLICATE, SHARD) else work[:1]
    run = run_of(layout)
    kept = layouts.put_together(ranks.run(layouts.ranks_of(layout), one_step.on_rank, run, work, 1.0))
    assert kept.loss == kept.norm == kept.largest == [0.0]
    gradients = {name: tensor for name, tensor in kept.tensors.items() if name.startswith("gradient.")}
    assert gradients
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("layout", [TP2, TP2_SP, REPLICATE, SHARD], ids=str)
def test_who_divides(ranks, layout):
    """cases: Megatron-LM#673, #1124: gradients and one plain step at degree 1 and 2, by which no factor can hide."""
    work = [[batch([EVERY])], [batch([EVERY], first=1)]]
    work = work if layout in (REPLICATE, SHARD) else [[*work[0], *work[1]]]
    kept, reference = equal(ranks, layout, work)
    for name in ("gradient.embed_tokens.weight", "gradient.layers.0.self_attn.o_proj.weight", "gradient.norm.weight"):
        assert kept.tensors[name].norm() / reference.tensors[name].norm() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("layout", [{}, TP2_SP, REPLICATE, SHARD], ids=str)
def test_micro_batches_with_one_and_nine_learned_tokens(ranks, layout):
    """cases: torchtitan#1842, #4167: the loss is the mean over ten tokens, not of two means."""
    one, nine = batch([[5]]), batch([range(4), range(5)], first=1)
    work = [[one], [nine]] if layout in (REPLICATE, SHARD) else [[one, nine]]
    kept, reference = equal(ranks, layout, work)
    apart = [one_step.on_rank(run_of({}), [[part]]).loss[0] for part in (one, nine)]
    assert kept.loss[0] == pytest.approx((apart[0] + 9 * apart[1]) / 10, rel=1e-12)
    assert abs(apart[0] - apart[1]) > 1e-3
    assert reference.loss[0] != pytest.approx(sum(apart) / 2, rel=1e-5)


class Told(torch.nn.Module):
    """A model that says what loss its batch has: 2 for the one with one learned token, 90 for that with nine."""

    def forward(self, tokens, targets, packing):
        return torch.tensor({1: 2.0, 9: 90.0, 0: 0.0}[int((targets != -100).sum())])


def held_out_loss(layout, batches_of_ranks):
    run = one_step.run_of(layout)
    mesh, noted = make(run.parallel, one_step.CPU), []
    feed = SimpleNamespace(evaluation=lambda *_: batches_of_ranks[mesh.data_rank])
    run = SimpleNamespace(parallel=run.parallel, train=Train(), eval=Eval())
    told = SimpleNamespace(
        run=run,
        mesh=mesh,
        model=Told(),
        feed=feed,
        step=0,
        measure=noted.append,
        note=lambda *_, **fields: noted.append(fields),
    )
    loop.evaluate(told, [])
    return noted


@pytest.mark.parametrize("layout", [{}, REPLICATE, SHARD, {"dp_shard": 3}, TP2, {"tp": 2, "dp_shard": 2}], ids=str)
def test_validation_is_the_mean_over_tokens(ranks, layout):
    """cases: torchtitan#1842, #4167: (loss, tokens) of (2, 1) and (90, 9) is 92 / 10, told alike on every rank."""
    one, nine, none = batch([[5]]), batch([range(4), range(5)], first=1), batch([[]])
    work = [[one, nine]] if layouts.ranks_of(layout) == layout.get("tp", 1) else [[one], [nine], [none]]
    told = ranks.run(layouts.ranks_of(layout), held_out_loss, layout, work)
    assert told == [[{"loss": 9.2}, {"held_out_loss": 9.2}]] * layouts.ranks_of(layout)


@pytest.mark.parametrize("layout", [TP2, TP2_SP, SHARD, {"tp": 2, "dp_shard": 2}], ids=str)
def test_norms_and_clipped_gradients(ranks, layout):
    """cases: torchtitan#596: the 2-norm and the largest element of all gradients, each element counted once."""
    work = [[batch([EVERY])], [batch([range(3)], first=1)]]
    work = work if "dp_shard" in layout else [[*work[0], *work[1]]]
    whole = one_step.on_rank(run_of({}), [[one for batches in work for one in batches]])
    gradients = [grad for name, (grad, _) in whole.tensors.items() if name.startswith("gradient.")]
    everything = torch.cat([grad.flatten() for grad in gradients])
    limit = whole.norm[0] / 3
    kept, reference = equal(ranks, layout, work, largest=limit)
    assert kept.norm[0] == pytest.approx(everything.norm().item(), rel=1e-12)
    assert kept.largest[0] == pytest.approx(everything.abs().max().item(), rel=1e-12)
    clipped = [grad.flatten() for name, grad in kept.tensors.items() if name.startswith("gradient.")]
    assert torch.cat(clipped).norm().item() == pytest.approx(limit, rel=1e-5)
    assert reference.norm[0] > limit


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("kv", "layout"), [(2, TP4), (2, TP4_SP), (1, TP4), (1, TP4_SP), (1, TP2), (1, TP2_SP), (1, {"tp": 2, "dp_shard": 2})], ids=str
)  # fmt: skip
def test_fewer_key_value_heads_than_ranks(ranks, kv, layout, tie):
    """cases: verl#1226, DeepSpeed#4674, #8291: 4/2 at 4, 4/1 at 4 and 2; the gradients of shared heads are summed."""
    work = [[batch([EVERY, [1, 6]], cuts=[5])], [batch([[0], []], first=2)]]
    work = work if "dp_shard" in layout else work[:1]
    equal(ranks, layout, work, num_kv_heads=kv, tie_embeddings=tie)


def both(one, other, work):
    """Two models of one process, the second built before the first is used."""
    first, second = one_step.spread(one), one_step.spread(other)
    return [one_step.taken(run, *built, work) for run, built in ((one, first), (other, second), (one, first))]


@pytest.mark.parametrize("layout", [TP2_SP, SHARD], ids=str)
def test_two_models_in_one_process(ranks, layout):
    """cases: torchtitan#2574: head counts do not leak from one model to another."""
    work = [[batch([EVERY])], [batch([EVERY], first=1)]] if layout == SHARD else [[batch([EVERY, [1, 2]])]]
    alone = [[one for batches in work for one in batches]]
    shapes = ({"num_heads": 4}, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "num_layers": 1})
    told = ranks.run(2, both, *(run_of(layout, **shape) for shape in shapes), work)
    for kept, shape in zip(list(zip(*told, strict=True))[:2], shapes, strict=True):
        reference = layouts.put_together([one_step.on_rank(run_of({}, **shape), alone)])
        assert max(layouts.furthest(layouts.put_together(list(kept)), reference).values()) <= 1e-12
    # Nothing was left of the first pass: the second over the same weights is the same.
    for rank in told:
        assert all(torch.equal(rank[0].tensors[name][0], rank[2].tensors[name][0]) for name in rank[0].tensors)


def test_dropout_is_equal_where_replicated_and_different_where_sharded(ranks):
    """cases: Megatron-LM#1256, #4828: one half, at every site; each rank's mask is a cut of one process's."""
    work = [[batch([EVERY, EVERY])], [batch([EVERY, EVERY], first=2)]]
    whole = [one_step.masks(run_of({}, dropout=0.5), [batches]) for batches in work]
    sites = 1 + 2 * one_step.SHAPE.num_layers
    assert [len(seen) for seen in whole] == [sites, sites]
    values = torch.stack(whole[0])
    assert set(values.unique().tolist()) == {0.0, 2.0}
    assert abs((values == 0).double().mean().item() - 0.5) < 0.05
    assert not torch.equal(values, torch.stack(whole[1]))  # other samples
    assert len({site.numpy().tobytes() for site in values}) == sites

    def told(layout):
        n = layouts.ranks_of(layout)
        return [torch.stack(seen) for seen in ranks.run(n, one_step.masks, run_of(layout, dropout=0.5), work)]

    for seen in told(TP2):
        assert torch.equal(seen, values)
    for rank, seen in enumerate(told(TP4_SP)):
        assert torch.equal(seen, values[:, :, 2 * rank : 2 * rank + 2])
    for layout in (REPLICATE, SHARD):
        for seen, theirs in zip(told(layout), whole, strict=True):
            assert torch.equal(seen, torch.stack(theirs))
    for rank, seen in enumerate(told({"tp": 2, "sp": True, "dp_shard": 2})):
        data, tp = divmod(rank, 2)
        assert torch.equal(seen, torch.stack(whole[data])[:, :, 4 * tp : 4 * tp + 4])
