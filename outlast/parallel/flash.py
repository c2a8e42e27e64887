"""Attention over one block of keys with its log-sum-exp, forward and backward: torch's flash kernels behind one function.

Shapes: B sequences, L queries, M keys, H query heads, G key/value heads, K head_dim.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from outlast.model.loss import sum_dtype

_aten = torch.ops.aten


def attend(
    q_BLHK: Float[Tensor, "B L H K"], k_BMGK: Float[Tensor, "B M G K"], v_BMGK: Float[Tensor, "B M G K"], causal: bool
) -> tuple[Float[Tensor, "B L H K"], Float[Tensor, "B L H"]]:
    """What queries take from some keys, and the log-sum-exp of their scores, by which several such are merged.

    Args:
        q_BLHK: queries, at least one; no kernel takes none.
        k_BMGK: keys, at least one.
        v_BMGK: values.
        causal: whether query i sees keys 0 to i only, L = M; else every query sees every key, so no row is without one.

    Returns:
        The mixed values, in the queries' type; the log-sum-exp in float32 or finer.

    Source: Dao 2023 (arXiv 2307.08691), section 3.1.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BMGK, v_BMGK))
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif _flash_on_cuda(q):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = _plain(q, k, v, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad_BLHK: Float[Tensor, "B L H K"],
    q_BLHK: Float[Tensor, "B L H K"],
    k_BMGK: Float[Tensor, "B M G K"],
    v_BMGK: Float[Tensor, "B M G K"],
    out_BLHK: Float[Tensor, "B L H K"],
    lse_BLH: Float[Tensor, "B L H"],
    causal: bool,
) -> tuple[Float[Tensor, "B L H K"], Float[Tensor, "B M G K"], Float[Tensor, "B M G K"]]:
    """Gradients of queries, keys and values of one block, given what all blocks together came to.

    The output and log-sum-exp of *all* the keys a query sees make a block's gradients its summands of the whole ones.

    Source: Liu et al. 2023 (arXiv 2310.01889), appendix A.
    """
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BLHK, q_BLHK, k_BMGK, v_BMGK, out_BLHK))
    lse = lse_BLH.transpose(1, 2)
    if q.device.type == "cpu":
        back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = back(grad, q, k, v, out, lse, 0.0, causal)
    elif _flash_on_cuda(q):
        nothing = q.new_empty(0, dtype=torch.int64)  # the state of a dropout there is none of
        lengths = (None, None, q.shape[2], k.shape[2])
        back = _aten._scaled_dot_product_flash_attention_backward
        grads = back(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, nothing, nothing)
    else:
        grads = _plain_backward(grad, q, k, v, out, lse, causal)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _flash_on_cuda(q: Tensor) -> bool:
    """Whether CUDA's flash kernel takes it; it knows 16-bit types and heads of a multiple of 8 channels."""
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scores (B H L M) of (B H L K) and (B G M K), in float32 or finer, those that are not seen at -inf."""
    exact = sum_dtype(q.dtype)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.to(exact) @ k.to(exact).mT / q.shape[-1] ** 0.5
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same without a kernel, memory quadratic in the block: for what CUDA's does not take."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shared = q.shape[1] // k.shape[1]
    chances = (_scores(q, k, causal) - lse[..., None]).exp()
    exact = chances.dtype
    grad, wide_q, wide_k, wide_v = (x.to(exact) for x in (grad, q, k, v))
    wide_k, wide_v = (x.repeat_interleave(shared, dim=1) for x in (wide_k, wide_v))
    along = (grad * out.to(exact)).sum(-1, keepdim=True)
    of_scores = chances * (grad @ wide_v.mT - along) / q.shape[-1] ** 0.5
    of_k, of_v = of_scores.mT @ wide_q, chances.mT @ grad
    summed = (x.unflatten(1, (-1, shared)).sum(2) for x in (of_k, of_v))
    of_k, of_v = summed
    return (of_scores @ wide_k).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)
