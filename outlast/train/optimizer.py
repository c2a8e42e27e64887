"""How weights are updated: the parameter groups, the optimizers, the learning rate, and their state by name."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outlast.checkpoint.shards import Shard
from outlast.config import Optim, Run, Schedule
from outlast.model.loss import sum_dtype
from outlast.parallel import matrices
from outlast.parallel.copies import Copies
from outlast.parallel.gradients import Part, norm
from outlast.parallel.mesh import Mesh
from outlast.places import Place


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    name: str
    optimizer: str
    weight_decay: float
    parameters: dict[str, nn.Parameter]


def groups(named: Mapping[str, nn.Parameter], optim: Optim) -> list[Group]:
    """Sort the parameters, or a rank's parts of them: matrices decay; embeddings, norms and biases do not.

    An output projection of its own is a matrix and decays; tied to the embedding it is the embedding. Under Muon the
    matrices inside the blocks are orthogonalised, all else is AdamW's.
    """
    hidden = {n: p for n, p in named.items() if p.dim() == 2 and n.startswith("layers.")}
    output = {n: p for n, p in named.items() if n == "lm_head.weight"}
    embeddings = {n: p for n, p in named.items() if n == "embed_tokens.weight"}
    biases = {n: p for n, p in named.items() if n.endswith(".bias")}
    norms = {n: p for n, p in named.items() if n not in hidden | output | embeddings | biases}
    return [
        Group(name, optimizer, decay, parameters)
        for name, optimizer, decay, parameters in (
            ("matrices", optim.name, optim.weight_decay, hidden),
            ("output", "adamw", optim.weight_decay, output),
            ("embeddings", "adamw", 0.0, embeddings),
            ("norms", "adamw", 0.0, norms),
            ("biases", "adamw", 0.0, biases),
        )
        if parameters
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix update is made orthogonal, so that no direction of it dominates.

    torch's own rounds the matrix to bfloat16 on the way, where a last-bit difference between two layouts can grow to
    half a percent; here the iteration runs in float32, or in the weights' type if finer.

    Args:
        parameters: matrices, or groups of them.
        lr: learning rate. The update has the root mean square of AdamW's, so that the same rate fits both.
        momentum: decay of the momentum; Nesterov's form.
        weight_decay: decoupled.
        on_whole: applies a function of a whole matrix to updates of which this process may have parts, given also the
            parameters they are for.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the update's scale from Liu
        et al. 2025 (arXiv 2502.16982) equation 4.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        momentum: float,
        weight_decay: float,
        on_whole: Callable[[Callable[[Tensor], Tensor], list[Tensor], list[nn.Parameter]], list[Tensor]] | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._on_whole = on_whole or (lambda work, matrices, _: [work(matrix) for matrix in matrices])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            ahead = []
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                momentum = self.state[parameter]["momentum"]
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                ahead.append(parameter.grad.add(momentum, alpha=group["momentum"]))
            for parameter, update in zip(parameters, self._on_whole(balanced, ahead, parameters), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def balanced(matrix: Float[Tensor, "R C"]) -> Float[Tensor, "R C"]:
    """The matrix made orthogonal, with the root mean square an update by AdamW has."""
    return orthogonal(matrix).mul_(0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Float[Tensor, "R C"]) -> Float[Tensor, "R C"]:
    """The nearest matrix with all singular values about 1 (0.7 to 1.2), by five Newton-Schulz steps.

    Source: Jordan et al. 2024, as above: the quintic with coefficients 3.4445, -4.7750, 2.0315.
    """
    x = matrix.to(sum_dtype(matrix.dtype))
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


@torch.no_grad()
def frozen_step(
    adamw: torch.optim.AdamW, step: int, copies: int, mean: Callable[[list[nn.Parameter], list[Tensor]], None]
) -> None:
    """AdamW when gradients are still each copy's own: the second moment stays as it is, the first is agreed upon.

    A copy adds its own gradient to the momentum that all hold, m <- beta1 m + (1 - beta1) R g_r of R copies, and the mean
    over the copies is what all hold next. The weights move by m / (1 - beta1^step) over sqrt(v / (1 - beta2^n)) + eps, v
    being of n steps: the bias of the first moment goes on shrinking, that of the second is as it was. Nor by more than
    Adam ever does, max(1, (1 - beta1) / sqrt(1 - beta2)) of the rate: a frozen v would let an element that had next to
    no gradient while it was made go as far as the others' scale takes it.

    Args:
        adamw: with moments of exact steps; its own count stays n.
        step: of the run, from 1.
        copies: R.
        mean: takes the mean over the copies, in place, of a value for each of some parameters.

    Source: Tang et al. 2021 (arXiv 2102.02888) algorithm 1; the bound, Kingma and Ba 2014 (arXiv 1412.6980) section 2.1.
    """
    rows = [(group, p, adamw.state[p]) for group in adamw.param_groups for p in group["params"] if p.grad is not None]
    for group, parameter, kept in rows:
        beta1, _ = group["betas"]
        kept["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=(1 - beta1) * copies)
    mean([parameter for _, parameter, _ in rows], [kept["exp_avg"] for _, _, kept in rows])
    for group, parameter, kept in rows:
        beta1, beta2 = group["betas"]
        deviation = (kept["exp_avg_sq"] / (1 - beta2 ** kept["step"].item())).sqrt_().add_(group["eps"])
        most = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_((kept["exp_avg"] / (1 - beta1**step)).div_(deviation).clamp_(-most, most).mul_(group["lr"]))


class Optimizer:
    """The optimizers of a run as one. Each rank updates the parts it keeps.

    Args:
        parts: of the parameters.
        run: its [optim] knobs, and its layout.
        mesh: the grid.

    Attributes:
        copies: how copies of the model sum their gradients. What they owe one another is part of the state.
    """

    def __init__(self, parts: Sequence[Part], run: Run, mesh: Mesh) -> None:
        optim = run.optim
        self.groups = groups({part.name: part.parameter for part in parts}, optim)
        self.parts: dict[Tensor, Part] = {part.parameter: part for part in parts}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.copies = Copies(parts, run, mesh)

        def on_whole(work: Callable[[Tensor], Tensor], mine: list[Tensor], of: list[nn.Parameter]) -> list[Tensor]:
            return matrices.on_whole(work, mine, [self.parts[parameter] for parameter in of], run, mesh)

        for kind in ("adamw", "muon"):
            mine = [
                {"params": list(group.parameters.values()), "weight_decay": group.weight_decay}
                for group in self.groups
                if group.optimizer == kind
            ]
            if mine and kind == "adamw":
                betas = (optim.beta1, optim.beta2)
                self.optimizers.append(torch.optim.AdamW(mine, lr=optim.lr, betas=betas, eps=optim.eps, fused=True))
            elif mine:
                self.optimizers.append(Muon(mine, optim.lr, optim.momentum, optim.weight_decay, on_whole))

    def step(self, lr: float, step: int = 0) -> None:
        """Update the weights by their gradients, and forget these.

        Args:
            lr: learning rate.
            step: its number, from 1, by which copies know how they sum their gradients.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if self.copies.apart(step) and isinstance(optimizer, torch.optim.AdamW):
                frozen_step(optimizer, step, self.copies.size, self._mean)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _mean(self, parameters: list[nn.Parameter], values: list[Tensor]) -> None:
        self.copies.mean([self.parts[parameter] for parameter in parameters], values)

    def state(self) -> dict[str, Shard]:
        """The rank's parts of moments, and step counts, by `optim.PARAMETER.WHICH`; and of what copies owe."""
        return self.copies.state() | {
            f"optim.{part.name}.{which}": Shard(tensor, part.place if tensor.dim() else Place((), (), ()))
            for optimizer in self.optimizers
            for parameter, kept in optimizer.state.items()
            for part in (self.parts[parameter],)
            for which, tensor in kept.items()
        }

    def make_room(self, shapes: dict[str, torch.Size]) -> None:
        """Make the tensors of a saved state, to be loaded into, and take them as the state.

        Args:
            shapes: of a checkpoint's whole tensors by name, others than `optim.` and `owed.` passed over.
        """
        self.copies.make_room(shapes)
        for optimizer in self.optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                part = self.parts[parameter]
                prefix = f"optim.{part.name}."
                optimizer.state[parameter] = {
                    name.removeprefix(prefix): torch.zeros_like(parameter)
                    if shape == part.place.whole
                    else torch.zeros(shape, device=parameter.device)
                    for name, shape in shapes.items()
                    if name.startswith(prefix)
                }


def clip(parts: Sequence[Part], mesh: Mesh, largest: float, apart: bool = False) -> float:
    """Scale all gradients so that their global 2-norm is at most `largest` (0: leave them).

    Args:
        parts: with their gradients.
        mesh: the grid.
        largest: norm to leave.
        apart: gradients are still each copy's own: the bound that :func:`outlast.parallel.gradients.norm` then tells is
            taken for the norm.

    Returns:
        The norm before.
    """
    before = norm(parts, mesh, apart=apart)
    scale = largest / (before + 1e-6) if largest else 1.0
    if scale < 1:
        torch._foreach_mul_([part.parameter.grad for part in parts if part.parameter.grad is not None], scale)
    return before


def lr_factor(schedule: Schedule, steps: int, step: int) -> float:
    """Share of the peak learning rate at a step.

    Args:
        schedule: the [schedule] knobs.
        steps: of the whole run.
        step: from 1.

    Returns:
        Rising in a straight line to 1 at the last step of the warmup; at `steps` it is `final`, but for `constant`.

    Source: cosine: Loshchilov and Hutter 2017 (arXiv 1608.03983) equation 5; warmup-stable-decay: Hu et al. 2024
        (arXiv 2404.06395) section 4.
    """
    if step <= schedule.warmup:
        return step / schedule.warmup
    match schedule.name:
        case "constant":
            return 1.0
        case "cosine":
            done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
            return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
        case "wsd":
            decay = schedule.decay or max(1, steps // 5)
            return 1.0 - (1 - schedule.final) * max(0, step - (steps - decay)) / decay
