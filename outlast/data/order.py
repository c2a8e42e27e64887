"""In which order samples are taken: a pure function of position, so that nothing has to be remembered but a number.

Position p counts the samples taken since the run began, over all ranks and restarts. Each group of sources is gone
through in its own epochs, every sample once in each, shuffled anew by (seed, group, epoch).
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

_ROUNDS: Final = 6
_FINEST_SHARE: Final = 1000  # weights are rounded to this part of the whole


def permuted(index: int, size: int, key: str) -> int:
    """Where a shuffle of `size` things puts one of them, without shuffling the rest.

    A Feistel network permutes the numbers of an even count of bits; those that fall outside `size` are sent through
    again until they fall inside, which keeps it a permutation.

    Args:
        index: from 0 to size - 1.
        size: how many there are.
        key: which shuffle.

    Returns:
        From 0 to size - 1, another for each index.

    Source: Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (cycle walking).
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in their proportion, each at least 1, to a thousandth of their sum."""
    parts = [max(1, round(_FINEST_SHARE * weight / sum(weights))) for weight in weights]
    return tuple(part // math.gcd(*parts) for part in parts)


@dataclass(frozen=True)
class Place:
    """A sample: which group it is of, its number there, and how often the group was gone through before."""

    group: int
    sample: int
    epoch: int


@dataclass(frozen=True)
class Order:
    """The order of a run.

    Attributes:
        sizes: samples in each group.
        shares: how many positions of each cycle go to each group; the cycle is their sum.
        seed: the run's.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    seed: int

    @cached_property
    def _cycle(self) -> tuple[tuple[int, int], ...]:
        """For each position of a cycle, its group and how many of that group came before it in the cycle.

        The groups are spread evenly: each position goes to the group that is furthest behind its share.
        """
        taken, cycle = [0] * len(self.shares), []
        for position in range(1, sum(self.shares) + 1):
            behind = [
                position * share - count * sum(self.shares) for share, count in zip(self.shares, taken, strict=True)
            ]
            group = behind.index(max(behind))
            cycle.append((group, taken[group]))
            taken[group] += 1
        return tuple(cycle)

    def at(self, position: int) -> Place:
        """The sample at a position, for any position from 0 on."""
        cycles, within = divmod(position, len(self._cycle))
        group, before = self._cycle[within]
        epoch, index = divmod(cycles * self.shares[group] + before, self.sizes[group])
        return Place(group, permuted(index, self.sizes[group], f"{self.seed}/{group}/{epoch}"), epoch)
