"""Who has which tokens under ring attention, against brute force: every pair of a query and a key once, work even."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.parallel import zigzag


@st.composite
def packings(draw, ranks=(2, 3, 4, 8), shares=(1, 40)):
    """Lengths of documents whose sum divides by the ranks, and the ranks."""
    size = draw(st.sampled_from(ranks))
    total = size * draw(st.integers(*shares))
    lengths = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(draw(st.integers(1, left)))
    return tuple(lengths), size


def owners(documents, ranks):
    """For each rank the places it has, in the order it has them."""
    return [
        [place for one in mine for place in range(one.start, one.stop)] for mine in zigzag.stretches(documents, ranks)
    ]


@given(packings())
def test_every_token_has_one_rank_and_every_rank_as_many(packing):
    documents, ranks = packing
    places = owners(documents, ranks)
    assert sorted(place for mine in places for place in mine) == list(range(sum(documents)))
    assert {len(mine) for mine in places} == {sum(documents) // ranks}
    assert all(mine == sorted(mine) for mine in places)


@given(packings())
def test_the_blocks_are_all_that_a_query_sees_each_key_once(packing):
    documents, ranks = packing
    places, document = owners(documents, ranks), [i for i, n in enumerate(documents) for _ in range(n)]
    for i, mine in enumerate(places):
        seen = []
        for step in range(ranks):
            theirs = places[(i - step) % ranks]
            for block in zigzag.blocks(documents, ranks, i, (i - step) % ranks):
                assert block.causal == (step == 0)  # a token's own document first: no row is without a key when merged
                queries, keys = mine[block.queries], theirs[block.keys]
                assert queries
                assert keys
                seen += [(q, k) for at, q in enumerate(queries) for k in (keys[: at + 1] if block.causal else keys)]
        wanted = [(q, k) for q in mine for k in range(q + 1) if document[k] == document[q]]
        assert sorted(seen) == wanted
        assert zigzag.work(documents, ranks)[i] == len(wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("share", [4, 16, 100, 1001])
def test_one_documents_work_is_even(ranks, share):
    work = zigzag.work((ranks * share,), ranks)
    assert max(work) / min(work) <= (1.05 if share > 10 else 1.2)
    if share % 2 == 0:
        assert max(work) == min(work)


@given(packings(ranks=(2, 4, 8), shares=(128, 1024)))
def test_packed_documents_work_is_even(packing):
    documents, ranks = packing
    work = zigzag.work(documents, ranks)
    assert max(work) <= 1.1 * sum(work) / ranks


def test_by_hand():
    # 8 tokens, two ranks, stretches of 2: work 1 + 2 + 7 + 8 and 3 + 4 + 5 + 6.
    assert owners((8,), 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag.work((8,), 2) == [18, 18]
    # cases: Megatron-LM#5243.
    assert owners((4, 4), 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    # Of 3 one rank has two, so of 5 the other has three: 1 + 3 + 3 + 4 and 2 + 1 + 2 + 5.
    assert owners((3, 5), 2) == [[0, 2, 5, 6], [1, 3, 4, 7]]
    assert zigzag.work((3, 5), 2) == [11, 10]


def test_one_block_a_step_for_one_document():
    """Zigzag: queries of a later front see one stretch of the keys, those of an earlier one only by their back half."""
    for ranks in (2, 4, 8):
        for i in range(ranks):
            for j in range(ranks):
                assert len(zigzag.blocks((64 * ranks,), ranks, i, j)) == 1
