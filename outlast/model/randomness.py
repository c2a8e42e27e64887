"""Random numbers that no layout can change: each is a function of what it is for, not of when it was drawn.

A generator hands out numbers in the order they are asked for, so two layouts that ask in another order get other
numbers. Here a number is a hash of (seed, name, element) for an initial value, and of (seed, layer, site, sample,
position, channel) for dropout. Any rank can draw just the part it holds. The arithmetic is on 64-bit integers, so every
device draws the same bits.
"""

import hashlib
import math
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from outlast.places import Place

# The odd 64-bit constant nearest 2^64 / golden ratio, and the two multipliers of SplitMix64's finaliser, as signed.
_STEP: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_DRAWN_AT_ONCE: Final = 1 << 20  # elements; bounds the integer scratch space to some tens of MB


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign: torch's own shift copies it."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mixed(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Hash 64-bit integers, element by element, so that every input bit moves half of the output bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17 (SplitMix64).
    """
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def key_of(seed: int, *names: str | int) -> int:
    """A signed 64-bit key for one use of randomness."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def normal(key: int, elements: Int64[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Draw the standard normal value of each element, in float64.

    Each is the sum of eight 16-bit uniform numbers, brought to mean 0 and deviation 1: exact in integers, where a
    logarithm or a cosine would differ between devices.

    Args:
        key: what the values are for, from :func:`key_of`.
        elements: the elements' numbers in the whole tensor, whichever part of it this is.

    Returns:
        One value an element, none further than 4.9 deviations out.
    """
    total = torch.zeros_like(elements)
    for half in (0, 1):
        bits = mixed(key + (2 * elements + half) * _STEP)
        for quarter in range(4):
            total += (bits >> (16 * quarter)) & 0xFFFF
    deviation = math.sqrt(8 * (2.0**32 - 1) / 12)
    return (total - 4 * 0xFFFF).double() / deviation


def fill_normal(part: Tensor, std: float, seed: int, name: str, place: Place | None = None) -> None:
    """Fill a parameter, or a part of it, with its initial values, in place.

    Args:
        part: the part, of any floating type.
        std: standard deviation.
        seed: the run's seed.
        name: the parameter's name.
        place: where the part lies in the whole; None where it is the whole.
    """
    key, place = key_of(seed, "initial", name), place or Place.all_of(tuple(part.shape))
    row = math.prod(place.whole[1:])  # elements in a row of the whole
    of_row = torch.arange(row, device=part.device).view(place.whole[1:])[place.slices[1:]]
    rows = max(1, _DRAWN_AT_ONCE // max(1, of_row.numel()))
    for start in range(0, place.shape[0], rows):
        some = part[start : start + rows]
        first = torch.arange(place.offset[0] + start, place.offset[0] + start + some.shape[0], device=part.device) * row
        elements = (first.view(-1, *[1] * of_row.dim()) + of_row).flatten()
        some.copy_((normal(key, elements) * std).view(some.shape))


def dropout_mask(
    key: int, probability: float, samples_B: Int64[Tensor, "B"], positions_BS: Int64[Tensor, "_ S"], channels: int
) -> Bool[Tensor, "B S D"]:
    """Say which channels are kept.

    One hash serves four channels, sixteen bits each: a mask costs less than the products around it.

    Args:
        key: the layer and the site in it, from :func:`key_of`.
        probability: of dropping a channel, in steps of 2^-16.
        samples_B: the samples' global counts since the start of the run.
        positions_BS: where the tokens stand in their samples, from 0; one row where that is alike for all.
        channels: how many channels D a token has.

    Returns:
        True where the value is kept.
    """
    fours = torch.arange(-(-channels // 4), device=samples_B.device)
    rows_BS = mixed(mixed(key + samples_B * _STEP)[:, None] + positions_BS * _STEP)
    bits = mixed(rows_BS[:, :, None] ^ mixed(key ^ (fours * _STEP)))
    least = min(round(probability * 2**16), 2**16 - 1) - 2**15  # 2^15 itself would wrap around and keep all
    return bits.view(torch.int16)[..., :channels] >= least
