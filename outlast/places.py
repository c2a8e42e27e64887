"""Where a part of a tensor lies in the whole: what a shard, a checkpoint and a drawn weight have in common. No torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A box in a tensor.

    Attributes:
        whole: shape of the whole tensor.
        offset: index in the whole of the part's first element.
        shape: of the part; it may be empty.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, whole: tuple[int, ...]) -> "Place":
        """The part that is the whole."""
        return cls(whole, (0,) * len(whole), whole)

    @property
    def elements(self) -> int:
        """How many there are in the part."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the part out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def cut(self, dim: int, stretch: range) -> "Place":
        """A part of this part: some of its rows, or columns.

        Args:
            dim: which axis is cut.
            stretch: which of the part's own indices along it.
        """
        start, shape = list(self.offset), list(self.shape)
        start[dim], shape[dim] = start[dim] + stretch.start, len(stretch)
        return Place(self.whole, tuple(start), tuple(shape))
