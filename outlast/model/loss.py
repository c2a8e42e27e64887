"""The output projection and its cross entropy as one function, so that the logits never all exist at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from outlast.data import IGNORED

_LOGITS_AT_ONCE: Final = 1 << 23  # logits alive at a time: 32 MiB in float32 …
_FEWEST_ROWS: Final = 512  # … or those of so many tokens: each block reads and writes the whole projection's gradient


def sum_dtype(compute: torch.dtype) -> torch.dtype:
    """Where sums are taken: float32, or the compute type where that is finer."""
    return torch.promote_types(compute, torch.float32)


def loss(
    hidden_BSD: Float[Tensor, "B S D"], weight_VD: Float[Tensor, "V D"], targets_BS: Int64[Tensor, "B S"]
) -> Float[Tensor, ""]:
    """Cross entropy, **summed** over the tokens that are learned, in nats.

    The caller divides by the step's global count of such tokens, so that neither padding nor unequal ranks bend it.

    Args:
        hidden_BSD: output of the last norm, in the compute type.
        weight_VD: the output projection, of any floating type; its gradient comes in that type.
        targets_BS: the token to predict at each place, or :data:`IGNORED`.

    Returns:
        A scalar, float32 or finer; 0 where nothing is learned.

    Not covered: gradients of gradients.
    """
    learned = targets_BS != IGNORED
    if not torch.is_grad_enabled():  # a Function is told what could have a gradient, not whether one is wanted
        hidden_BSD, weight_VD = hidden_BSD.detach(), weight_VD.detach()
    return _LinearCrossEntropy.apply(hidden_BSD[learned], weight_VD, targets_BS[learned])


@dataclass(frozen=True)
class Columns:
    """Which part of the vocabulary is here, and how several parts are put together.

    Attributes:
        first: the token of the part's first row.
        widest: rows of the largest part, by which all cut their blocks alike.
        merge: from log-sum-exp and target's logit (N each; 0 where the target is elsewhere) of this part to the whole's.
    """

    first: int
    widest: int
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def loss_and_gradients(
    hidden_ND: Float[Tensor, "N D"],
    weight_VD: Float[Tensor, "V D"],
    targets_N: Int64[Tensor, "N"],
    wanted: tuple[bool, bool],
    columns: Columns | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "N D"] | None, Float[Tensor, "V D"] | None]:
    """The summed cross entropy of some tokens and its gradients, a block of rows after the other.

    A block's logits are needed by nothing but its own gradients, so making these at once costs no product more than
    keeping the logits would. Source: Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989), section 3.2.

    Args:
        hidden_ND: output of the last norm where something is learned.
        weight_VD: the output projection, or some rows of it.
        targets_N: what is to be predicted.
        wanted: whether the gradients of the hidden states and of the projection are.
        columns: which rows these are; None where they are all.

    Returns:
        The loss; the gradient of the hidden states, in their type, of these rows alone; and that of the projection, in
        float32 or finer. None for what is not wanted.
    """
    exact = sum_dtype(hidden_ND.dtype)
    product_VD = weight_VD.to(hidden_ND.dtype)
    total = torch.zeros((), dtype=exact, device=hidden_ND.device)
    grad_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact) if wanted[1] else None
    rows = max(_FEWEST_ROWS, _LOGITS_AT_ONCE // (columns.widest if columns else weight_VD.shape[0]))
    for start in range(0, hidden_ND.shape[0], rows):
        block_ND, block_N = hidden_ND[start : start + rows], targets_N[start : start + rows, None]
        logits_NV = (block_ND @ product_VD.T).to(exact)
        chances_NV = torch.log_softmax(logits_NV, dim=-1)
        minus_one = torch.full_like(block_N, -1, dtype=exact)
        if columns is None:
            total -= chances_NV.gather(-1, block_N).sum()
        else:
            block_N = block_N - columns.first
            here = (block_N >= 0) & (block_N < weight_VD.shape[0])
            block_N, minus_one = block_N.where(here, 0), minus_one * here
            sums_N = logits_NV[:, :1] - chances_NV[:, :1]
            whole_N, chosen_N = columns.merge(sums_N[:, 0], (logits_NV.gather(-1, block_N) * here)[:, 0])
            total += (whole_N - chosen_N).sum()
            chances_NV += sums_N - whole_N[:, None]
        del logits_NV
        if grad_hidden_ND is None and grad_weight_VD is None:
            continue
        # d loss / d logits is the softmax, less one at the target.
        grad_NV = chances_NV.exp_().scatter_add_(-1, block_N, minus_one).to(hidden_ND.dtype)
        if grad_hidden_ND is not None:
            torch.mm(grad_NV, product_VD, out=grad_hidden_ND[start : start + rows])
        if grad_weight_VD is not None:
            grad_weight_VD += grad_NV.T @ block_ND
    return total, grad_hidden_ND, grad_weight_VD


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        total, grad_hidden_ND, grad_weight_VD = loss_and_gradients(hidden_ND, weight_VD, targets_N, wanted)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scale = grad_outputs[0]
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return (
            None if grad_hidden_ND is None else (grad_hidden_ND * scale).to(grad_hidden_ND.dtype),
            None if grad_weight_VD is None else (grad_weight_VD * scale).to(ctx.weight_dtype),
            None,
        )
