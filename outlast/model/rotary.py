"""Rotary positions: the angle by which each pair of channels is turned."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outlast.config import Model


def frequencies(shape: Model) -> tuple[Float[Tensor, "half"], float]:
    """Radians a position for each channel pair, and the factor on cosines and sines.

    Returns:
        Frequencies of shape (head_dim / 2) in float32, on the CPU: what published weights were trained with, so not
        more exact under float64 either, and rounded in the same order. And the factor, 1 but for yarn.

    Source: Su et al. 2021 (arXiv 2104.09864) equation 15; linear: Chen et al. 2023 (2306.15595); llama3: the Llama 3.1
        model card's released configuration; yarn: Peng et al. 2023 (2309.00071) sections 3.2 and 3.4.
    """
    powers = shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    plain = 1.0 / powers
    match shape.rope_scaling:
        case "none":
            return plain, 1.0
        case "linear":
            return plain / shape.rope_factor, 1.0
        case "llama3":
            turns = shape.rope_original / (2 * math.pi / plain)
            keep = ((turns - shape.rope_low) / (high(shape) - shape.rope_low)).clamp(0, 1)
            return (1 - keep) * plain / shape.rope_factor + keep * plain, 1.0
        case "yarn":
            first, last = _pair_turning(shape, high(shape)), _pair_turning(shape, shape.rope_low)
            first, last = max(math.floor(first), 0), min(math.ceil(last), shape.head_dim - 1)
            pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32)
            keep = 1 - ((pairs - first) / ((last - first) or 1)).clamp(0, 1)
            factor = shape.rope_attention or 0.1 * math.log(max(shape.rope_factor, 1.0)) + 1.0
            return 1.0 / (shape.rope_factor * powers) * (1 - keep) + plain * keep, factor


def high(shape: Model) -> float:
    """Turns over the original context above which a frequency is left alone."""
    return shape.rope_high or {"llama3": 4.0, "yarn": 32.0}.get(shape.rope_scaling, 1.0)


def _pair_turning(shape: Model, turns: float) -> float:
    """The (fractional) channel pair that turns so many times over the original context."""
    return shape.head_dim * math.log(shape.rope_original / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))


def cos_sin(
    positions: Int64[Tensor, "*batch S"], frequencies: Float[Tensor, "half"], factor: float
) -> tuple[Float[Tensor, "*batch S 1 half"], Float[Tensor, "*batch S 1 half"]]:
    """Cosine and sine of every token's angles, in float32, ready to broadcast over heads."""
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor


def rotate(
    x_BSHK: Float[Tensor, "B S H K"], cos: Float[Tensor, "*batch S 1 half"], sin: Float[Tensor, "*batch S 1 half"]
) -> Float[Tensor, "B S H K"]:
    """Turn channel i with channel i + K/2; the sums are made in float32 or above."""
    first, second = x_BSHK.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHK.dtype)
