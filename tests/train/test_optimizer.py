"""Groups, updates, clipping and the learning rate, against formulas worked out apart."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.comm.compress import decoded, encoded
from outlast.config import Model, Optim, Parallel, Run, Schedule
from outlast.model.transformer import Transformer
from outlast.parallel.gradients import Part, parts
from outlast.parallel.mesh import Mesh
from outlast.places import Place
from outlast.train.optimizer import Muon, Optimizer, clip, frozen_step, groups, lr_factor, orthogonal

SHAPE = replace(
    Model(), vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    qkv_bias=True, qk_norm=True, tie_embeddings=False,
)  # fmt: skip
ALONE = Mesh(Parallel(), 0, torch.device("cpu"))


def part_of(name, parameter):
    return Part(name, parameter, Place.all_of(tuple(parameter.shape)), (), (), parameter)


def optimizer_of(model, optim):
    run = Run(model=SHAPE, optim=optim)
    return Optimizer(parts(model, run, ALONE), run, ALONE)


def test_embeddings_norms_and_biases_are_exempt_from_decay():
    model = Transformer(SHAPE)
    sorted_into = {
        name: group for group in groups(dict(model.named_parameters()), Optim()) for name in group.parameters
    }
    assert set(sorted_into) == {name for name, _ in model.named_parameters()}
    for name, group in sorted_into.items():
        exempt = "norm" in name or name.endswith("bias") or name.startswith("embed_tokens")
        assert group.weight_decay == (0.0 if exempt else 0.1), name
        assert group.optimizer == "adamw"
    tied = groups(dict(Transformer(replace(SHAPE, tie_embeddings=True)).named_parameters()), Optim())
    assert "output" not in {group.name for group in tied}
    muon = {g.name: g.optimizer for g in groups(dict(model.named_parameters()), replace(Optim(), name="muon"))}
    assert muon == {"matrices": "muon", "output": "adamw", "embeddings": "adamw", "norms": "adamw", "biases": "adamw"}


def test_adamw_by_hand():
    """Two steps of Loshchilov and Hutter 2019, algorithm 2, in plain numbers."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)]).double()
    weight = model.layers[0].weight
    weight.data.fill_(2.0)
    optim = replace(Optim(), lr=0.1)
    optimizer = Optimizer([part_of("layers.0.weight", weight)], Run(optim=optim), ALONE)
    x, m, v = 2.0, 0.0, 0.0
    for t, (gradient, lr) in enumerate([(3.0, 0.1), (-1.0, 0.05)], start=1):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step(lr)
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        x = x * (1 - lr * 0.1) - lr * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
        assert weight.item() == pytest.approx(x, rel=1e-14)
        assert weight.grad is None


def adamw_after(gradients):
    """AdamW at rate 0.1 after steps with these gradients, and its parameter."""
    weight = torch.nn.Parameter(torch.zeros(gradients.shape[1:], dtype=torch.float64))
    adamw = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    for gradient in gradients:
        weight.grad = gradient.clone()
        adamw.step()
    return adamw, weight


def test_a_frozen_step_by_hand():
    """The third step of three copies, where the others' momenta come to half of this one's: all in plain numbers."""
    adamw, weight = adamw_after(torch.tensor([[2.0], [-1.0]], dtype=torch.float64))
    x, m = weight.item(), 0.9 * (0.1 * 2) - 0.1
    v = 0.95 * (0.05 * 4) + 0.05
    weight.grad = torch.full_like(weight, 0.25)
    frozen_step(adamw, 3, 3, lambda _, values: [one.mul_(0.5) for one in values])
    unit = math.sqrt(v / (1 - 0.95**2)) + 1e-8
    m = (0.9 * m + 0.1 * 3 * 0.25) / 2
    x = x * (1 - 0.1 * 0.5) - 0.1 * m / (1 - 0.9**3) / unit
    state = adamw.state[weight]
    assert weight.item() == pytest.approx(x, rel=1e-14)
    assert state["exp_avg"].item() == pytest.approx(m, rel=1e-14)
    assert state["exp_avg_sq"].item() == pytest.approx(v, rel=1e-14)
    assert state["step"].item() == 2


def test_a_frozen_step_goes_no_further_than_adam_does():
    """Signs give an element that had no gradient the scale of all."""
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, 1000, generator=draw, dtype=torch.float64)
    gradients[:, 7] = 0
    adamw, weight = adamw_after(gradients)
    before = weight.detach().clone()
    weight.grad = torch.randn(1000, generator=draw, dtype=torch.float64)
    frozen_step(adamw, 21, 2, lambda _, values: values[0].copy_(decoded(encoded(values), values)[0]))
    moved = weight - before * (1 - 0.1 * 0.5)
    assert abs(moved[7].item()) == pytest.approx(0.1, rel=1e-12)
    assert 0.01 < moved.abs().median().item() < 0.05


def test_muon_by_singular_values():
    """The update has the directions of the momentum and singular values in the quintic's band."""
    generator = torch.Generator().manual_seed(3)
    for shape in ((6, 4), (4, 6), (5, 5)):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        s = np.linalg.svd(orthogonal(gradient).numpy(), compute_uv=False)
        assert 0.6 < s.min() < s.max() < 1.3
        left, _, right = np.linalg.svd(gradient.numpy(), full_matrices=False)
        n = min(shape)
        # The same singular vectors: turned into the gradient's, the update is diagonal.
        turned = left.T @ orthogonal(gradient).numpy() @ right.T
        assert np.abs(turned - np.diag(np.diag(turned))).max() < 1e-10, n

    weight = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.float64))
    optimizer = Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    first = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    weight.grad = first
    optimizer.step()
    expected = 1 * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * orthogonal(first + 0.9 * first)
    torch.testing.assert_close(weight.data, expected, rtol=1e-12, atol=1e-12)
    # Its root mean square is that of an AdamW update, about 0.2 (Liu et al. 2025, section 2.2).
    step = (expected - 0.95) / 0.1
    assert 0.1 < step.square().mean().sqrt() < 0.3


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5), st.floats(0.1, 5))
def test_clip(values, largest):
    parameters = [torch.nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in values]
    for parameter, gradient in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    norm = math.sqrt(sum(v * v for v in values))
    assert clip([part_of("x", parameter) for parameter in parameters], ALONE, largest) == pytest.approx(norm, abs=1e-12)
    scale = min(1.0, largest / (norm + 1e-6))
    assert [p.grad.item() for p in parameters] == pytest.approx([v * scale for v in values], abs=1e-9)


def test_no_clipping_leaves_gradients_alone():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3e4, 4e4])
    assert clip([part_of("x", parameter)], ALONE, 0.0) == 5e4
    assert parameter.grad.tolist() == [3e4, 4e4]


def test_schedules_by_hand():
    plan = Schedule(warmup=10, final=0.1)
    for name in ("cosine", "wsd", "constant"):
        assert lr_factor(replace(plan, name=name), 110, 1) == pytest.approx(0.1)
        assert lr_factor(replace(plan, name=name), 110, 10) == 1.0
    assert lr_factor(plan, 110, 60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(plan, 110, 35) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert lr_factor(plan, 110, 110) == pytest.approx(0.1)
    wsd = replace(plan, name="wsd", decay=20)
    assert lr_factor(wsd, 110, 90) == 1.0
    assert lr_factor(wsd, 110, 100) == pytest.approx(0.55)
    assert lr_factor(wsd, 110, 110) == pytest.approx(0.1)
    assert lr_factor(replace(wsd, decay=0), 100, 80) == 1.0  # a fifth of all
    assert lr_factor(replace(wsd, decay=0), 100, 90) == pytest.approx(0.55)
    assert lr_factor(replace(plan, name="constant"), 110, 110) == 1.0


@given(st.sampled_from(["cosine", "wsd", "constant"]), st.integers(0, 30), st.integers(0, 50), st.integers(1, 60))
def test_schedules_stay_between_and_move_smoothly(name, warmup, decay, steps):
    plan = Schedule(name=name, warmup=warmup, decay=decay, final=0.2)
    factors = [lr_factor(plan, steps, step) for step in range(1, steps + 1)]
    assert all(0 < factor <= 1 for factor in factors)
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)


def test_state_goes_out_and_comes_back_by_name():
    def trained(steps):
        torch.manual_seed(0)
        model = Transformer(SHAPE)
        model.initialize(0)
        optimizer = optimizer_of(model, replace(Optim(), name="muon"))
        for step in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (step + 1)) + parameter.detach()
            optimizer.step(1e-2)
        return model, optimizer

    model, optimizer = trained(3)
    state = {name: shard.tensor.clone() for name, shard in optimizer.state().items()}
    kinds = {name.rsplit(".", 1)[1] for name in state}
    assert kinds == {"momentum", "exp_avg", "exp_avg_sq", "step"}
    fresh_model, fresh = trained(0)
    fresh.make_room({name: tensor.shape for name, tensor in state.items()})
    room = fresh.state()
    assert set(room) == set(state)
    for name, shard in room.items():
        shard.tensor.copy_(state[name])
    fresh_model.load_state_dict(model.state_dict())
    for one, other in ((model, optimizer), (fresh_model, fresh)):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
        other.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh_model.parameters(), strict=True))
