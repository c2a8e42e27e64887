"""Who has which tokens of a sequence under ring attention, so that tokens are equal and causal work is even. No torch.

A token looks at all before it in its document: a rank with the first half of a document would have a third of the work
of one with the second. So each document is cut into 2 R stretches, and a rank of R takes one from the front and its
mirror image from the back; with R = 2 ranks and a document of 8 tokens

    place   0 1 2 3 4 5 6 7
    rank    0 0 1 1 1 1 0 0        work 1+2+7+8 = 18 and 3+4+5+6 = 18

Where a document does not divide, pairs of stretches differ by a token. Pairs are dealt out document after document:
those with more tokens to the ranks that have fewer, and among equals those with more work to the ranks that have less.

Source: the zigzag order is that of Brandon et al. 2023 (arXiv 2311.09431) and Zhu's ring-flash-attention, for one
document; dealing out what does not divide is ours.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple


class Stretch(NamedTuple):
    """Neighbouring tokens of one document: places in the sequence from `start` up to `stop`; `first` is the document's."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Block:
    """Queries that all look at some keys of another rank, or of their own.

    Attributes:
        queries, keys: which of the tokens that each rank has, in the order of their places.
        causal: whether each query looks only at the keys up to its own place: they are the same tokens then. Else each
            looks at every one.
    """

    queries: slice
    keys: slice
    causal: bool


@functools.lru_cache(maxsize=256)
def stretches(documents: tuple[int, ...], ranks: int) -> tuple[tuple[Stretch, ...], ...]:
    """The stretches of each rank, in the order of their places.

    Args:
        documents: lengths of the documents of a sequence, in order; their sum divides by `ranks`.
        ranks: among which it is shared.
    """
    taken: list[list[Stretch]] = [[] for _ in range(ranks)]
    tokens, work, first = [0] * ranks, [0] * ranks, 0
    for length in documents:
        pairs = sorted(_pairs(first, length, ranks), key=lambda pair: (-_tokens(pair), -_work(pair)))
        order = sorted(range(ranks), key=lambda rank: (tokens[rank], work[rank]))
        for rank, pair in zip(order, pairs, strict=True):
            taken[rank] += pair
            tokens[rank] += _tokens(pair)
            work[rank] += _work(pair)
        first += length
    return tuple(map(tuple, taken))


def _pairs(first: int, length: int, ranks: int) -> list[list[Stretch]]:
    """A document as one stretch from the front and its mirror image from the back for each rank; neighbours are joined."""
    sizes = [length // ranks + (pair < length % ranks) for pair in range(ranks)]
    pairs, front, back = [], first, first + length
    for size in sizes:
        ahead = front + (size + 1) // 2
        behind = back - size // 2
        both = [Stretch(front, ahead, first), Stretch(behind, back, first)]
        if ahead == behind:
            both = [Stretch(front, back, first)]
        pairs.append([one for one in both if one.start < one.stop])
        front, back = ahead, behind
    return pairs


def _tokens(pair: list[Stretch]) -> int:
    return sum(one.stop - one.start for one in pair)


def _work(pair: list[Stretch]) -> int:
    """Pairs of a query and a key that it sees: 1 + 2 + … over each stretch."""
    return sum((one.stop - one.start) * (one.start + one.stop + 1 - 2 * one.first) // 2 for one in pair)


def work(documents: tuple[int, ...], ranks: int) -> list[int]:
    """Pairs of a query and a key that it sees, for each rank."""
    return [_work(list(mine)) for mine in stretches(documents, ranks)]


@functools.lru_cache(maxsize=4096)
def blocks(documents: tuple[int, ...], ranks: int, queries: int, keys: int) -> tuple[Block, ...]:
    """What the queries of one rank have to do with the keys of another: products where each query sees something.

    What would see nothing is not there, so nothing is masked but the causal blocks of a rank with itself.
    """
    mine, theirs = (_by_document(stretches(documents, ranks)[rank]) for rank in (queries, keys))
    found: list[Block] = []
    for first, (start, parts) in mine.items():
        if queries == keys:
            here = slice(start, start + _tokens(parts))
            found.append(Block(here, here, causal=True))
            continue
        at, others = theirs.get(first, (0, []))
        for part in parts:
            seen = sum(other.stop - other.start for other in others if other.stop <= part.start)
            stop = start + part.stop - part.start
            before = found[-1] if found else None
            if seen and before and before.queries.stop == start and before.keys == slice(at, at + seen):
                found[-1] = Block(slice(before.queries.start, stop), before.keys, causal=False)
            elif seen:
                found.append(Block(slice(start, stop), slice(at, at + seen), causal=False))
            start = stop
    return tuple(found)


def _by_document(mine: tuple[Stretch, ...]) -> dict[int, tuple[int, list[Stretch]]]:
    """A rank's stretches by the document's first place, with where among the rank's tokens they begin."""
    found: dict[int, tuple[int, list[Stretch]]] = {}
    start = 0
    for one in mine:
        found.setdefault(one.first, (start, []))[1].append(one)
        start += one.stop - one.start
    return found
