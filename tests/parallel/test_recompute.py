"""What is worked out again in the backward pass is what was: the same bits, the same masks, under every layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import layouts
import one_step
import pytest
import torch
from one_step import batch, run_of

from outlast.model import recompute
from outlast.model.transformer import Transformer, attend
from outlast.parallel.inputs import inputs
from outlast.parallel.mesh import make

EVERY = list(range(8))
KINDS = [("none", 0), ("attention", 0), ("attention", 1), ("full", 0), ("full", 1)]
LAYOUTS = [
    {},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "sp_regather": True, "dp_shard": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2},
]


def recomputing(layout: dict[str, Any], kind: str, blocks: int = 0, **shape: Any):
    run = run_of(layout, **shape)
    return replace(run, train=replace(run.train, recompute=kind, recompute_layers=blocks))


def gradients(layout, work):
    """On a rank: the gradients under each kind of recomputation, in turn."""
    found = []
    for kind, blocks in KINDS:
        run = recomputing(layout, kind, blocks, dropout=0.5)
        mesh, model, parts = one_step.spread(run)
        one_step.gradients(run, mesh, model, parts, work)
        found.append({part.name: part.parameter.grad for part in parts})
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_bits(ranks, layout):
    """Dropout one half, several documents a sequence, masks, and a pass with no sequence at all."""
    work = [[batch([EVERY, [1, 2]], cuts=[3]), batch([])]]
    if "dp_shard" in layout or "dp_replicate" in layout:
        work.append([batch([[0, 7]], first=2, cuts=[1, 5]), batch([[4]], first=3)])
    n = layouts.ranks_of(layout)
    for found in ranks.run(n, gradients, layout, work) if n > 1 else [gradients(layout, work)]:
        for (kind, blocks), one in zip(KINDS, found, strict=True):
            for name, gradient in one.items():
                assert gradient.numpy().tobytes() == found[0][name].numpy().tobytes(), (kind, blocks, name)


def masks(layout, work):
    """On a rank: by site of each block, what dropout did to ones, forward and again."""
    run = recomputing(layout, "full", dropout=0.5)
    mesh, model, _ = one_step.spread(run)
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def looked_at(site: tuple[int, str], dropout: Callable) -> Callable:
        def dropped(x: torch.Tensor, packing: Any, training: bool) -> torch.Tensor:
            with torch.no_grad():
                seen.setdefault(site, []).append(dropout(torch.ones_like(x), packing, training))
            return dropout(x, packing, training)

        return dropped

    for layer, block in enumerate(model.layers):
        block.drop_attention = looked_at((layer, "attention"), block.drop_attention)
        block.drop_mlp = looked_at((layer, "mlp"), block.drop_mlp)
    model.train()
    model(*inputs(work[mesh.data_rank][0], mesh)).backward()
    return seen


def test_dropout_is_the_same_again(ranks):
    """cases: Megatron-LM#1256: one half: the same under recompute, equal where replicated, different where sharded."""
    work = [[batch([EVERY, EVERY])]]
    (alone,) = [masks({}, work)]
    assert list(alone) == [(0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")]
    for seen in (alone, *ranks.run(2, masks, {"tp": 2}, work)):
        for site, (once, again) in seen.items():
            assert torch.equal(once, again)
            assert torch.equal(once, alone[site][0])
            assert set(once.unique().tolist()) == {0.0, 2.0}
    for rank, seen in enumerate(ranks.run(4, masks, {"tp": 4, "sp": True}, work)):
        for site, (once, again) in seen.items():
            assert torch.equal(once, again)
            assert torch.equal(once, alone[site][0][:, 2 * rank : 2 * rank + 2])
    assert len({once.numpy().tobytes() for once, _ in alone.values()}) == 4


def seen_attending(kind: str, blocks: int, learn: bool = True) -> list[int]:
    """The blocks whose attention was asked for, in order, by whatever fills the seam."""
    run = run_of({}, num_layers=3)
    model, asked = Transformer(run.model), []

    def filled(q, k, v, packing, layer):
        asked.append(layer)
        return attend(q, k, v, packing, layer)

    model.fill(attend=filled)
    recompute.apply(model, kind, blocks)
    model.train()
    with torch.set_grad_enabled(learn):
        loss = model(*inputs(batch([EVERY]), make(run.parallel, one_step.CPU)))
    if learn:
        loss.backward()
    return asked


@pytest.mark.parametrize("kind", ["attention", "full"])
def test_whatever_fills_the_seam_is_asked_again_by_the_first_blocks(kind):
    assert seen_attending("none", 3) == [0, 1, 2]
    assert seen_attending(kind, 3) == [0, 1, 2, 2, 1, 0]
    assert seen_attending(kind, 2) == [0, 1, 2, 1, 0]
    assert seen_attending(kind, 3, learn=False) == [0, 1, 2]
