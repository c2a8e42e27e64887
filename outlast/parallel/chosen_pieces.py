"""Into how many pieces the stream of activations is cut, measured at the start: on these ranks, links and shapes.

The products of one block are taken, forward and backward, over transfers as in training, in several numbers of pieces in
turn. The choice may differ from one start to the next, so it must not bear on any bit: a number of pieces is taken only
if what comes of these products is bit for bit what comes of one piece, for every number of sequences that a pass may
have. It may not be where a library takes another kernel for few rows; it chooses by the shapes, not by the values.
"""

import time
from collections.abc import Callable
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


def chosen(run: Run, mesh: Mesh) -> int:
    """The number of pieces that all ranks use: the run's own, or where it is 0 the fastest, measured.

    Takes as long as some twenty blocks of a pass: a second or two where a block takes a tenth of one.

    Args:
        run: settled; all ranks have the same.
        mesh: the grid.
    """
    if run.parallel.overlap or not run.parallel.sp or "tp" not in mesh.axes or mesh.world is None:
        return run.parallel.overlap
    axis = mesh.axes["tp"]
    streams = {n: Stream(axis, n, CODES[run.parallel.tp_compress]) for n in (1, *(axis.size * 2**i for i in range(4)))}
    fed, most = sequences(run)
    products = block(run, fed, mesh.device)
    # The first round is for the ranks to agree on how many more there is time for.
    first = torch.tensor([_seconds(products, stream) for stream in streams.values()], device=mesh.device)
    rounds = _SECONDS / mesh.world.all_reduce(first, largest=True).sum().item()
    taken = [
        [_seconds(products, stream) for stream in streams.values()]
        for _ in range(max(1, min(_MOST_ROUNDS, int(rounds))))
    ]
    slowest = mesh.world.all_reduce(torch.tensor(taken, device=mesh.device), largest=True).median(0).values
    for _, n in sorted(zip(slowest.tolist(), streams, strict=True)):
        if n == 1 or not mesh.largest(not same_bits(run, streams[n], most, mesh.device)):
            return n
    return 1


def sequences(run: Run) -> tuple[int, int]:
    """The most in a pass of training, and in any pass."""
    ranks = layout.data_rank(run.parallel, 0)[0]
    fed, looked_at = (
        len(layout.share(0, all_of_them, ranks, 0)) for all_of_them in (settings.batch_sequences(run), run.eval.samples)
    )
    most = run.train.micro_batch
    return min(most, fed), min(most, max(fed, looked_at))


def same_bits(run: Run, stream: Stream, most: int, device: torch.device) -> bool:
    """Whether a block's products in a stream's pieces are those in one, as this rank sees it.

    Args:
        run: whose block.
        stream: cut in pieces.
        most: sequences; all numbers up to it are tried.
        device: where to compute.
    """
    whole = Stream(stream.axis, 1, stream.code)
    same = True
    for count in range(1, most + 1):  # the ranks take all, whatever one of them finds
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
