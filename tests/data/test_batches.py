"""Samples: tokens, targets, places and documents against a slow reading of the definition."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.config import Data
from outlast.data import batches
from outlast.data.batches import IGNORED, Samples

PADDING = 99


@dataclass
class Stream:
    """A token stream in memory: token t of document d is 1000 d + t."""

    lengths: list[int]
    learned: np.ndarray | None = None

    def __post_init__(self):
        self.ends = np.cumsum(self.lengths).astype(np.int64)
        self.tokens = np.concatenate([1000 * d + np.arange(n) for d, n in enumerate(self.lengths)])

    def __len__(self):
        return len(self.tokens)

    def read(self, start, stop):
        return self.tokens[start:stop]

    def learn(self, start, stop):
        return None if self.learned is None else self.learned[start:stop]

    def file_of(self, document):
        return f"file {document}"

    def kept(self, name, numbers):
        return np.concatenate(list(numbers()))


def samples(stream, length, **data):
    return Samples(stream, replace(Data(), sequence_length=length, **data), PADDING)


lengths = st.lists(st.integers(1, 23), min_size=1, max_size=20)


@given(lengths, st.integers(1, 16), st.sampled_from(["stream", "whole"]), st.booleans())
def test_every_token_stands_once_with_its_own_next_as_target(lengths, length, packing, across):
    packed = samples(Stream(lengths), length, packing=packing, attend_across=across)
    seen, learned = [], 0
    for i in range(len(packed)):
        tokens, targets, places, documents = packed.read(i)
        assert len(tokens) == len(targets) == len(places) == sum(documents) == length
        real = tokens[tokens != PADDING].tolist()
        seen += real
        for t, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            # The target is the next token of the same document, or nothing: padding and last tokens say nothing.
            ends = token == PADDING or token % 1000 == lengths[token // 1000] - 1
            assert target == (IGNORED if ends else token + 1), t
            learned += not ends
        at = 0
        for run in documents:
            assert places[at : at + run].tolist() == list(range(run))
            if not across:
                assert len({token // 1000 if token != PADDING else "padding" for token in tokens[at : at + run]}) == 1
            at += run
        if across:
            assert documents == (length,)
    assert seen == [1000 * d + t for d, n in enumerate(lengths) for t in range(n)]
    assert learned == sum(n - 1 for n in lengths)


@given(lengths, st.integers(1, 16))
def test_whole_packing_cuts_only_what_is_longer_than_a_sample(lengths, length):
    packed = samples(Stream(lengths), length, packing="whole")
    parts = {}
    for i in range(len(packed)):
        for token in packed.read(i)[0]:
            if token != PADDING:
                parts.setdefault(token // 1000, set()).add(i)
    for document, where in parts.items():
        if lengths[document] <= length:
            assert len(where) == 1


def test_starts_are_found_in_parts(monkeypatch):
    draw = np.random.default_rng(0)
    stream = Stream([int(n) for n in draw.integers(1, 30, 500)])
    whole = samples(stream, 16, packing="whole")._starts
    monkeypatch.setattr(batches, "_STARTS_AT_ONCE", 7)
    assert np.array_equal(samples(stream, 16, packing="whole")._starts, whole)
    assert (np.diff(whole) <= 16).all()


def test_stream_packing_by_hand():
    packed = samples(Stream([3, 4]), 5)
    tokens, targets, places, documents = packed.read(0)
    assert tokens.tolist() == [0, 1, 2, 1000, 1001]
    assert targets.tolist() == [1, 2, IGNORED, 1001, 1002]
    assert places.tolist() == [0, 1, 2, 0, 1]
    assert documents == (3, 2)
    tokens, targets, places, documents = packed.read(1)
    assert tokens.tolist() == [1002, 1003, PADDING, PADDING, PADDING]
    assert targets.tolist() == [1003, IGNORED, IGNORED, IGNORED, IGNORED]
    assert places.tolist() == [0, 1, 0, 1, 2]
    assert documents == (2, 3)
    assert packed.documents(0) == ["file 0", "file 1"]
    assert packed.documents(1) == ["file 1"]


def test_prompts_are_not_learned():
    stream = Stream([5, 3], learned=np.array([0, 0, 1, 1, 1, 0, 1, 1], dtype=bool))
    targets = samples(stream, 8).read(0)[1]
    assert targets.tolist() == [IGNORED, 2, 3, 4, IGNORED, 1001, 1002, IGNORED]


@given(lengths, st.integers(1, 8), st.integers(1, 5), st.integers(1, 4))
def test_a_step_is_the_same_whatever_its_ranks_and_passes(lengths, batch, ranks, micro):
    @dataclass
    class Group:
        train: Stream
        held_out: Stream

    class Corpus:
        groups = [Group(Stream(lengths), Stream([2]))]  # noqa: RUF012

    feed = batches.Feed(Corpus(), replace(Data(), sequence_length=4), 5, PADDING)
    whole = batches.step(feed, 3, batch, batch)
    parts = [batches.step(feed, 3, batch, micro, ranks, rank) for rank in range(ranks)]
    assert sum(part.learned for part in parts) == whole.learned
    assert sum(part.fed for part in parts) % 2**64 == whole.fed
    rows = [row for part in parts for one in part.batches for row in one.tokens_BS.tolist()]
    assert rows == whole.batches[0].tokens_BS.tolist()
    assert all(len(one.positions_B) <= micro for part in parts for one in part.batches)


def test_the_hash_tells_position_tokens_and_targets_apart():
    tokens, targets = np.arange(4), np.arange(1, 5)
    hashes = {
        batches.fed(0, tokens, targets),
        batches.fed(1, tokens, targets),
        batches.fed(0, tokens + 1, targets),
        batches.fed(0, tokens, targets - 1),
        batches.fed(0, targets, tokens),
    }
    assert len(hashes) == 5


def test_evaluation_takes_turns_and_stops_at_the_end():
    @dataclass
    class Group:
        train: Stream
        held_out: Stream

    class Corpus:
        groups = [Group(Stream([4]), Stream([4, 4])), Group(Stream([4]), Stream([2]))]  # noqa: RUF012

    feed = batches.Feed(Corpus(), replace(Data(), sequence_length=4, weights=(1.0, 1.0)), 0, PADDING)
    taken = [row for one in feed.evaluation(10, 2) for row in one.tokens_BS.tolist()]
    assert taken == [[0, 1, 2, 3], [0, 1, PADDING, PADDING], [1000, 1001, 1002, 1003]]
    assert sum(len(one.tokens_BS) for one in feed.evaluation(2, 8)) == 2
    assert feed.take([], 4) == []


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_an_empty_stream_has_no_samples(packing):
    stream = Stream([1])
    stream.ends, stream.tokens = stream.ends[:0], stream.tokens[:0]
    assert len(samples(stream, 4, packing=packing)) == 0
