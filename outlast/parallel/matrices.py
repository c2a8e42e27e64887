"""Work on whole matrices of which each rank keeps a part: each is put together on one rank, and handed back in parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outlast import layout
from outlast.config import Run
from outlast.parallel.gradients import Part
from outlast.parallel.mesh import Mesh
from outlast.places import Place


def on_whole(
    work: Callable[[Tensor], Tensor], mine: Sequence[Tensor], parts: Sequence[Part], run: Run, mesh: Mesh
) -> list[Tensor]:
    """Apply a function of a whole matrix to matrices that are spread over the ranks of one copy of the model.

    The matrices are taken by size, as many at a time as there are ranks, one on each: the work is shared evenly, and no
    rank holds more than one whole matrix.

    Args:
        work: a matrix to one of the same shape and type.
        mine: this rank's part of each.
        parts: which parameters they are of, in the same order on every rank.
        run: its layout and model say how others have split them.
        mesh: the grid.

    Returns:
        This rank's part of each result.
    """
    axis = mesh.axes.get("model")
    if axis is None:
        return [work(one) for one in mine]
    results = [torch.empty_like(one) for one in mine]
    by_size = sorted(range(len(mine)), key=lambda i: parts[i].place.whole)
    for start in range(0, len(by_size), axis.size):
        taken = by_size[start : start + axis.size]
        nothing = mine[0].new_empty(0)
        spare = [nothing] * (axis.size - len(taken))
        places: list[Place] = []
        if axis.rank < len(taken):
            name = parts[taken[axis.rank]].name
            places = [layout.place(name, run.model, run.parallel, rank) for rank in axis.ranks]
        received = [mine[0].new_empty(place.shape) for place in places] or [nothing] * axis.size
        axis.all_to_all([mine[i] for i in taken] + spare, received)
        done = [nothing] * axis.size
        if places:
            whole = mine[0].new_empty(places[0].whole)
            for place, part in zip(places, received, strict=True):
                whole[place.slices] = part
            whole = work(whole)
            done = [whole[place.slices] for place in places]
        axis.all_to_all(done, [results[i] for i in taken] + spare)
    return results
