"""The model: its types, what attention may see, dropout, seams and initial values."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import outlast.model
from outlast.config import Model
from outlast.model import rotary
from outlast.model.loss import loss, sum_dtype
from outlast.model.randomness import fill_normal
from outlast.model.transformer import Dropout, Norm, Packing, Seams, Transformer, attend
from outlast.places import Place

SHAPE = Model(vocab_size=37, hidden_size=24, intermediate_size=29, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=10)  # fmt: skip
CPU = torch.device("cpu")
WIDE = [torch.float32, torch.float64, torch.bfloat16]


def shaped(**knobs):
    return Model(**vars(SHAPE) | knobs)


def built(compute=torch.float64, **knobs):
    """A model whose norms are not 1 and whose biases are not 0."""
    model = Transformer.on(CPU, shaped(**knobs), compute, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return model


def packing(*sequences, first=0):
    """Sequences cut into documents of these lengths."""
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in sequences]
    return Packing.of(torch.arange(first, first + len(sequences)), torch.stack(positions), sequences)


def tokens(batch, length, seed=0):
    return torch.randint(SHAPE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def random(*size, dtype=torch.float64, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Types


def test_types_flow_as_documented():
    seen = {}

    def noting(name, function):
        def inner(*args):
            result = function(*args)
            seen.setdefault(name, set()).update(
                one.dtype for one in (result if isinstance(result, tuple) else (result,))
            )
            return result

        return inner

    for compute in WIDE:
        model = built(compute, qk_norm=True, qkv_bias=True, out_bias=True)
        seen.clear()
        model.fill(**{name: noting(name, seam) for name, seam in vars(Seams()).items()})
        for name, module in model.named_modules():
            if isinstance(module, Norm):
                module.register_forward_hook(lambda *args, name=name: seen.setdefault(name, set()).add(args[2].dtype))
        exact = torch.float64 if compute == torch.float64 else torch.float32
        total = model(tokens(2, 6), tokens(2, 6, seed=1), packing((6,), (6,)))
        total.backward()
        assert seen.pop("loss") == seen.pop("embed") == {exact}
        assert len(seen) == 3 + 4 * SHAPE.num_layers + 1
        assert set().union(*seen.values()) == {compute}
        assert all(parameter.dtype == parameter.grad.dtype == exact for parameter in model.parameters())
        assert model.logits(tokens(2, 6), packing((6,), (6,))).dtype == exact


def test_sums_are_taken_in_float32_under_bfloat16():
    x = random(4, 64, dtype=torch.bfloat16) * 300
    norm = Norm(64, 1e-5)
    norm.weight.data = random(64, dtype=torch.float32)
    assert torch.equal(norm(x), norm(x.float()).bfloat16())

    heads = random(2, 3, 4, 8, dtype=torch.bfloat16)
    cos, sin = rotary.cos_sin(torch.arange(3).expand(2, 3), torch.rand(4), 1.0)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(rotary.rotate(heads, cos, sin), rotary.rotate(heads.float(), cos, sin).bfloat16())

    hidden, weight = random(1, 9, 8, dtype=torch.bfloat16), random(23, 8, dtype=torch.float32)
    targets = torch.arange(9)[None]
    logits = (hidden @ weight.bfloat16().T).double()
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss(hidden, weight, targets).item() == pytest.approx(exact.item(), rel=1e-6)

    # Softmax over 4096 equal scores: summed in bfloat16 it would stop growing at 256.
    length = 4096
    q = torch.zeros(1, length, 1, 8, dtype=torch.bfloat16)
    v = torch.ones(1, length, 1, 8, dtype=torch.bfloat16)
    assert torch.equal(attend(q, q, v, packing((length,)), 0), v)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_coarser_types_are_near_the_exact_model(compute):
    exact, coarse = built(torch.float64, qk_norm=True), built(compute, qk_norm=True)
    where = packing((5, 7), (12,))
    one, other = exact.logits(tokens(2, 12), where), coarse.logits(tokens(2, 12), where)
    assert (one - other).norm() / one.norm() < (1e-5 if compute == torch.float32 else 0.05)


# What attention sees


@pytest.mark.parametrize("compute", WIDE)
def test_no_token_is_seen_by_another_document_or_by_an_earlier_place(compute):
    model = built(compute)
    first = tokens(2, 20)
    where = packing((8, 12), (5, 15))
    before = model.hidden(first, where)

    other = first.clone()
    other[0, :8] = (other[0, :8] + 1) % SHAPE.vocab_size
    after = model.hidden(other, where)
    assert torch.equal(after[0, 8:], before[0, 8:])
    assert torch.equal(after[1], before[1])
    assert not torch.isclose(after[0, :8], before[0, :8]).all(-1).any()

    other = first.clone()
    other[1, 15] = (other[1, 15] + 1) % SHAPE.vocab_size
    after = model.hidden(other, where)
    assert torch.equal(after[1, :15], before[1, :15])
    assert not torch.isclose(after[1, 15:], before[1, 15:]).all(-1).any()


def test_gradients_stay_in_their_document():
    model, embedded = built(), []
    model.fill(embed=lambda *args: embedded.append(Seams().embed(*args).detach().requires_grad_()) or embedded[0])
    model.hidden(tokens(1, 20), packing((8, 12)))[0, 8:].square().sum().backward()
    assert (embedded[0].grad[0, :8] == 0).all()
    assert (embedded[0].grad[0, 8:].norm(dim=-1) > 0).all()


def test_attention_is_the_plain_formula():
    """Softmax of scaled products over what is at or before a place in its document; query head h reads head h // 2."""
    q, k, v = random(2, 9, 4, 6), random(2, 9, 2, 6, seed=1), random(2, 9, 2, 6, seed=2)
    where = packing((4, 5), (9,))
    mine = attend(q, k, v, where, 0)
    for b, lengths in enumerate(where.documents):
        begin = [start for start, length in zip((0, lengths[0]), lengths, strict=False) for _ in range(length)]
        for s in range(9):
            seen = slice(begin[s], s + 1)
            for h in range(4):
                weights = torch.softmax(k[b, seen, h // 2] @ q[b, s, h] / math.sqrt(6), dim=0)
                torch.testing.assert_close(mine[b, s, h], weights @ v[b, seen, h // 2], rtol=1e-12, atol=1e-14)


def test_only_the_distance_of_positions_matters():
    model = built()
    far = Packing.of(torch.arange(1), torch.arange(100, 120)[None], ((20,),))
    near = model.hidden(tokens(1, 20), packing((20,)))
    # Angles are float32: 120 radians are known to about 1e-5.
    torch.testing.assert_close(model.hidden(tokens(1, 20), far), near, rtol=1e-4, atol=1e-4)


# Dropout


def drop(probability=0.3, seed=0, layer=1, site="mlp", samples=(5, 6), length=32, channels=150, first=0):
    ones = torch.ones(len(samples), length, channels)
    where = Packing.of(torch.tensor(samples), torch.zeros(len(samples), length, dtype=torch.int64), ((length,),))
    return Dropout(probability, seed, layer, site)(ones, where, training=True)


def test_dropout_hangs_on_what_it_is_for_and_on_nothing_else():
    once = drop()
    assert torch.equal(drop(), once)
    assert torch.equal(drop(samples=(6, 9, 5))[[2, 0]], once)
    assert torch.equal(drop(length=7), once[:, :7])
    assert torch.equal(drop(channels=50), once[:, :, :50])


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_dropout_has_its_rate_and_keeps_the_mean(probability):
    dropped = drop(probability, samples=range(8), length=64)
    share = (dropped == 0).double()
    for axis in ((), 0, 1, 2):  # over all, and per sample, position and channel
        rates = share.mean() if axis == () else share.mean(dim=[other for other in range(3) if other != axis])
        sigma = math.sqrt(probability * (1 - probability) * rates.numel() / share.numel())
        assert (rates - probability).abs().max() < (4 if axis == () else 5) * sigma
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - probability)])


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"layer": 0}, {"layer": -1}, {"site": "attention"}, {"samples": (6, 5)}, {"samples": (7, 8)}]
)
def test_dropout_differs_for_another_seed_layer_site_and_sample(other):
    agree = ((drop() == 0) == (drop(**other) == 0)).double()
    chance = 0.3**2 + 0.7**2
    assert abs(agree.mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / agree.numel())


def test_dropout_differs_for_another_position_and_channel():
    kept = drop(samples=range(16), length=16) != 0
    chance = 0.3**2 + 0.7**2
    for shifted in (*(kept.roll(1, dims=dim) for dim in (0, 1, 2)), kept.roll(4, dims=2)):
        agree = (kept == shifted).double()
        assert abs(agree.mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / agree.numel())
    # Sample a at position b is another place than sample b at position a.
    above = torch.triu(torch.ones(16, 16, dtype=torch.bool), diagonal=1)
    agree = (kept == kept.transpose(0, 1))[above].double()
    assert abs(agree.mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / agree.numel())


def test_dropout_is_off_outside_training():
    model, without = built(dropout=0.4), built()
    where = packing((20,), first=3)
    assert not torch.equal(model.hidden(tokens(1, 20), where), without.hidden(tokens(1, 20), where))
    assert torch.equal(model.eval().hidden(tokens(1, 20), where), without.hidden(tokens(1, 20), where))


def test_every_site_drops_by_its_own_mask():
    """Embedding, and attention and feed-forward of every layer."""
    model, masks = built(dropout=0.5), []
    for module in model.modules():
        for name, site in list(vars(module).items()):
            if isinstance(site, Dropout):
                setattr(module, name, lambda x, p, t, site=site: masks.append(site(torch.ones_like(x), p, t)) or site(x, p, t))  # fmt: skip
    model.hidden(tokens(2, 20), packing((20,), (20,)))
    assert len(masks) == 1 + 2 * SHAPE.num_layers
    for i, one in enumerate(masks):
        assert 0.4 < (one == 0).double().mean() < 0.6
        assert all(0.4 < (one == other).double().mean() < 0.6 for other in masks[:i])


def test_recomputed_blocks_drop_the_same():
    plain, recomputed = built(dropout=0.3), built(dropout=0.3)
    for block in recomputed.layers:
        block.forward = lambda *args, inner=block.forward: checkpoint(inner, *args, use_reentrant=False)
    for model in (plain, recomputed):
        model(tokens(2, 20), tokens(2, 20, seed=1), packing((20,), (9, 11))).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


# Seams


@pytest.mark.parametrize("name", ["embed", "project_in", "attend", "project_out", "loss"])
def test_a_filled_seam_takes_the_place_of_that_function_alone(name):
    model, calls = built(), []
    plain = vars(Seams())
    assert list(plain) == ["embed", "project_in", "attend", "project_out", "loss"]

    def filled(*args):
        calls.append(args)
        return plain[name](*args)

    model.fill(**{name: filled})
    assert vars(model.seams) == plain | {name: filled}
    data = tokens(2, 6), tokens(2, 6, seed=1), packing((6,), (2, 4))
    assert torch.equal(model(*data), built()(*data))
    often = {"embed": 1, "project_in": 4, "attend": 2, "project_out": 4, "loss": 1}
    assert len(calls) == often[name]
    if name == "attend":
        assert [args[-1] for args in calls] == [0, 1]
    if name == "project_in":
        assert [len(args[1]) for args in calls] == [3, 2, 3, 2]


def test_an_unknown_seam_is_refused():
    with pytest.raises(TypeError, match="attention"):
        built().fill(attention=print)


def test_nothing_in_the_model_names_a_rank():
    folder = Path(outlast.model.__file__).parent
    words = {"rank", "ranks", "mesh", "group", "groups", "process_group", "world_size", "distributed", "dist", "comm"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")}
            named = {part for name in named if isinstance(name, str) for part in name.split(".")}
            assert not named & words, f"{path.name}:{getattr(node, 'lineno', '?')} names {named & words}"


# Initial values


@pytest.mark.parametrize("compute", WIDE)
@pytest.mark.parametrize("tie", [True, False])
def test_weights_drawn_on_the_device_are_those_of_the_whole_model(compute, tie):
    knobs = {"tie_embeddings": tie, "qk_norm": True, "qkv_bias": True, "rope_scaling": "llama3", "rope_factor": 8.0}
    whole = Transformer(shaped(**knobs), compute, 4)
    whole.initialize(4)
    placed = Transformer.on(CPU, shaped(**knobs), compute, 4)
    assert list(whole.state_dict()) == list(placed.state_dict())
    for name, parameter in placed.state_dict().items():
        assert torch.equal(parameter, whole.state_dict()[name]), name
        assert parameter.dtype == sum_dtype(compute)
    assert torch.equal(placed.frequencies, whole.frequencies)
    assert (placed.lm_head.weight is placed.embed_tokens.weight) == tie
    where = packing((12,))
    assert torch.equal(placed.hidden(tokens(1, 12), where), whole.hidden(tokens(1, 12), where))


def test_initial_values_have_their_deviation_and_depend_on_seed_and_name():
    shape = shaped(hidden_size=96, intermediate_size=200, num_layers=8, qkv_bias=True, tie_embeddings=False)
    model, other = (Transformer.on(CPU, shape, torch.float32, seed) for seed in (0, 1))
    drawn = {}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / 4 if small else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * parameter.numel()))
            assert abs(parameter.mean().item()) < 4 * std / math.sqrt(parameter.numel())
            assert not torch.equal(parameter, other.get_parameter(name))
            drawn[name] = parameter.flatten()[:500]
    for one in drawn:
        for two in drawn:
            if one != two:
                assert abs(torch.corrcoef(torch.stack([drawn[one], drawn[two]]))[0, 1]) < 5 / math.sqrt(500)


def test_a_part_of_a_parameter_gets_the_values_it_has_in_the_whole():
    whole = Transformer.on(CPU, SHAPE, torch.float32, 3).get_parameter("layers.1.mlp.gate_proj.weight")
    rows = torch.empty(7, SHAPE.hidden_size)
    place = Place(tuple(whole.shape), (5, 0), tuple(rows.shape))
    fill_normal(rows, SHAPE.init_std, 3, "layers.1.mlp.gate_proj.weight", place)
    assert torch.equal(rows, whole[5:12])
