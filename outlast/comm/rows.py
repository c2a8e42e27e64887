"""How rows of numbers travel: as they are, as bfloat16, or as eight-bit integers with a scale a row.

A code turns rows into what is sent, and back. What comes back is rounded: by at most 2^-8 of each number in bfloat16,
by at most half a scale in eight bits. What is no number stays none, and with it, in eight bits, its row.

Source: Dettmers et al. 2022, "LLM.int8()" (arXiv 2208.07339) section 2, whose row-wise absolute maximum this is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

_LARGEST: Final = 127
"""Of a signed eight-bit integer, the same both ways."""


@dataclass(frozen=True)
class Code:
    """One way for rows to travel.

    Attributes:
        encode: from rows to what is sent, contiguous.
        room: where such rows are received; for rows that travel as they are, the rows.
        decode: from what was received into rows.
        exact: whether rows travel as they are.
    """

    encode: Callable[[Tensor], Tensor]
    room: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], object]
    exact: bool = False


def _in_16_bits(rows_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    return rows_NE.to(torch.bfloat16)


def _in_8_bits(rows_NE: Float[Tensor, "N E"]) -> Shaped[Tensor, "_"]:
    """4 N bytes of scales in float32, then N E of numbers."""
    if not rows_NE.numel():
        return torch.empty(0, dtype=torch.uint8, device=rows_NE.device)
    exact_NE = rows_NE.to(torch.promote_types(rows_NE.dtype, torch.float32))
    scales_N1 = (exact_NE.abs().amax(1, keepdim=True) / _LARGEST).float()
    steps_NE = exact_NE / scales_N1.where(scales_N1 > 0, 1)  # a row of zeros has no scale
    numbers_NE = steps_NE.nan_to_num_(0).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat((scales_N1.view(torch.uint8).view(-1), numbers_NE.view(torch.uint8).view(-1)))


def _room_in_8_bits(rows_NE: Float[Tensor, "N E"]) -> Shaped[Tensor, "_"]:
    size = rows_NE.shape[0] * (rows_NE.shape[1] + 4) if rows_NE.numel() else 0
    return torch.empty(size, dtype=torch.uint8, device=rows_NE.device)


def _of_8_bits(sent: Shaped[Tensor, "_"], into_NE: Float[Tensor, "N E"]) -> None:
    if into_NE.numel():
        scales_N1 = sent[: 4 * into_NE.shape[0]].view(torch.float32)[:, None]
        numbers_NE = sent[4 * into_NE.shape[0] :].view(torch.int8).view(into_NE.shape)
        into_NE.copy_(numbers_NE * scales_N1.to(torch.promote_types(into_NE.dtype, torch.float32)))


EXACT: Final = Code(lambda rows: rows, lambda rows: rows, lambda _sent, _into: None, exact=True)
CODES: Final = {
    "none": EXACT,
    "bf16": Code(_in_16_bits, lambda rows: torch.empty_like(rows, dtype=torch.bfloat16), lambda sent, into: into.copy_(sent)),
    "int8": Code(_in_8_bits, _room_in_8_bits, _of_8_bits),
}  # fmt: skip
"""By the name that `parallel.tp_compress` has for them."""
