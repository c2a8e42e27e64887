"""The rank grid: where this rank stands, and whom it talks to along each axis."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, cast

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from outlast import layout
from outlast.comm.collectives import Axis, Counts
from outlast.config import Parallel
from outlast.links import Choices

_PATIENCE: Final = timedelta(minutes=30)
"""How long a rank waits for the others: an evaluation, a first compilation or a slow disk may hold one up."""


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the grid. An axis of one rank is not in it and costs nothing.

    Attributes:
        parallel: the degrees.
        rank: this rank, of all.
        device: where it computes.
        axes: by name. Besides those of the layout and those of several axes together (:func:`outlast.layout.joint`):
            `world`, all ranks; `checkpoint`, all again, for what is said on the side while the others may be busy.
        sharing: torch's own grid of the ranks that share weights by rows; None where nobody does.
        counts: what was sent.
        hosts: number of the host that each rank is on, once :mod:`outlast.parallel.links` has asked.
        pieces: seconds of a block's products by how many pieces its stream is cut in, where that was measured.
    """

    parallel: Parallel
    rank: int
    device: torch.device
    axes: dict[str, Axis] = field(default_factory=dict)
    sharing: DeviceMesh | None = None
    counts: Counts = field(default_factory=Counts)
    hosts: list[int] = field(default_factory=list)
    pieces: dict[int, float] = field(default_factory=dict)

    @property
    def world(self) -> Axis | None:
        """All ranks; None where there is but one."""
        return self.axes.get("world")

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks, writes and records for all."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        """How many differently fed ranks there are."""
        return layout.data_rank(self.parallel, self.rank)[0]

    @property
    def data_rank(self) -> int:
        """Which of the differently fed ranks this one is."""
        return layout.data_rank(self.parallel, self.rank)[1]

    @property
    def choices(self) -> dict[str, Choices]:
        """The algorithms in force, by axis; empty where the library's own are everywhere."""
        return {axis.name: axis.choices for axis in self.axes.values() if axis.choices is not None}

    def first_along(self, *axes: str) -> bool:
        """Whether this rank is the first along some axes: the one to count what all along them have alike."""
        where = layout.coordinates(self.parallel, self.rank)
        return all(where[axis] == 0 for axis in axes)

    def leave(self) -> None:
        """Part, once all are ready to: nobody's last words are cut off."""
        if self.world is not None:
            self.largest(0)
            dist.destroy_process_group()

    def sum(self, mine: Shaped[Tensor, "*shape"], alike: tuple[str, ...] = ()) -> Shaped[Tensor, "*shape"]:
        """Sum a small tensor over all ranks, in place; of ranks that are alike along some axes, the first counts."""
        if self.world is None:
            return mine
        return self.world.all_reduce(mine if self.first_along(*alike) else mine.zero_())

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.world is None:
            return number
        return int(self.world.all_reduce(torch.tensor(number, device=self.device), largest=True).item())


def make(parallel: Parallel, device: torch.device) -> Mesh:
    """The grid of the ranks that were started, as many as the layout's: :func:`outlast.layout.check` has seen to it.

    The ranks find each other by the launcher's environment (torchrun's names), unless they have already.
    """
    if layout.ranks(parallel) == 1:
        return Mesh(parallel, 0, device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=_PATIENCE)
    sizes = {axis: size for axis, size in layout.degrees(parallel).items() if size > 1}
    grid = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    counts = Counts()
    axes = {axis: Axis(axis, grid.get_group(axis), counts) for axis in sizes}
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group is not initialised")
    axes["world"] = Axis("world", world, counts)
    aside = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    axes["checkpoint"] = Axis("checkpoint", aside, counts)
    grids = {}
    for name, together in layout.joint(parallel).items():
        if more := tuple(axis for axis in together if axis in sizes):
            grids[name] = grid[more[0]] if len(more) == 1 else grid[more]._flatten(name)
            axes[name] = axes[more[0]] if len(more) == 1 else Axis(name, grids[name].get_group(), counts)
    return Mesh(parallel, dist.get_rank(), device, axes, grids.get("shard"), counts)
