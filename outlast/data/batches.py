"""Samples and steps: the token stream cut into sequences, and the sequences a rank is fed.

A *sample* is one sequence of exactly `sequence_length` tokens, cut from the stream by (corpus, tokeniser, length,
packing) alone: not by seed, epoch or layout. Shapes: B sequences, S = sequence_length tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np
from jaxtyping import Int64

from outlast import layout
from outlast.config import Data
from outlast.data import IGNORED
from outlast.data.order import Order, shares
from outlast.data.tokens import Corpus, TokenStream

_STARTS_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True)
class MicroBatch:
    """Sequences for one forward pass.

    Attributes:
        positions_B: the samples' global counts since the start of the run.
        tokens_BS: what is read.
        targets_BS: what is to be said after each token, or :data:`outlast.data.IGNORED`.
        places_BS: where each token stands in its document, from 0.
        documents: for each sequence, the lengths of the stretches that may see each other.
    """

    positions_B: Int64[np.ndarray, "B"]
    tokens_BS: Int64[np.ndarray, "B S"]
    targets_BS: Int64[np.ndarray, "B S"]
    places_BS: Int64[np.ndarray, "B S"]
    documents: tuple[tuple[int, ...], ...]

    @property
    def learned(self) -> int:
        """Targets that are learned."""
        return int((self.targets_BS != IGNORED).sum())

    @property
    def fed(self) -> int:
        """A 64-bit hash of what is fed at which positions; over several batches it adds up, in whatever order."""
        rows = zip(self.positions_B, self.tokens_BS, self.targets_BS, strict=True)
        return sum(fed(int(position), tokens, targets) for position, tokens, targets in rows) % 2**64


def fed(position: int, tokens_S: np.ndarray, targets_S: np.ndarray) -> int:
    """The 64-bit hash of one sample as fed: BLAKE2b of position, tokens and targets, each as little-endian int64."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (np.array(position), tokens_S, targets_S):
        digest.update(np.ascontiguousarray(part, dtype="<i8").data)
    return int.from_bytes(digest.digest(), "little")


class Samples:
    """A token stream as numbered samples.

    Args:
        stream: the tokens.
        data: the [data] knobs.
        padding: token that fills up a sample; never learned.
    """

    def __init__(self, stream: TokenStream, data: Data, padding: int) -> None:
        self.stream, self.length, self.across, self.padding = stream, data.sequence_length, data.attend_across, padding
        self.whole = data.packing == "whole"

    @cached_property
    def _starts(self) -> Int64[np.ndarray, "N+1"]:
        """Packing `whole`: where each sample begins, and where the last one ends; kept on disk, as long as the corpus."""
        return self.stream.kept(f"whole-{self.length}.bin", self._find_starts)

    def _find_starts(self) -> Iterator[np.ndarray]:
        """Each sample begins after the last document that fitted into the one before, or where that one was full."""
        ends, total, found = self.stream.ends, len(self.stream), [0]
        while found[-1] < total:
            reach = found[-1] + self.length
            document = int(np.searchsorted(ends, reach, side="right")) - 1
            whole = int(ends[document]) if document >= 0 else 0
            found.append(whole if whole > found[-1] else min(reach, total))
            if len(found) > _STARTS_AT_ONCE:
                yield np.array(found[:-1])
                found = found[-1:]
        yield np.array(found)

    def __len__(self) -> int:
        return len(self._starts) - 1 if self.whole else -(-len(self.stream) // self.length)

    def _bounds(self, sample: int) -> tuple[int, int]:
        if self.whole:
            return int(self._starts[sample]), int(self._starts[sample + 1])
        return sample * self.length, min((sample + 1) * self.length, len(self.stream))

    def read(self, sample: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
        """A sample's tokens, targets and places, each of shape (S) in int64, and the lengths of its documents.

        Padding counts as a document of its own. A document that began in an earlier sample begins again at place 0.
        """
        start, stop = self._bounds(sample)
        ends = self.stream.ends
        inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop, side="right")]
        cuts = np.array(inside, dtype=np.int64) - start  # documents that end in this sample, or just at its end
        tokens_S = np.full(self.length, self.padding, dtype=np.int64)
        targets_S = np.full(self.length, IGNORED, dtype=np.int64)
        tokens_S[: stop - start] = self.stream.read(start, stop)
        following = self.stream.read(start + 1, min(stop + 1, len(self.stream)))
        targets_S[: len(following)] = following
        learn = self.stream.learn(start + 1, min(stop + 1, len(self.stream)))
        if learn is not None:
            targets_S[: len(following)][~learn] = IGNORED
        targets_S[cuts - 1] = IGNORED
        bounds = np.unique(np.concatenate(([0], cuts, [stop - start, self.length])))
        lengths = (self.length,) if self.across else tuple(int(n) for n in np.diff(bounds))
        return tokens_S, targets_S, np.concatenate([np.arange(n) for n in lengths]), lengths

    def documents(self, sample: int) -> list[str]:
        """The files that a sample's documents are from."""
        start, stop = self._bounds(sample)
        first = int(np.searchsorted(self.stream.ends, start, side="right"))
        last = int(np.searchsorted(self.stream.ends, stop, side="left"))
        return [self.stream.file_of(document) for document in range(first, last + 1)]


class Feed:
    """What a data rank is fed.

    Args:
        corpus: the tokenised corpus.
        data: the [data] knobs.
        seed: of the order.
        padding: token that fills up samples.
    """

    def __init__(self, corpus: Corpus, data: Data, seed: int, padding: int) -> None:
        self.samples = [Samples(group.train, data, padding) for group in corpus.groups]
        self.held_out = [Samples(group.held_out, data, padding) for group in corpus.groups]
        weights = data.weights or (1.0,) * len(self.samples)
        self.order = Order(tuple(map(len, self.samples)), shares(weights), seed)

    def take(self, positions: Sequence[int], micro_batch: int) -> list[MicroBatch]:
        """The samples at some positions, at most so many in a batch."""
        return list(
            self._batches(
                [(p, self.samples[at.group], at.sample) for p in positions for at in [self.order.at(p)]], micro_batch
            )
        )

    def evaluation(self, count: int, micro_batch: int, ranks: int = 1, rank: int = 0) -> list[MicroBatch]:
        """One rank's share of the first held-out samples, taken in turn from the groups; fewer where there are fewer."""
        longest = max(map(len, self.held_out))
        turns = ((samples, i) for i in range(longest) for samples in self.held_out if i < len(samples))
        chosen = [(i, *turn) for i, turn in enumerate(islice(turns, count))]
        mine = [chosen[i] for i in layout.share(0, len(chosen), ranks, rank)]
        return self.filled(list(self._batches(mine, micro_batch)), layout.passes(len(chosen), micro_batch, ranks))

    def filled(self, batches: list[MicroBatch], passes: int) -> list[MicroBatch]:
        """As many passes as every rank makes, those of no sequences at the end: ranks meet in each."""
        shape = (0, self.samples[0].length)
        none = np.zeros(shape, dtype=np.int64)
        empty = MicroBatch(np.zeros(0, dtype=np.int64), none, none, none, ())
        return batches + [empty] * (passes - len(batches))

    def _batches(self, places: list[tuple[int, Samples, int]], micro_batch: int) -> Iterator[MicroBatch]:
        for first in range(0, len(places), micro_batch):
            chosen = places[first : first + micro_batch]
            tokens, targets, spots, documents = zip(*(samples.read(i) for _, samples, i in chosen), strict=True)
            positions = np.array([position for position, _, _ in chosen])
            yield MicroBatch(positions, np.stack(tokens), np.stack(targets), np.stack(spots), documents)


@dataclass(frozen=True)
class Step:
    """One rank's part of one optimizer step.

    Attributes:
        first, stop: the step's positions, over all ranks: [first, stop).
        batches: this rank's forward passes.
        learned: targets learned in these; the loop makes it those of all ranks.
        fed: hash of what these feed; likewise.
    """

    first: int
    stop: int
    batches: list[MicroBatch]
    learned: int
    fed: int


def step(feed: Feed, first: int, batch: int, micro_batch: int, ranks: int = 1, rank: int = 0) -> Step:
    """Read one rank's part of the step that takes positions [first, first + batch); every rank makes as many passes."""
    batches = feed.take(layout.share(first, first + batch, ranks, rank), micro_batch)
    batches = feed.filled(batches, layout.passes(batch, micro_batch, ranks))
    learned, hashed = sum(one.learned for one in batches), sum(one.fed for one in batches) % 2**64
    return Step(first, first + batch, batches, learned, hashed)
