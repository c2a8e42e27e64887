"""The output projection and cross entropy in one function are the two in a row."""

import pytest
import torch
import torch.nn.functional as F

from outlast.data import IGNORED
from outlast.model import loss as loss_module
from outlast.model.loss import loss, sum_dtype

WIDE = [torch.float32, torch.float64, torch.bfloat16]


def random(*size, dtype=torch.float64, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 22], ids=["a row a block", "some rows", "one block"])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(at_once, seed, monkeypatch):
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", at_once)
    hidden, weight = random(3, 11, 8, seed=seed).requires_grad_(), random(23, 8, seed=9).requires_grad_()
    targets = torch.randint(23, (3, 11), generator=torch.Generator().manual_seed(seed))
    targets[torch.rand(3, 11, generator=torch.Generator().manual_seed(seed)) < 0.3] = IGNORED
    mine = loss(hidden, weight, targets)
    grads = torch.autograd.grad(mine * 0.37, (hidden, weight))
    logits = hidden @ weight.T
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    wanted = torch.autograd.grad(theirs * 0.37, (hidden, weight))
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=0)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert (grads[0][targets == IGNORED] == 0).all()


@pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
def test_the_loss_gives_only_the_gradients_that_are_wanted(wants):
    hidden, weight = random(2, 5, 8).requires_grad_(wants[0]), random(23, 8).requires_grad_(wants[1])
    targets = torch.arange(10).view(2, 5)
    mine = loss(hidden, weight, targets)
    whole = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    assert mine.requires_grad == any(wants)
    torch.testing.assert_close(mine, whole, rtol=1e-13, atol=0)
    for tensor, wanted in zip((hidden, weight), wants, strict=True):
        if wanted:
            mine_grad, theirs = (torch.autograd.grad(one, tensor, retain_graph=True)[0] for one in (mine, whole))
            torch.testing.assert_close(mine_grad, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("batch", [2, 0])
def test_nothing_learned_is_a_loss_of_zero(dtype, batch):
    hidden = random(batch, 5, 8, dtype=dtype).requires_grad_()
    weight = random(23, 8, dtype=sum_dtype(dtype)).requires_grad_()
    nothing = loss(hidden, weight, torch.full((batch, 5), IGNORED))
    nothing.backward()
    assert nothing.item() == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_evaluation_makes_no_gradients(monkeypatch):
    hidden, weight, targets = random(1, 4, 8), random(23, 8).requires_grad_(), torch.arange(4)[None]
    trained = loss(hidden, weight, targets)
    monkeypatch.setattr(torch, "zeros_like", None)  # what the weight's gradient would be made with
    with torch.no_grad():
        assert torch.equal(loss(hidden, weight, targets), trained)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    hidden = torch.full((1, 2, 1), 300.0, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    targets = torch.tensor([[0, 1]])
    mine = loss(hidden, weight, targets)
    mine.backward()
    assert mine.item() == pytest.approx(600.0)
    assert torch.isfinite(hidden.grad).all()
