"""Counter-based randomness: the right bits, the right distribution, and no layout in it."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.model import randomness
from outlast.model.randomness import dropout_mask, fill_normal, key_of, mixed, normal
from outlast.places import Place

WORD = 1 << 64
STEP = 0x9E3779B97F4A7C15
MANY = 1 << 18


def python_mixed(x):
    """SplitMix64's finaliser on unsigned 64-bit words."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def python_normal(key, element):
    total = 0
    for half in (0, 1):
        word = python_mixed((key + (2 * element + half) * STEP) % WORD)
        total += sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 4 * 65535) / math.sqrt(8 * (65536**2 - 1) / 12)


def signed(word):
    return word - WORD if word >= WORD // 2 else word


def test_the_published_sequence_comes_out():
    """SplitMix64 from seed 1234567, its first five numbers as published with its reference program."""
    states = torch.tensor([signed((1234567 + i * STEP) % WORD) for i in range(1, 6)])
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [word % WORD for word in mixed(states).tolist()] == published
    assert [python_mixed(word % WORD) for word in states.tolist()] == published
    # The same from wrapping integer arithmetic on the device.
    assert torch.equal(1234567 + torch.arange(1, 6) * signed(STEP), states)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=20))
def test_mixing_is_that_of_unsigned_words(words):
    assert [word % WORD for word in mixed(torch.tensor(words)).tolist()] == [python_mixed(w % WORD) for w in words]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 40))
def test_a_normal_value_is_the_formula_of_its_key_and_number(key, element):
    assert normal(key, torch.tensor([element])).item() == python_normal(key, element)


def test_mixing_moves_half_of_the_bits():
    words = torch.randint(-(1 << 62), 1 << 62, (2000,), generator=torch.Generator().manual_seed(0))
    for bit in range(64):
        moved = mixed(words) ^ mixed(words ^ signed(1 << bit))
        flips = torch.stack([(moved >> place) & 1 for place in range(64)]).double()
        assert abs(flips.mean() - 0.5) < 0.01
        assert (flips.mean(dim=1) - 0.5).abs().max() < 6 * 0.5 / math.sqrt(2000)


def draws(*names, seed=0):
    return normal(key_of(seed, *names), torch.arange(MANY))


def test_normal_values_have_the_normal_moments():
    x, deviation = draws("a"), 1 / math.sqrt(MANY)
    assert x.dtype == torch.float64
    assert abs(x.mean()) < 4 * deviation
    assert abs(x.var() - 1) < 4 * deviation * math.sqrt(2)
    assert abs((x**3).mean()) < 4 * deviation * math.sqrt(15)
    # A sum of eight uniform numbers has kurtosis 3 - 1.2 / 8.
    assert abs((x**4).mean() - 2.85) < 4 * deviation * math.sqrt(96)
    inside = [(x.abs() < bound).double().mean().item() for bound in (1, 2, 3)]
    assert inside == pytest.approx([math.erf(bound / math.sqrt(2)) for bound in (1, 2, 3)], abs=0.01)


def test_normal_values_keep_their_bounds():
    bound = 4 * 65535 / math.sqrt(8 * (65536**2 - 1) / 12)
    assert bound < 4.9
    x = draws("a")
    assert x.abs().max() <= bound
    assert x.abs().max() > 4


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 63, 64, 256, 1000, 1024, 4096, 65536])
def test_neighbours_are_uncorrelated(lag):
    x = draws("a")
    for one, other in ((x[:-lag], x[lag:]), (x[:-lag] ** 2 - 1, x[lag:] ** 2 - 1)):
        correlation = (one * other).mean() / (one.square().mean() * other.square().mean()).sqrt()
        assert abs(correlation) < 4.5 / math.sqrt(MANY - lag)


def test_other_names_and_seeds_are_uncorrelated():
    several = [draws("a"), draws("b"), draws("a", 0), draws("a", seed=1), draws("a", seed=-1), draws("a", "b", seed=7)]
    several += [draws("initial", f"layers.{i}.weight") for i in range(4)]
    correlations = torch.corrcoef(torch.stack(several)) - torch.eye(len(several))
    assert correlations.abs().max() < 4.5 / math.sqrt(MANY)


def test_keys_are_signed_words_and_tell_uses_apart():
    uses = [(seed, "dropout", layer, site) for seed in range(5) for layer in range(-1, 20) for site in ("a", "b")]
    keys = [key_of(*use) for use in uses]
    assert len(set(keys)) == len(keys)
    assert min(keys) < 0 < max(keys)
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)


@st.composite
def boxes(draw):
    """A shape, and boxes that tile it: each axis cut at some places, empty stretches included."""
    shape = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    stretches = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
    tiles = itertools.product(*stretches)
    return shape, [Place(shape, tuple(a for a, _ in tile), tuple(b - a for a, b in tile)) for tile in tiles]


@given(boxes(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 50))
def test_any_part_has_the_values_it_has_in_the_whole(tiling, dtype, at_once):
    shape, places = tiling
    whole, together = torch.empty(shape, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    fill_normal(whole, 0.5, 3, "weight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "_DRAWN_AT_ONCE", at_once)
        for place in places:
            part = torch.empty(place.shape, dtype=dtype)
            fill_normal(part, 0.5, 3, "weight", place)
            together[place.slices] = part
    assert torch.equal(together, whole)


def test_a_coarser_type_is_the_same_value_rounded():
    whole = [torch.empty(20, 30, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    for part in whole:
        fill_normal(part, 0.02, 3, "weight")
    assert torch.equal(whole[0].float(), whole[1])
    assert torch.equal(whole[0].bfloat16(), whole[2])
    assert torch.equal(whole[0].flatten(), 0.02 * normal(key_of(3, "initial", "weight"), torch.arange(600)))


@given(
    st.lists(st.integers(0, 1 << 50), min_size=1, max_size=4),
    st.lists(st.integers(0, 1 << 30), min_size=1, max_size=4),
    st.integers(1, 9),
    st.floats(0, 1, exclude_max=True),
)
def test_a_mask_is_a_function_of_each_place_alone(samples, positions, channels, probability):
    key = key_of(0, "dropout", 3, "mlp")
    mask = dropout_mask(key, probability, torch.tensor(samples), torch.tensor(positions)[None], channels)
    for b, sample in enumerate(samples):
        for s, position in enumerate(positions):
            row = python_mixed((key + sample * STEP) % WORD)
            row = python_mixed((row + position * STEP) % WORD)
            for d in range(channels):
                word = python_mixed(row ^ python_mixed((key ^ (d // 4 * STEP % WORD)) % WORD))
                sixteen = word >> (16 * (d % 4)) & 0xFFFF
                lifted = sixteen - 65536 if sixteen >= 32768 else sixteen
                assert mask[b, s, d].item() == (lifted >= min(round(probability * 65536), 65535) - 32768)


@pytest.mark.parametrize("probability", [0.0, 1e-6, 0.9999999, 1 - 2**-53])
def test_a_probability_beyond_the_sixteen_bits_is_the_nearest_they_have(probability):
    kept = dropout_mask(1, probability, torch.arange(8), torch.arange(64)[None], 256).double().mean()
    assert kept == 1 if probability < 0.5 else kept < 1e-3
