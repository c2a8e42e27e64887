"""Rows as bfloat16 and as eight-bit integers: how far what comes back may be off, and what is sent."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast import layout
from outlast.comm.rows import CODES


def back(code, rows):
    """Rows as the receiver has them, and how many bytes went."""
    one = CODES[code]
    sent = one.encode(rows)
    room = one.room(rows.clone())
    assert (room.shape, room.dtype) == (sent.shape, sent.dtype)
    into = torch.full_like(rows, 7.0) if not one.exact else sent
    one.decode(sent, into)
    return into, sent.numel() * sent.element_size()


@given(
    st.integers(0, 5),
    st.integers(1, 33),
    st.integers(-30, 30),
    st.sampled_from((torch.float32, torch.float64)),
    st.integers(0, 99),
)
def test_bounds_and_bytes(count, width, power, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64).mul(10.0**power).to(dtype)
    exact, size = back("none", rows)
    assert torch.equal(exact, rows)
    assert size == count * layout.row_bytes(width, rows.element_size(), "none")
    near, size = back("bf16", rows)
    assert ((near - rows).abs() <= 2.0**-8 * rows.abs()).all()  # 8 binary digits, rounded to the nearest
    assert size == count * layout.row_bytes(width, rows.element_size(), "bf16") == 2 * rows.numel()
    near, size = back("int8", rows)
    scale = rows.abs().amax(1, keepdim=True) / 127 if rows.numel() else rows
    # Half a step of the scale, which has 24 binary digits, as the product has.
    assert ((near - rows).abs() <= scale * (0.5 + 127 * 2.0**-22)).all()
    assert size == count * layout.row_bytes(width, rows.element_size(), "int8") == count * (width + 4)


def test_by_hand():
    rows = torch.tensor([[127.0, -63.5, 1.4, 0.0], [0.0, 0.0, 0.0, 0.0], [-0.254, 0.001, 0.003, 0.0]])
    near, _ = back("int8", rows)
    assert near[0].tolist() == [127.0, -64.0, 1.0, 0.0]  # a scale of 1; a half goes to the even number
    assert near[1].tolist() == [0.0] * 4  # no scale, and no division by it
    torch.testing.assert_close(near[2], torch.tensor([-0.254, 0.0, 0.004, 0.0]), atol=1e-7, rtol=0)  # a scale of 0.002
    assert back("bf16", torch.tensor([[1.00390625, 1.01171875]]))[0].tolist() == [[1.0, 1.015625]]


def test_what_is_no_number_is_seen_on_the_other_side():
    """A run whose activations are none must not go on as if they were zero."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        rows = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
        for code in ("bf16", "int8"):
            near, _ = back(code, rows)
            assert not near[0].isfinite().all()
            assert near[1].isfinite().all()
