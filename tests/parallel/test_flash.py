"""One block of attention and its gradients, against the formula by autograd; and blocks merged, against all keys at once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outlast.parallel import flash

KINDS = ((4, 4), (4, 2), (3, 1))
"""Query and key/value heads."""


def drawn(heads, kv, queries=5, keys=9, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, queries, heads, 8), (2, keys, kv, 8), (2, keys, kv, 8))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def formula(q, k, v, causal):
    """(B L H K) and (B M G K): mixed values and log-sum-exps (B L H)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("blhk,bmhk->bhlm", q, k) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhlm,bmhk->blhk", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


@pytest.fixture(params=["kernel", "plain"])
def kernel(request, monkeypatch):
    """Torch's CPU kernel, or what stands in for one on devices whose kernels do not take the type."""
    if request.param == "plain":
        monkeypatch.setattr(
            flash._aten, "_scaled_dot_product_flash_attention_for_cpu", lambda q, k, v, _, causal: flash._plain(q, k, v, causal)
        )  # fmt: skip
        monkeypatch.setattr(
            flash._aten, "_scaled_dot_product_flash_attention_for_cpu_backward",
            lambda grad, q, k, v, out, lse, _, causal: flash._plain_backward(grad, q, k, v, out, lse, causal),
        )  # fmt: skip


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("heads", "kv"), KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_block(heads, kv, causal):
    q, k, v = (x.requires_grad_() for x in drawn(heads, kv, 9))
    out, lse = formula(q, k, v, causal)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        ours, sums = flash.attend(q, k, v, causal)
        grads = flash.attend_backward(grad, q, k, v, ours, sums, causal)
    torch.testing.assert_close(ours, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(sums, lse, rtol=1e-13, atol=1e-13)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("heads", "kv"), KINDS)
def test_gradients_of_a_remote_block_are_its_summands(heads, kv):
    """cases: diffusers#14265, Megatron-LM#1464: dk and dv of each of three blocks of keys, none of them the first again."""
    q, k, v = (x.requires_grad_() for x in drawn(heads, kv))
    out, lse = formula(q, k, v, causal=False)
    grad = torch.ones_like(out)
    of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), grad)
    cuts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    with torch.no_grad():
        parts = [flash.attend_backward(grad, q, k[:, cut], v[:, cut], out, lse, causal=False) for cut in cuts]
    torch.testing.assert_close(sum(dq for dq, _, _ in parts), of_q, rtol=1e-12, atol=1e-13)
    for cut, (_, dk, dv) in zip(cuts, parts, strict=True):
        torch.testing.assert_close(dk, of_k[:, cut], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dv, of_v[:, cut], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_sum_exps_are_float32_or_finer(dtype):
    _, sums = flash.attend(*drawn(4, 2, dtype=dtype), causal=False)
    assert sums.dtype == torch.float32


def test_on_cuda_shapes_and_signatures_fit():
    """No device here: torch's own description of its CUDA kernels says whether we call them as they want to be."""
    with FakeTensorMode():
        q = torch.empty(2, 16, 4, 64, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, 32, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out, lse = flash.attend(q, k, v, causal=False)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        assert lse.dtype == torch.float32
        grads = flash.attend_backward(out, q, k, v, out, lse, causal=False)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_what_cudas_kernel_does_not_take():
    taken = [(torch.bfloat16, 64), (torch.bfloat16, 12), (torch.float32, 64)]
    assert [flash._flash_on_cuda(torch.empty(1, 1, 1, k, dtype=dtype)) for dtype, k in taken] == [True, False, False]
