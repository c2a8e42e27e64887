"""Tensor parallelism: each rank holds some heads, some feed-forward channels and some of the vocabulary.

Without sequence parallelism every rank has the whole residual stream; products into attention and feed-forward need no
transfer forward, and those out of them are summed by an all-reduce. With it (`parallel.sp`) a rank has the stream at S/t
positions of each sequence: the all-reduce falls into its two halves, a reduce-scatter where a product leaves and an
all-gather where the next one enters, the same bytes, and what lies between is kept once instead of t times. There the
products fall into pieces that travel under one another: :mod:`outlast.comm.overlap`.

The gathered stream stands in rank order, as :mod:`outlast.parallel.inputs` says, so that gathering and scattering copy
nothing. Feed-forward does not mind; attention puts the sequences together.

Source: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.

Shapes: as in :mod:`outlast.model.transformer`, and t ranks, R = S/t positions under sequence parallelism else S.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from outlast import layout
from outlast.comm.overlap import GatherMultiply, MultiplyScatter
from outlast.comm.pieces import Stream
from outlast.comm.rows import CODES
from outlast.config import Run
from outlast.data import IGNORED
from outlast.model.loss import Columns, loss_and_gradients
from outlast.model.transformer import Packing, Transformer
from outlast.parallel.mesh import Mesh


def apply(model: Transformer, run: Run, mesh: Mesh) -> None:
    """Keep this rank's part of each parameter of a model without storage, and fill the seams.

    Args:
        model: on the meta device.
        run: its [parallel] and [model] knobs count; :func:`outlast.layout.check` has passed them.
        mesh: the grid; nothing is done where its tp is 1.
    """
    if "tp" not in mesh.axes:
        return
    for name, parameter in list(model.named_parameters()):
        place = layout.tp_place(name, run.model, run.parallel, mesh.rank)
        module = model.get_submodule(name.rpartition(".")[0])
        part = torch.empty(place.shape, dtype=parameter.dtype, device=parameter.device)
        setattr(module, name.rpartition(".")[2], nn.Parameter(part))
    model.tie()
    seams = _Seams(model, run, mesh)
    model.fill(embed=seams.embed, project_in=seams.project_in, project_out=seams.project_out, loss=seams.loss)
    if run.parallel.sp:
        model.fill(attend=seams.attend)


class _Seams:
    """The seams of one model under tensor parallelism."""

    def __init__(self, model: Transformer, run: Run, mesh: Mesh) -> None:
        self.axis, self.sp, self.regather = mesh.axes["tp"], run.parallel.sp, run.parallel.sp_regather
        # 0 pieces: left to be measured, and this model was built without a run's start.
        self.stream = Stream(self.axis, max(1, run.parallel.overlap), CODES[run.parallel.tp_compress])
        self.compute, self.attend_whole = model.compute, model.seams.attend
        rows = layout.share(0, run.model.vocab_size, self.axis.size, self.axis.rank)
        self.vocabulary = rows
        widest = len(layout.share(0, run.model.vocab_size, self.axis.size, 0))
        self.columns = Columns(rows.start, widest, self._merge)
        kv_heads, k = run.model.num_kv_heads, run.model.head_dim
        head = self.axis.rank * kv_heads // self.axis.size  # where there are fewer of them than ranks
        self.kv_rows = slice(head * k, (head + 1) * k) if kv_heads % self.axis.size else slice(None)

    def embed(self, tokens: Int64[Tensor, "_ R"], weight_VD: Float[Tensor, "v D"]) -> Float[Tensor, "B R D"]:
        """Look up the tokens this rank has, and sum: only one rank has each."""
        here = (tokens >= self.vocabulary.start) & (tokens < self.vocabulary.stop)
        x = F.embedding((tokens - self.vocabulary.start).where(here, 0), weight_VD).to(self.compute)
        return self._leave(x * here[..., None])

    def project_in(self, x: Float[Tensor, "B R D"], into: Sequence[nn.Linear]) -> tuple[Float[Tensor, "_ R _"], ...]:
        """The products that enter attention or feed-forward: this rank's heads or channels, of every position."""
        parts = [self._weight_and_bias(layer, x.dtype) for layer in into]
        if self.sp:
            weights, biases = zip(*parts, strict=True)
            return self._gather_multiply(x, *weights, *biases)
        entered = _Copy.apply(x, self.stream)
        return tuple(F.linear(entered, weight, bias) for weight, bias in parts)

    @torch.compiler.disable
    def _gather_multiply(self, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        return GatherMultiply.apply(x, self.stream, self.regather, len(weights_and_biases) // 2, *weights_and_biases)

    def _weight_and_bias(self, layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What this rank multiplies with; of key/value heads that each rank holds whole, the one its queries read."""
        whole = layer.weight.shape[0] == layer.out_features
        rows = self.kv_rows if whole else slice(None)
        return layer.weight[rows].to(dtype), None if layer.bias is None else layer.bias[rows].to(dtype)

    def project_out(self, x: Float[Tensor, "_ R F"], out: nn.Linear) -> Float[Tensor, "B R D"]:
        """The product that leaves: each rank has a summand of it. The bias comes once, after the sum."""
        weight = out.weight.to(x.dtype)
        summed = self._multiply_scatter(x, weight) if self.sp else self._leave(F.linear(x, weight))
        return summed if out.bias is None else summed + out.bias.to(x.dtype)

    @torch.compiler.disable
    def _multiply_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return MultiplyScatter.apply(x, weight, self.stream)

    @torch.compiler.disable
    def _leave(self, x: Tensor) -> Tensor:
        return _Scatter.apply(x, self.stream) if self.sp else _Sum.apply(x, self.stream)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, layer: int) -> Float[Tensor, "tB R h K"]:
        """Attention over whole sequences, in and out in rank order."""
        ranks, batch = self.axis.size, q.shape[0] // self.axis.size
        q, k, v = (x.unflatten(0, (ranks, batch)).transpose(0, 1).flatten(1, 2) for x in (q, k, v))
        mixed = self.attend_whole(q, k, v, packing, layer)
        return mixed.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)

    def loss(
        self, hidden: Float[Tensor, "B R D"], weight_VD: Float[Tensor, "v D"], targets: Int64[Tensor, "_ R"]
    ) -> Float[Tensor, ""]:
        """As :func:`outlast.model.loss.loss`, each rank with its part of the vocabulary; the result is the same on all."""
        if not torch.is_grad_enabled():
            hidden, weight_VD = hidden.detach(), weight_VD.detach()
        return _Loss.apply(hidden, weight_VD, targets, self)

    def _merge(self, sums_N: Tensor, chosen_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp over the whole vocabulary from those of its parts, and the target's logit from its one holder."""
        both = self.axis.all_gather(torch.stack((sums_N, chosen_N))[None])
        return both[:, 0].logsumexp(0), both[:, 1].sum(0)


class _Copy(torch.autograd.Function):
    """The stream enters products of which each rank has some: nothing forward, its gradient summed backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.all_reduce(grads[0].contiguous()), None  # made by the products for us alone


class _Sum(torch.autograd.Function):
    """Summands of the stream are summed: in place, since a product does not need its result again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream) -> Tensor:
        ctx.mark_dirty(x)
        return stream.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    """Summands of the whole stream to summed stretches; stretches of the gradient to the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream) -> Tensor:
        ctx.stream = stream
        return stream.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.all_gather(grads[0]), None


class _Loss(torch.autograd.Function):
    """The loss with its gradients made, and those of the stream summed, at once: kept as stretches, not as wholes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_VD: Tensor, targets: Tensor, seams: _Seams) -> Tensor:
        whole = seams.stream.all_gather(hidden) if seams.sp else hidden
        learned = targets != IGNORED
        wanted = ctx.needs_input_grad[:2]
        total, of_learned, of_weight = loss_and_gradients(
            whole[learned], weight_VD, targets[learned], wanted, seams.columns
        )
        of_hidden = None
        if of_learned is not None:
            of_whole = torch.zeros_like(whole)
            of_whole[learned] = of_learned
            of_hidden = seams.stream.reduce_scatter(of_whole) if seams.sp else seams.stream.all_reduce(of_whole)
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            None if of_hidden is None else (of_hidden * grads[0]).to(of_hidden.dtype),
            None if of_weight is None else (of_weight * grads[0]).to(ctx.weight_dtype),
            None,
            None,
        )
