"""Closed formulas against the model itself."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from outlast.config import Model, Optim
from outlast.model.transformer import Packing, Transformer
from outlast.plan import memory
from outlast.train.optimizer import Optimizer

SHAPES = {
    "llama": Model(vocab_size=257, num_layers=3, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=24),
    "qwen3": Model(vocab_size=33, num_layers=2, hidden_size=40, intermediate_size=56, num_heads=3, num_kv_heads=1, head_dim=8, qk_norm=True, tie_embeddings=False),
    "biases": Model(vocab_size=33, num_layers=1, hidden_size=40, qkv_bias=True, out_bias=True, mlp_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parameters(name):
    model = Transformer(SHAPES[name])
    assert sum(memory.parameters(SHAPES[name]).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_state(dtype, optimizer):
    shape = SHAPES["llama"]
    model = Transformer(shape, getattr(torch, dtype))
    kept = Optimizer(model, replace(Optim(), name=optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = sum(p.grad.nbytes for p in model.parameters())
    kept.step(0.0)
    said = memory.state(shape, dtype, optimizer)
    assert said.weights == sum(p.nbytes for p in model.parameters())
    assert said.gradients == gradients
    # torch counts steps too, a number a tensor
    assert said.moments == sum(t.nbytes for name, t in kept.state().items() if not name.endswith(".step"))


def kept_for_backward(model, batch, length, documents):
    """Bytes of every storage saved for the backward pass, each once, weights as they are kept apart."""
    weights, seen = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no other takes its place
        return tensor

    tokens = torch.randint(0, model.shape.vocab_size, (batch, length))
    packing = Packing(torch.arange(batch), torch.arange(length).repeat(batch, 1), documents)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens.roll(-1, 1), packing)
    return sum(nbytes for nbytes, _ in seen.values())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_activations(dtype):
    shape = replace(SHAPES["llama"], vocab_size=300)
    model = Transformer(shape, getattr(torch, dtype))
    documents = ((100, 28), (28, 50, 50))
    measured = kept_for_backward(model, 2, 128, documents)
    assert memory.activations(shape, dtype, 2, 128) == pytest.approx(measured, rel=0.02)


def test_flops_by_hand():
    # One layer, no attention to speak of: 6 operations a multiplied weight.
    shape = Model(
        vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4
    )
    assert memory.flops_per_token(shape, 0) == 6 * (4 * 4 * 4 + 3 * 4 * 8 + 10 * 4)
    assert memory.flops_per_token(shape, 100) - memory.flops_per_token(shape, 0) == 12 * 4 * 100


def test_llama_3_8b_by_its_published_size():
    shape = Model(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        tie_embeddings=False,
    )  # fmt: skip
    assert sum(memory.parameters(shape).values()) == 8_030_261_248


def test_plan_loads_no_torch_and_fast():
    code = "import sys, outlast.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
