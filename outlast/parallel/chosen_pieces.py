"""Into how many pieces the stream of activations is cut, measured at the start: on these ranks, links and shapes.

The products of one block are taken, forward and backward, over transfers as in training, in several numbers of pieces in
turn. The choice may differ from one start to the next, so it must not bear on any bit: a number of pieces is taken only
if what comes of these products is bit for bit what comes of one piece, for every number of sequences that a pass has. It may not be where a library takes another kernel for few rows; it chooses by the shapes, not by the values.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from outlast import layout, settings
from outlast.comm.overlap import GatherMultiply, MultiplyScatter
from outlast.comm.pieces import Stream
from outlast.comm.rows import CODES
from outlast.config import Run
from outlast.parallel.mesh import Mesh

_SECONDS: Final = 1.5
"""What is to be spent on timing, but for the two rounds there are at least."""

_MOST_ROUNDS: Final = 7

Products = Callable[[Stream], list[Tensor]]
"""All products of a block over a stream: what comes out, and all gradients."""


def chosen(run: Run, mesh: Mesh, held_out: int) -> int:
    """The number of pieces that all ranks use: the run's own, or where it is 0 the fastest that changes no bit, measured.

    Takes as long as some twenty blocks of a pass: a second or two where a block takes a tenth of one.

    Args:
        run: settled; all ranks have the same.
        mesh: the grid; it is told what was measured.
        held_out: samples that there are to evaluate on.
    """
    if run.parallel.overlap or not run.parallel.sp or "tp" not in mesh.axes or mesh.world is None:
        return run.parallel.overlap
    axis = mesh.axes["tp"]
    streams = {n: Stream(axis, n, CODES[run.parallel.tp_compress]) for n in (1, *(axis.size * 2**i for i in range(4)))}
    counts = sequences(run, held_out)
    products = block(run, counts[0], mesh.device)
    # The first round is for the ranks to agree on how many more there is time for.
    first = torch.tensor([_seconds(products, stream) for stream in streams.values()], device=mesh.device)
    rounds = _SECONDS / mesh.world.all_reduce(first, largest=True).sum().item()
    taken = [
        [_seconds(products, stream) for stream in streams.values()]
        for _ in range(max(1, min(_MOST_ROUNDS, int(rounds))))
    ]
    slowest = mesh.world.all_reduce(torch.tensor(taken, device=mesh.device), largest=True).median(0).values
    mesh.pieces.update(zip(streams, slowest.tolist(), strict=True))
    for n in sorted(mesh.pieces, key=mesh.pieces.__getitem__):
        if n == 1 or not mesh.largest(not same_bits(run, streams[n], counts, mesh.device)):
            return n
    return 1


def told(run: Run, mesh: Mesh) -> list[str]:
    """What there is to say of the choice: what was measured, and what a user may choose who minds rounding less."""
    if not mesh.pieces:
        return []
    times = ", ".join(f"{n} {1000 * seconds:.3g} ms" for n, seconds in mesh.pieces.items())
    lines = [f"a block's products, by pieces of the stream: {times}; {run.parallel.overlap} taken"]
    fastest = min(mesh.pieces, key=mesh.pieces.__getitem__)
    if fastest != run.parallel.overlap:
        lines.append(
            f"{fastest} round otherwise than 1 does, as another layout may: --parallel.overlap {fastest} takes it"
        )
    return lines


def sequences(run: Run, held_out: int) -> list[int]:
    """How many there are in a pass, of training and of evaluation: each number once, the most of training first."""
    ranks, most = layout.data_rank(run.parallel, 0)[0], run.train.micro_batch
    found = []
    for together in (settings.batch_sequences(run), min(run.eval.samples, held_out)):
        for mine in (-(-together // ranks), together // ranks):  # which rank has one more changes from step to step
            found += [min(most, mine), mine % most]
    return [count for count in dict.fromkeys(found) if count]


def same_bits(run: Run, stream: Stream, counts: Sequence[int], device: torch.device) -> bool:
    """Whether a block's products in a stream's pieces are those in one, as this rank sees it.

    Args:
        run: whose block.
        stream: cut in pieces.
        counts: numbers of sequences to try.
        device: where to compute.
    """
    whole = Stream(stream.axis, 1, stream.code)
    same = True
    for count in counts:  # the ranks take all, whatever one of them finds
        products = block(run, count, device)
        same &= all(torch.equal(one, other) for one, other in zip(products(stream), products(whole), strict=True))
    return same


def block(run: Run, count: int, device: torch.device) -> Products:
    """The products of one block on one rank, as a pass of so many sequences takes them; of made-up numbers."""
    model, tp, again = run.model, run.parallel.tp, run.parallel.sp_regather
    d, f, k = model.hidden_size, model.intermediate_size // tp, model.head_dim
    q, kv = model.num_heads // tp * k, max(1, model.num_kv_heads // tp) * k
    generator, kind = torch.Generator().manual_seed(0), getattr(torch, run.train.dtype)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind).requires_grad_()

    length = run.data.sequence_length // layout.size(run.parallel, "sequence") // tp
    x = drawn(count, length, d)
    parts = []
    for widths, leaving, biased in (((q, kv, kv), q, model.qkv_bias), ((f, f), f, model.mlp_bias)):
        weights = [drawn(width, d) for width in widths]
        biases = [drawn(width) if biased else None for width in widths]
        parts.append((weights, biases, drawn(tp * count, length, leaving), drawn(d, leaving)))

    def products(stream: Stream) -> list[Tensor]:
        made = []
        for weights, biases, y, weight in parts:
            entered = GatherMultiply.apply(x, stream, again, len(weights), *weights, *biases)
            left = MultiplyScatter.apply(y, weight, stream)
            wanted = (x, *weights, *(bias for bias in biases if bias is not None), y, weight)
            outcome = (*entered, left)
            made += [*outcome, *torch.autograd.grad(outcome, wanted, outcome)]
        return made

    return products


def _seconds(products: Products, stream: Stream) -> float:
    started = time.perf_counter()
    made = products(stream)
    if made[0].is_cuda:
        torch.cuda.synchronize(made[0].device)
    return time.perf_counter() - started
