"""What a rank keeps of the parameters, and what is left to do once passes are over: sums of gradients, their norm."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from outlast import layout
from outlast.config import Run
from outlast.parallel.mesh import Mesh
from outlast.places import Place


@dataclass(frozen=True)
class Part:
    """What this rank keeps of a parameter.

    Attributes:
        name: of the parameter.
        parameter: the part, an ordinary tensor that shares its memory with the model's; what the optimizer updates.
        place: where it lies in the whole.
        summed: over which ranks its gradient is in pieces after the backward pass, of :data:`outlast.layout.SUMMED`.
        alike: axes along which every rank keeps the same part.
        source: the model's own parameter, which has the gradient.
    """

    name: str
    parameter: nn.Parameter
    place: Place
    summed: tuple[str, ...]
    alike: tuple[str, ...]
    source: nn.Parameter


def local(tensor: Tensor) -> Tensor:
    """The rank's part of a tensor that FSDP2 may have sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts(model: nn.Module, run: Run, mesh: Mesh) -> list[Part]:
    """The parts this rank keeps of a model's parameters, in the model's order."""
    found = []
    for name, source in model.named_parameters():
        mine = nn.Parameter(local(source.detach())) if isinstance(source, DTensor) else source
        place = layout.place(name, run.model, run.parallel, mesh.rank)
        split = dict.fromkeys(layout.joint(run.parallel)["shard"], layout.fsdp_shards(name))
        split["tp"] = layout.tp_dim(name, run.model, run.parallel.tp) is not None
        alike = tuple(axis for axis in layout.AXES if axis in mesh.axes and not split.get(axis, False))
        found.append(Part(name, mine, place, layout.summed(name, run.model, run.parallel), alike, source))
    return found


def let_go(model: nn.Module) -> None:
    """Keep none of the weights that FSDP2 has gathered, after passes without a backward one, which would let go of them."""
    if isinstance(model, FSDPModule):
        model.reshard()


def complete(parts: Iterable[Part], mesh: Mesh) -> None:
    """Hand the model's gradients to the parts, summed over all ranks that have a piece of them."""
    for part in parts:
        grad, part.source.grad = part.source.grad, None
        part.parameter.grad = None if grad is None else local(grad)
    for axis in layout.SUMMED:
        for bucket in _buckets([part for part in parts if axis in part.summed]):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            mesh.axes[axis].all_reduce(flat)
            for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(total.view_as(grad))


def _buckets(parts: Sequence[Part]) -> Iterator[list[Tensor]]:
    """The gradients that travel together: small ones all at once, matrices a block at a time to bound the copy."""
    small = [part for part in parts if len(part.place.shape) == 1]
    matrices = [part for part in parts if len(part.place.shape) > 1]
    blocks = (list(block) for _, block in groupby(matrices, lambda part: part.name.split(".")[:2]))
    for bucket in (small, *blocks):
        if grads := [part.parameter.grad for part in bucket if part.parameter.grad is not None]:
            yield grads


def norm(parts: Iterable[Part], mesh: Mesh, order: float = 2.0) -> float:
    """The norm of all gradients as one vector, each element counted once whatever the layout.

    Args:
        parts: with their gradients complete.
        mesh: the grid.
        order: 2, or infinity for the largest element.
    """
    mine = [
        p.parameter.grad
        for p in parts
        if p.parameter.grad is not None and p.place.elements and mesh.first_along(*p.alike)
    ]
    norms = (
        torch.stack(torch._foreach_norm(mine, order)).double() if mine else torch.zeros(1, device=mesh.device).double()
    )
    if order == math.inf:
        largest = norms.max()
        return (mesh.world.all_reduce(largest, largest=True) if mesh.world else largest).item()
    return math.sqrt(mesh.sum(norms.square().sum()).item())
