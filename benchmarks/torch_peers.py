"""The same training step by torch's own parallelism: what step_time.py holds ours against. Runs inside worker groups.

`tensor_parallel` is a Llama written the usual way and handed to `parallelize_module` with sequence parallel norms,
column-wise, row-wise and a parallel loss, the plan that torch's tutorial and torchtitan use. `sharded` is our own model
under plain `fully_shard`, transfers as gloo has them.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from outlast.config import Model
from outlast.model import rotary
from outlast.model.transformer import Packing, Transformer

LR: Final = 1e-5
CPU: Final = torch.device("cpu")


class Attention(nn.Module):
    """Causal attention, heads as many as the projections leave."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        d, k = shape.hidden_size, shape.head_dim
        self.head_dim = k
        self.q_proj = nn.Linear(d, shape.num_heads * k, bias=False)
        self.k_proj = nn.Linear(d, shape.num_kv_heads * k, bias=False)
        self.v_proj = nn.Linear(d, shape.num_kv_heads * k, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * k, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the tokens of (B S D)."""
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin)
        heads = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the channels of (B S D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both to the stream (B S D)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The model, its parameters named as ours."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits (B S V)."""
        x = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def parallelized(model: Llama, mesh: DeviceMesh) -> None:
    """Spread it over a mesh by torch's plan: sequence parallel between blocks, the logits left in parts."""
    parallelize_module(
        model,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    entering = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(**entering),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def updated(model: nn.Module) -> Callable[[], None]:
    """Clip and update as ours does: decay on matrices but the embedding, fused."""
    decays = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def tensor_parallel(shape: Model, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Callable[[], float]:
    """A step under `parallelize_module`, over all ranks. Calling it returns the mean loss."""
    model = Llama(shape)
    model.load_state_dict(weights)
    parallelized(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    update = updated(model)
    frequencies, factor = rotary.frequencies(shape)
    places = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)

    def step() -> float:
        cos, sin = rotary.cos_sin(places, frequencies, factor)
        with loss_parallel():
            logits = model(tokens, cos, sin)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        update()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def sharded(shape: Model, tokens: Tensor, targets: Tensor) -> Callable[[], float]:
    """A step of our model, weights of seed 0, under plain `fully_shard` over all ranks, on this rank's sequences."""
    model = Transformer.on(CPU, shape, torch.float32, 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    model.train()
    update = updated(model)
    batch, length = tokens.shape
    packing = Packing.of(torch.arange(batch), torch.arange(length).repeat(batch, 1), ((length,),) * batch)

    def step() -> float:
        loss = model(tokens, targets, packing) / tokens.numel()
        loss.backward()
        update()
        told = loss.detach() / dist.get_world_size()
        dist.all_reduce(told)
        return told.item()

    return step
