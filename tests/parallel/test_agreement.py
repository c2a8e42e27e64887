"""The check at every start: it lets every layout through, and finds what would train wrongly without a word.

cases: picotron, run here: replicas that drift, shards drawn with one seed, loaded weights overwritten.
"""

import re

import layouts
import one_step
import pytest
import torch
from one_step import batch, run_of

from outlast.errors import RanksDifferError
from outlast.parallel import agreement
from outlast.parallel.agreement import checksum, replicas_equal_shards_different, same_everywhere


def word_of(bits):
    """Little-endian bytes as a signed number."""
    return int.from_bytes(bits, "little", signed=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_checksum_is_its_formula(dtype, monkeypatch):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    size = x.element_size()
    raw = x.view(torch.uint8).numpy().tobytes()
    bits = [word_of(raw[i : i + size]) for i in range(0, len(raw), size)]
    total = sum(one * (2 * place * 0x9E3779B97F4A7C15 + 1) for place, one in enumerate(bits)) % 2**64
    assert checksum(x) % 2**64 == total
    monkeypatch.setattr(agreement, "_AT_ONCE", 4)
    assert checksum(x) % 2**64 == total
    assert checksum(x.flip(0)) != checksum(x)  # an exchange is a change
    assert checksum(-torch.zeros(3)) != checksum(torch.zeros(3))
    assert checksum(torch.zeros(0)) == 0


def told(work, *args):
    try:
        work(*args)
    except RanksDifferError as error:
        return error.what
    return None


def checked(layout, harm, rank=0, name="norm.weight", **shape):
    """What the check says once one rank's part of a parameter was harmed."""
    mesh, model, parts = one_step.spread(run_of(layout, **shape))
    part = next(part for part in parts if part.name == name)
    with torch.no_grad():
        if harm == "drift" and mesh.rank == rank:
            part.parameter.view(-1)[-1] *= 1 + 2**-50
        if harm == "same shards":
            for one in parts:
                one.parameter.copy_(torch.arange(one.parameter.numel()).view_as(one.parameter) % 7)
        if harm == "trained":
            work = [[batch([range(8)], first=i)] for i in range(mesh.data_ranks)]
            one_step.gradients(run_of(layout), mesh, model, parts, work)
    return told(replicas_equal_shards_different, parts, mesh)


LAYOUTS = [
    {"dp_replicate": 2},
    {"dp_shard": 3},
    {"tp": 2},
    {"tp": 4, "sp": True},
    {"tp": 2, "dp_shard": 2},
    {"tp": 2, "sp": True, "dp_replicate": 2},
    {"dp_shard": 2, "dp_replicate": 2},
    {"ring": 2, "ulysses": 2},
    {"ring": 2, "ulysses": 2, "shard_sequence_ranks": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_well_passes(ranks, layout):
    assert set(ranks.run(layouts.ranks_of(layout), checked, layout, "")) == {None}


@pytest.mark.parametrize(
    ("layout", "rank", "name", "axis", "where"),
    [
        ({"dp_replicate": 2}, 1, "layers.1.mlp.up_proj.weight", "dp_replicate", 1),
        ({"tp": 2}, 1, "layers.0.input_layernorm.weight", "tp", 1),
        ({"tp": 4, "sp": True}, 2, "layers.0.self_attn.k_proj.weight", "tp", 2),  # 2 heads over 4: whole on each
        ({"dp_shard": 3}, 2, "norm.weight", "dp_shard", 2),
        ({"tp": 2, "dp_shard": 2}, 3, "layers.0.self_attn.q_norm.weight", "dp_shard", 1),
        ({"dp_shard": 2, "dp_replicate": 2}, 2, "embed_tokens.weight", "dp_replicate", 1),
        ({"ring": 2, "ulysses": 2}, 2, "layers.0.mlp.down_proj.weight", "ring", 1),
        ({"ulysses": 2, "shard_sequence_ranks": True}, 1, "norm.weight", "ulysses", 1),
    ],
    ids=str,
)
def test_one_bit_that_drifted_is_found(ranks, layout, rank, name, axis, where):
    words = ranks.run(layouts.ranks_of(layout), checked, layout, "drift", rank, name, limit=20)
    # Told alike on every rank: one that went on would wait for those that did not.
    assert words == [f"{name} should be the same along {axis}, and ranks 0 and {where} of it differ"] * len(words)


@pytest.mark.parametrize("vocabulary", [32, 33])  # the second is split unevenly, and the rest is equal all the same
@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        ({"tp": 2}, "tp"),
        ({"dp_shard": 2}, "dp_shard"),
        ({"tp": 4}, "tp"),
        ({"ring": 2, "shard_sequence_ranks": True}, "ring"),
    ],
)
def test_equal_shards_are_found(ranks, layout, axis, vocabulary):
    words = ranks.run(layouts.ranks_of(layout), checked, layout, "same shards", vocab_size=vocabulary)
    assert len(set(words)) == 1
    assert words[0]
    assert re.search(rf" should be shared out along {axis}, and ranks \d and \d of it hold the same part$", words[0])


def knobs_on(rank_of_change, key, given):
    """What ranks say when one of them was started with another value of one knob."""
    import torch.distributed as dist

    from outlast import config
    from outlast.train.identity import facts

    mesh, _, _ = one_step.spread(run_of({"dp_replicate": 3}))
    run = run_of({"dp_replicate": 3})
    if dist.get_rank() == rank_of_change:
        run = config.replaced(run, {key: given})
    return told(same_everywhere, mesh, facts(run, {"corpus": "abc"}))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("optim.lr", 0.2),
        ("parallel.sp", True),
        ("parallel.sp_regather", True),
        ("parallel.tp", 2),
        ("train.micro_batch", 3),
        ("train.stop_at", 7),
        ("train.steps", 7),
        ("train.compile", True),
        ("eval.every", 3),
        ("eval.samples", 3),
        ("checkpoint.every", 3),
    ],
)
def test_a_knob_that_differs_between_ranks_is_named(ranks, key, given):
    words = ranks.run(3, knobs_on, 2, key, given, limit=20)
    assert len(set(words)) == 1
    assert re.search(rf"^the ranks do not run the same thing: {key} is .* on rank 0, {given} on rank 2$", words[0])


@pytest.mark.parametrize(("key", "given"), [("train.threads", 3), ("data.cache", "elsewhere")])
def test_what_hosts_may_have_differently(ranks, key, given):
    assert ranks.run(3, knobs_on, 2, key, given) == [None] * 3


def sees(folders):
    import torch.distributed as dist

    mesh, _, _ = one_step.spread(run_of({"dp_replicate": 2}))
    return told(agreement.same_folder, mesh, folders[dist.get_rank()])


def test_a_run_folder_that_a_rank_does_not_share_is_refused(ranks, tmp_path):
    (tmp_path / "other").mkdir()
    assert ranks.run(2, sees, [tmp_path, tmp_path]) == [None, None]
    said = "rank 1 does not see the run folder that rank 0 writes to"
    assert ranks.run(2, sees, [tmp_path, tmp_path / "other"]) == [said, said]
    assert [path.name for path in tmp_path.iterdir()] == ["other"], "nothing is left of the check"
