"""The hand-written backward passes against finite differences, and what they keep."""

import torch
import torch.nn.functional as F

from outlast.model.pointwise import gated, rms_norm


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients():
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (draw(3, 5, 7), draw(7)))
    assert torch.autograd.gradcheck(gated, (draw(3, 7), draw(3, 7)))


def test_values():
    torch.manual_seed(0)
    x, w, u = draw(4, 6), draw(6), draw(4, 6)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), F.rms_norm(x, (6,), w, 1e-5), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gated(x, u), F.silu(x) * u, rtol=1e-14, atol=1e-14)


def test_low_precision_is_normed_in_float32():
    x = torch.full((1, 256), 300.0, dtype=torch.bfloat16)  # its square is 90,000: fine in float32, coarse in bfloat16
    x[0, 0] = 1.0
    w = torch.ones(256)
    assert rms_norm(x, w, 0.0).dtype == torch.bfloat16
    exact = (x.double() / x.double().square().mean().sqrt()).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, w, 0.0), exact)


def test_only_inputs_are_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)), lambda t: t):
        rms_norm(draw(4, 6), draw(6), 1e-5)
        gated(draw(4, 6), draw(4, 6))
    assert sorted(kept) == [(4, 1), (4, 6), (4, 6), (4, 6), (6,)]
