"""The decoder: Llama's block, with Qwen2's biases and Qwen3's query/key norms as options.

It reads as if for one device. What a parallelism may need to do otherwise goes through five *seams*, each a plain
function here: ``embed``, ``project_in``, ``attend``, ``project_out`` and ``loss``. Parameters are named as in Hugging
Face directories, less their leading ``model.``.

Shapes: B sequences, S tokens in each, D hidden_size, H query heads, G key/value heads, K head_dim, F
intermediate_size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from outlast.config import Model
from outlast.model import rotary
from outlast.model.loss import loss, sum_dtype
from outlast.model.pointwise import gated, rms_norm
from outlast.model.randomness import dropout_mask, fill_normal, key_of
from outlast.places import Place


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a batch stand.

    Attributes:
        samples_B: global count of each sequence's sample since the start of the run; dropout hangs on it.
        positions_BS: position of each token in its document, from 0; rotary angles hang on it.
        documents: for each sequence, the lengths of the stretches of tokens that may see each other, in order.
        stream_BR: place in its sequence of each token whose residual stream is here: 0 to S-1, or some of them where a
            parallelism shares the stream; dropout hangs on it too. One row where it is alike for all sequences.
    """

    samples_B: Int64[Tensor, "B"]
    positions_BS: Int64[Tensor, "_ _"]
    documents: tuple[tuple[int, ...], ...]
    stream_BR: Int64[Tensor, "_ R"]

    @classmethod
    def of(cls, samples_B: Tensor, positions_BS: Tensor, documents: tuple[tuple[int, ...], ...]) -> "Packing":
        """That of sequences whose whole residual stream is here."""
        return cls(
            samples_B, positions_BS, documents, torch.arange(positions_BS.shape[1], device=positions_BS.device)[None]
        )


def embed(tokens_BS: Int64[Tensor, "B S"], weight_VD: Float[Tensor, "V D"]) -> Float[Tensor, "B S D"]:
    """Seam: the embedding of each token, in the weight's type."""
    return F.embedding(tokens_BS, weight_VD)


def project_in(x_BSD: Float[Tensor, "B S D"], into: Sequence[nn.Linear]) -> tuple[Float[Tensor, "B S _"], ...]:
    """Seam: the products that enter attention (q, k, v) or feed-forward (gate, up), in the type of `x_BSD`."""
    return tuple(linear(x_BSD, one) for one in into)


def project_out(x_BSF: Float[Tensor, "B S F"], out: nn.Linear) -> Float[Tensor, "B S D"]:
    """Seam: the product that leaves attention or feed-forward."""
    return linear(x_BSF, out)


def linear(x: Float[Tensor, "*batch I"], layer: nn.Linear) -> Float[Tensor, "*batch O"]:
    """A product in the type of `x`, whatever type the weight is kept in."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def attend(
    q_BSHK: Float[Tensor, "B S H K"],
    k_BSGK: Float[Tensor, "B S G K"],
    v_BSGK: Float[Tensor, "B S G K"],
    packing: Packing,
    layer: int,
) -> Float[Tensor, "B S H K"]:
    """Seam: causal attention inside each document; query head h reads key/value head h // (H / G).

    Documents are attended to one after the other: what they may not see is skipped rather than masked. `layer` is the
    block's number, for who keeps keys and values from one call to the next.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    if all(len(lengths) == 1 for lengths in packing.documents):
        return _causal(q, k, v).transpose(1, 2)
    sequences = []
    for i, lengths in enumerate(packing.documents):
        parts = zip(*(x[i : i + 1].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        sequences.append(torch.cat([_causal(*part) for part in parts], dim=2))
    return torch.cat(sequences).transpose(1, 2)


def _causal(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=True)


@dataclass(frozen=True)
class Seams:
    """The five functions a parallelism may fill in."""

    embed: Callable[..., Tensor] = embed
    project_in: Callable[..., tuple[Tensor, ...]] = project_in
    attend: Callable[..., Tensor] = attend
    project_out: Callable[..., Tensor] = project_out
    loss: Callable[..., Tensor] = loss


class Norm(nn.Module):
    """Root-mean-square norm with a scale a channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, self.eps)


class Dropout:
    """Zero channels at one site of one layer, by the place a value stands at and not by the order of drawing."""

    def __init__(self, probability: float, seed: int, layer: int, site: str) -> None:
        self.probability, self.key = probability, key_of(seed, "dropout", layer, site)

    def __call__(self, x_BSD: Float[Tensor, "B S D"], packing: Packing, training: bool) -> Float[Tensor, "B S D"]:
        """Drop and scale up what is kept; outside training, nothing."""
        if not (training and self.probability):
            return x_BSD
        kept_BSD = dropout_mask(self.key, self.probability, packing.samples_B, packing.stream_BR, x_BSD.shape[2])
        return x_BSD * (kept_BSD * (1 / (1 - self.probability))).to(x_BSD.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Source: Ainslie et al. 2023 (arXiv 2305.13245)."""

    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=shape.out_bias)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, seams: Seams) -> Tensor:
        """Mix the tokens of (B S D) along S."""
        projected = seams.project_in(x_BSD, (self.q_proj, self.k_proj, self.v_proj))
        q_BSHK, k_BSGK, v_BSGK = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        q_BSHK = rotary.rotate(self.q_norm(q_BSHK), *angles)
        k_BSGK = rotary.rotate(self.k_norm(k_BSGK), *angles)
        return seams.project_out(seams.attend(q_BSHK, k_BSGK, v_BSGK, packing, self.layer).flatten(-2), self.o_proj)


class FeedForward(nn.Module):
    """Gated feed-forward. Source: Shazeer 2020 (arXiv 2002.05202), SwiGLU."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x_BSD: Tensor, seams: Seams) -> Tensor:
        """Mix the channels of (B S D) along D."""
        gate_BSF, up_BSF = seams.project_in(x_BSD, (self.gate_proj, self.up_proj))
        return seams.project_out(gated(gate_BSF, up_BSF), self.down_proj)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normed before and added to the residual stream."""

    def __init__(self, shape: Model, layer: int, seed: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.drop_attention = Dropout(shape.dropout, seed, layer, "attention")
        self.drop_mlp = Dropout(shape.dropout, seed, layer, "mlp")

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, seams: Seams) -> Tensor:
        """Add both to the residual stream (B S D)."""
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), angles, packing, seams)
        x_BSD = x_BSD + self.drop_attention(attended_BSD, packing, self.training)
        fed_BSD = self.mlp(self.post_attention_layernorm(x_BSD), seams)
        return x_BSD + self.drop_mlp(fed_BSD, packing, self.training)


class Transformer(nn.Module):
    """The model.

    Args:
        shape: the [model] knobs; `vocab_size` set.
        compute: type of activations and products. Weights are kept in float32, or in float64 with it.
        seed: of dropout. :meth:`initialize` takes the seed of the weights.
    """

    def __init__(self, shape: Model, compute: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.shape, self.compute, self.seams = shape, compute, Seams()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.drop_embedding = Dropout(shape.dropout, seed, -1, "embedding")
        self.layers = nn.ModuleList(Block(shape, layer, seed) for layer in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.to(sum_dtype(compute))
        self.tie()
        self.frequencies, self.rotary_factor = rotary.frequencies(shape)

    def tie(self) -> None:
        """Make the output projection the embedding, where the shape says so."""
        if self.shape.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def on(cls, device: torch.device, shape: Model, compute: torch.dtype, seed: int) -> "Transformer":
        """Build with random weights straight on the device: a weight is drawn where it is kept."""
        with torch.device("meta"):
            model = cls(shape, compute, seed)
        model.take_memory(device)
        model.initialize(seed)
        return model

    def take_memory(self, device: torch.device) -> None:
        """Give a model built on the meta device its memory, not yet filled."""
        self.to_empty(device=device)
        self.tie()  # torch gave each module memory of its own
        self.frequencies, self.rotary_factor = rotary.frequencies(self.shape)
        self.frequencies = self.frequencies.to(device)

    @torch.no_grad()
    def initialize(self, seed: int, parts: Iterable[tuple[str, Tensor, Place]] | None = None) -> None:
        """Give every parameter its initial value: norms 1, biases 0, matrices normal.

        The projections into the residual stream get a smaller deviation, since 2 num_layers of them add up in it.
        Source: Radford et al. 2019 (GPT-2), section 2.3.

        Args:
            seed: of the weights.
            parts: name, memory and place of what is here of each parameter; None where all of it is.
        """
        into_residual = self.shape.init_std / (2 * self.shape.num_layers) ** 0.5
        whole = ((name, p, Place.all_of(tuple(p.shape))) for name, p in self.named_parameters())
        for name, part, place in whole if parts is None else parts:
            if len(place.whole) == 1:
                part.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                leaves = name.endswith(("o_proj.weight", "down_proj.weight"))
                fill_normal(part, into_residual if leaves else self.shape.init_std, seed, name, place)

    def hidden(self, tokens_BS: Int64[Tensor, "B S"], packing: Packing) -> Float[Tensor, "_ _ D"]:
        """The last norm's output, in the compute type."""
        x_BSD = self.seams.embed(tokens_BS, self.embed_tokens.weight).to(self.compute)
        x_BSD = self.drop_embedding(x_BSD, packing, self.training)
        angles = rotary.cos_sin(packing.positions_BS, self.frequencies, self.rotary_factor)
        for block in self.layers:
            x_BSD = block(x_BSD, angles, packing, self.seams)
        return self.norm(x_BSD)

    def forward(
        self, tokens_BS: Int64[Tensor, "B S"], targets_BS: Int64[Tensor, "B S"], packing: Packing
    ) -> Float[Tensor, ""]:
        """The loss, summed over the targets that are learned. Divide it by their count over the whole step."""
        return self.seams.loss(self.hidden(tokens_BS, packing), self.lm_head.weight, targets_BS)

    def logits(self, tokens_BS: Int64[Tensor, "B S"], packing: Packing) -> Float[Tensor, "B S V"]:
        """What the model expects next at every place, float32 or finer: for those who look, not for training."""
        logits_BSV = linear(self.hidden(tokens_BS, packing), self.lm_head)
        return logits_BSV.to(sum_dtype(self.compute))

    def fill(self, **seams: Any) -> None:
        """Replace some of the seams."""
        self.seams = dataclasses.replace(self.seams, **seams)
