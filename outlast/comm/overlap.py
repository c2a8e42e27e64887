"""Products under which their own rows travel: gather and multiply, multiply and scatter, forward and backward.

The stream of activations is gathered before products of which each rank has some columns, and summed and scattered
after a product of which each rank has a summand. Both fall into products of a few rows each, so a piece is multiplied
while the next one travels. Backward the one is the other: the gradient of what was gathered is multiplied and scattered.

The products of weights' gradients are sums over all rows. That of gather and multiply is taken in one, under the scatter
of the input's gradient; that of multiply and scatter by ranks' stretches, this rank's own while the others' are on
their way. So in how many pieces rows travel bears on no sum's order, and on no bit unless the library's product takes
another kernel for another number of rows: :mod:`outlast.parallel.chosen_pieces` looks.

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition" (ASPLOS), section 4;
Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.2, whose second gather this has too.

Shapes: N = n M rows, M of them a rank's stretch, n ranks; D channels of the stream, F of a rank's part of the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.comm.pieces import Stream


class GatherMultiply(torch.autograd.Function):
    """From a rank's stretch (B R D) to the products of all rows (nB R F) with each of some weights (F D).

    Args of apply: the stretch; the stream; whether to gather again in the backward pass rather than keep what was
    gathered; how many weights; these; as many biases (F) or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stream: Stream, regather: bool, count: int, *weights_and_biases: Any
    ) -> tuple[Tensor, ...]:
        """Multiply each piece as it comes."""
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.stream, ctx.regather, ctx.shape = stream, regather, x.shape
        ctx.biased = [bias is not None for bias in biases]
        gathering = stream.gather(x.flatten(0, 1))
        products = [x.new_empty(gathering.whole.shape[0], weight.shape[0]) for weight in weights]
        for rows in gathering:
            _multiply(gathering.whole[rows], weights, biases, [product[rows] for product in products])
        ctx.save_for_backward(x if regather else gathering.whole, *weights)
        return tuple(product.view(-1, x.shape[1], product.shape[1]) for product in products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send each piece of the input's gradient as it is made, and make the weights' under what is on its way."""
        kept, *weights = ctx.saved_tensors
        again = ctx.stream.gather(kept.flatten(0, 1)) if ctx.regather else None
        flat = [grad.flatten(0, 1) for grad in grads]
        scattering = ctx.stream.scatter(flat[0].new_empty(flat[0].shape[0], weights[0].shape[1]))
        for rows in scattering:
            of_rows = scattering.whole[rows]
            torch.mm(flat[0][rows], weights[0], out=of_rows)
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                of_rows.addmm_(grad[rows], weight)
        whole = again.finish() if again else kept
        of_weights = [grad.T @ whole for grad in flat]
        of_biases = [grad.sum(0) if biased else None for grad, biased in zip(flat, ctx.biased, strict=True)]
        return scattering.total().view(ctx.shape), None, None, None, *of_weights, *of_biases


class MultiplyScatter(torch.autograd.Function):
    """From all rows (nB R F) to the rank's stretch (B R D) of the products with a weight (D F), summed over the ranks.

    Args of apply: the rows; the weight; the stream.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stream: Stream) -> Tensor:
        """Send each piece as it is made."""
        ctx.stream, ctx.shape = stream, x.shape
        ctx.save_for_backward(x, weight)
        flat = x.flatten(0, 1)
        scattering = stream.scatter(x.new_empty(flat.shape[0], weight.shape[0]))
        for rows in scattering:
            torch.mm(flat[rows], weight.T, out=scattering.whole[rows])
        return scattering.total().view(-1, x.shape[1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply each piece of the gradient as it comes, this rank's own by both factors."""
        x, weight = ctx.saved_tensors
        gathering, flat = ctx.stream.gather(grads[0].flatten(0, 1)), x.flatten(0, 1)
        of_x, of_weight, own = torch.empty_like(flat), torch.empty_like(weight), gathering.own
        for i, rows in enumerate(gathering):
            torch.mm(gathering.whole[rows], weight, out=of_x[rows])
            if i == 0:  # under the first transfers
                torch.mm(gathering.whole[own].T, flat[own], out=of_weight)
        for stretch in ctx.stream.others(flat.shape[0]):
            of_weight.addmm_(gathering.whole[stretch].T, flat[stretch])
        return of_x.view(ctx.shape), of_weight, None


def _multiply(
    rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], products: Sequence[Tensor]
) -> None:
    for weight, bias, product in zip(weights, biases, products, strict=True):
        if bias is None:
            torch.mm(rows, weight.T, out=product)
        else:
            torch.addmm(bias, rows, weight.T, out=product)
