"""The norm and the gated unit with their backward passes written out, so that they keep only their inputs.

Left to autograd the norm would keep its input normalised as well, and the gate its activation as well: a third of what
a block keeps for the backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from outlast.model.loss import sum_dtype


def rms_norm(x: Float[Tensor, "*batch D"], weight_D: Float[Tensor, "D"], eps: float) -> Float[Tensor, "*batch D"]:
    """Divide by the root mean square and scale each channel, in float32 or above; the result in the type of `x`.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467) equation 4.
    """
    return _RMSNorm.apply(x, weight_D, eps)


def gated(gate: Float[Tensor, "*batch F"], up: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
    """SwiGLU: silu(gate) * up. Source: Shazeer 2020 (arXiv 2002.05202) equation 6, without the projections."""
    return _Gated.apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    """y = n w with n = x r and r = 1 / sqrt(mean(x^2) + eps); dx = r (w dy - n mean(n w dy)); dw = sum(n dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        exact = x.to(sum_dtype(x.dtype))
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight_D, scale)
        return (exact * scale).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grads[0].to(scale.dtype)
        grad_weight_D = (grad * normed).flatten(0, -2).sum(0).to(weight_D.dtype)
        scaled = grad * weight_D
        along = (scaled * normed).mean(-1, keepdim=True)
        return (scaled - normed.mul_(along)).mul_(scale).to(x.dtype), grad_weight_D, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])
