"""Bytes and operations of a model by closed formula. No torch."""

from dataclasses import dataclass
from typing import Final

from outlast.config import Model

BYTES: Final = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, by type."""

PEAK_FLOPS: Final = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second, by a part of the device's name. Source: NVIDIA's data sheets, SXM versions."""


def peak_flops(device: str) -> float | None:
    """A device's peak in dense bfloat16, in operations a second, by its name; None where it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)


def parameters(shape: Model) -> dict[str, int]:
    """Count the parameters, by part: embedding, output (0 where tied), each layer's matrices, and all norms and biases."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
    small = 2 * shape.hidden_size + shape.qk_norm * 2 * shape.head_dim
    small += shape.qkv_bias * (query + 2 * key) + shape.out_bias * shape.hidden_size
    small += shape.mlp_bias * (2 * shape.intermediate_size + shape.hidden_size)
    embedding = shape.vocab_size * shape.hidden_size
    return {
        "embedding": embedding,
        "output": 0 if shape.tie_embeddings else embedding,
        "matrices": shape.num_layers * matrices,
        "norms and biases": shape.num_layers * small + shape.hidden_size,
    }


@dataclass(frozen=True)
class StateBytes:
    """What one rank keeps between steps, in bytes."""

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.moments


def state(shape: Model, dtype: str, optimizer: str) -> StateBytes:
    """Weights, gradients and moments of one rank that holds the whole model.

    Args:
        shape: the [model] knobs.
        dtype: the compute type: weights are float32 under bfloat16.
        optimizer: `adamw` keeps two moments a weight; `muon` one for the matrices it has, which are the layers'.
    """
    each = max(BYTES[dtype], BYTES["float32"])
    count = parameters(shape)
    all_of_them = sum(count.values())
    moments = 2 * all_of_them - (count["matrices"] if optimizer == "muon" else 0)
    return StateBytes(all_of_them * each, all_of_them * each, moments * each)


def activations(shape: Model, dtype: str, sequences: int, length: int) -> int:
    """Bytes kept from the forward to the backward pass of one rank's micro-batch, dropout off, several documents a sample.

    A block keeps, for each token: its input and the input of its second norm, both norms' outputs (4 D); queries and
    attention's output, twice where documents are attended to one by one and then joined (3 H K); keys and values
    (2 G K); gate, up and their product (3 F); all in the compute type. And in float32 or above the two norms' scales
    and attention's log-sum-exp a head. Under bfloat16 also each weight as it was multiplied. Around the blocks: tokens,
    cosines and sines, the last norm's input, and the loss's gradients of hidden states and output projection.
    """
    each, exact = BYTES[dtype], max(BYTES[dtype], BYTES["float32"])
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block = each * (4 * shape.hidden_size + 3 * query + 2 * key + 3 * shape.intermediate_size) + exact * (
        2 + shape.num_heads
    )
    around = each * 2 * shape.hidden_size + exact + BYTES["float32"] * shape.head_dim + 8
    cast = each * parameters(shape)["matrices"] if each < exact else 0
    gradient = exact * shape.vocab_size * shape.hidden_size
    return sequences * length * (shape.num_layers * block + around) + cast + gradient


def flops_per_token(shape: Model, sequence_length: int) -> int:
    """Operations of the model to learn from one token, forward and backward, recomputation not counted.

    Two a weight and token forward, four backward; the embedding is looked up, not multiplied. Attention is counted over
    the whole sequence, causal or not, as is usual for MFU. Source: Chowdhery et al. 2022 (arXiv 2204.02311) appendix B.
    """
    count = parameters(shape)
    multiplied = count["matrices"] + shape.vocab_size * shape.hidden_size
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * sequence_length
    return 6 * multiplied + attention
