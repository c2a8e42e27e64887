"""How copies of the model tell each other of their gradients, where less than all is sent, and what each still owes.

Everything else is exact and comes before: here is only the last sum of a step, over `dp_replicate`. What a rank owes
differs from copy to copy, on purpose; gradients, momentum and weights do not.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outlast import layout
from outlast.checkpoint.shards import Shard
from outlast.comm import compress
from outlast.config import Run
from outlast.errors import UsageError
from outlast.parallel.gradients import Part, as_one, buckets
from outlast.parallel.mesh import Mesh
from outlast.places import Place


class Copies:
    """The transfers between copies of the model, with their memory.

    Args:
        parts: of the parameters.
        run: its [parallel] knobs.
        mesh: the grid.

    Attributes:
        size: how many copies.
        owed: by parameter, what this copy has not sent yet: a gradient under top-k, a momentum under 1-bit. One row of the whole's (copies, *shape).
        owed_by_owner: under 1-bit, what the mean of the momenta left out in the rows this copy owns.

    Raises:
        UsageError: top-k cannot number a tensor's elements in 32 bits.
    """

    def __init__(self, parts: Sequence[Part], run: Run, mesh: Mesh) -> None:
        knobs, self.axis = run.parallel, mesh.axes.get("dp_replicate")
        self.kind, self.share, self.exact_steps = knobs.dp_compress, knobs.dp_topk, knobs.dp_exact_steps
        self.size, self.rank = knobs.dp_replicate, layout.coordinates(knobs, mesh.rank)["dp_replicate"]
        self.parts = [part for part in parts if self.kind in ("topk", "onebit") and "dp_replicate" in part.summed]
        self.owed: dict[str, Tensor] = {}
        self.owed_by_owner: dict[str, Tensor] = {}
        self.settle()
        for part in parts if self.kind == "topk" else ():
            if part.place.elements >= 1 << 31:
                raise UsageError(
                    f"{part.name} has {part.place.elements:,} elements on a rank, more than top-k's 32 bits can number",
                    fix="share it among more ranks, or set parallel.dp_compress to bf16 or onebit",
                    key="parallel.dp_compress",
                )

    def apart(self, step: int) -> bool:
        """Whether gradients stay each copy's own in a step, numbered from 1: under 1-bit after the exact ones."""
        return self.kind == "onebit" and step > self.exact_steps

    def sums(self, step: int) -> Callable[[Sequence[Part]], None] | None:
        """What sums gradients over the copies in a step; None where an all-reduce is to."""
        if self.apart(step):
            return lambda _: None
        return {"bf16": self._rounded, "topk": self._largest}.get(self.kind)

    def _rounded(self, parts: Sequence[Part]) -> None:
        axis = self._among()
        for bucket in buckets(parts):
            as_one(bucket, lambda flat: compress.sum_rounded(flat, axis))

    def _largest(self, parts: Sequence[Part]) -> None:
        for bucket in buckets(parts):
            owed = [self.owed[part.name][0] for part in bucket]
            grads = [part.parameter.grad for part in bucket if part.parameter.grad is not None]  # all have
            torch._foreach_add_(owed, grads)
            torch._foreach_copy_(grads, compress.sum_largest(owed, self.share, self._among()))

    def mean(self, parts: Sequence[Part], values: Sequence[Tensor]) -> None:
        """The mean of the copies' values, one for each part, in place, sent as signs and scales."""
        owed = [self.owed[part.name][0] for part in parts]
        compress.mean_of_signs(values, owed, [self.owed_by_owner[part.name] for part in parts], self._among())

    def _among(self) -> compress.Axis:
        if self.axis is None:
            raise RuntimeError("there are no copies to send to")
        return self.axis

    def _places(self, part: Part, copies: int) -> tuple[Place, Place]:
        """Where in the wholes lies what a rank owes: as one of the copies, or of all, and as an owner of rows."""
        place, rows = part.place, layout.chunk(part.place.shape[0], self.size, self.rank)
        first = (self.rank, 1) if copies == self.size else (0, copies)
        among = Place((copies, *place.whole), (first[0], *place.offset), (first[1], *place.shape))
        return among, place.cut(0, rows)

    def state(self) -> dict[str, Shard]:
        """What is owed, by `owed.KIND.PARAMETER` and `owed.owner.PARAMETER`."""
        shards = {}
        for part in self.parts:
            owed, of_owner = self.owed.get(part.name), self.owed_by_owner.get(part.name)
            if owed is not None:
                copies = self.size if len(owed) == 1 else len(owed)
                shards[f"owed.{self.kind}.{part.name}"] = Shard(owed, self._places(part, copies)[0])
            if of_owner is not None:
                shards[f"owed.owner.{part.name}"] = Shard(of_owner, self._places(part, self.size)[1])
        return shards

    def make_room(self, shapes: Mapping[str, torch.Size]) -> None:
        """Make the tensors of a saved state, to be loaded into; :meth:`settle` comes after.

        What other numbers of copies owed is taken whole by each. What a checkpoint has none of is not owed.
        """
        self.owed, self.owed_by_owner = {}, {}
        for part in self.parts:
            saved = shapes.get(f"owed.{self.kind}.{part.name}")
            if saved is not None:
                among, rows = self._places(part, saved[0])
                self.owed[part.name] = part.parameter.new_zeros(among.shape)
                if self.kind == "onebit":
                    self.owed_by_owner[part.name] = part.parameter.new_zeros(rows.shape)

    def settle(self) -> None:
        """Share out what another number of copies owed, so that as much is owed as was; and owe nothing where nothing was.

        Gradients are summed over the copies: each takes an equal share of the sum. Momenta are averaged: each takes the
        mean.
        """
        for part in self.parts:
            owed, rows = self.owed.get(part.name), self._places(part, self.size)[1]
            if owed is None:
                self.owed[part.name] = torch.zeros_like(part.parameter.detach())[None]
            elif len(owed) > 1:
                among = self.size if self.kind == "topk" else len(owed)
                self.owed[part.name] = owed.sum(0, keepdim=True).div_(among)
            if self.kind == "onebit" and part.name not in self.owed_by_owner:
                self.owed_by_owner[part.name] = part.parameter.new_zeros(rows.shape)
