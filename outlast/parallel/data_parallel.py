"""Sharded data parallelism: the ranks of `dp_shard` share one copy's weights, gradients and moments, by torch's FSDP2.

With `shard_sequence_ranks` those that share a sequence do, too. A block's weights are gathered before it works and let
go after; its gradients are summed and scattered as they appear. The next block's weights travel while one works, forward
by our word and backward by FSDP2's own, and a block's gradients while the next one's are made: over gloo by transfers that
were posted, with NCCL on a stream of their own. The transfers are ours, so that they are counted, and a reduce-scatter
over gloo moves half of what torch's would. Under bfloat16 blocks are gathered in it, embedding and output in float32.
Norm weights stay whole on every rank: they are few, and where products are in bfloat16 they must not be. What copies
(`dp_replicate`) sum at the end of a step is :mod:`outlast.parallel.gradients`' business.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054) stage 3.
"""

import copy
import functools
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from outlast import layout
from outlast.comm.collectives import Axis
from outlast.comm.pieces import Gathering, Scattering, Stream
from outlast.model.loss import sum_dtype
from outlast.model.transformer import Transformer
from outlast.parallel.mesh import Mesh


def apply(model: Transformer, mesh: Mesh) -> None:
    """Shard each block, then what is left: embedding and output, which are gathered once a pass.

    Args:
        model: on the meta device, its tensors already this rank's of `tp`.
        mesh: the grid; nothing is done where nobody shares weights so.
    """
    if mesh.sharing is None:
        return
    exact, axis = sum_dtype(model.compute), copy.copy(mesh.axes["shard"])
    axis.choices = None  # straight: no algorithm is chosen for what travels under work
    under_way: list[_Sum] = []
    for module in (*model.layers, model):
        # The gradient of an embedding is a sum over every place a token stands at: not one to take in 16 bits.
        moved = None if module is model or model.compute == exact else model.compute
        policy = MixedPrecisionPolicy(param_dtype=moved, reduce_dtype=exact, cast_forward_inputs=False)
        whole = {parameter for name, parameter in module.named_parameters() if not layout.fsdp_shards(f".{name}")}
        fully_shard(module, mesh=mesh.sharing, mp_policy=policy, ignored_params=whole)
        _count_and_sum(module, axis, under_way)
    for module, following in itertools.pairwise((model, *model.layers)):
        _sharded(module).set_modules_to_forward_prefetch([_sharded(following)])


def _count_and_sum(module: nn.Module, axis: Axis, under_way: "list[_Sum]") -> None:
    """Have FSDP2 call our transfers, and sum gradients rather than average them: the loss is already a share."""
    sharded = _sharded(module)
    sharded.set_custom_all_gather(_AllGather(axis))
    sharded.set_custom_reduce_scatter(_ReduceScatter(axis, sharded, under_way))
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _sharded(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not sharded")
    return module


class _Transfer:
    def __init__(self, axis: Axis) -> None:
        self.axis, self.stream = axis, Stream(axis, axis.size)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for one side of a transfer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Transfer, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
    ) -> dist.Work | None:
        if not self.axis.freely:
            self.axis.all_gather(input_tensor, output_tensor)  # on the stream that FSDP2 keeps for it
            return None
        return _UnderWay(self.axis, self.stream.gather(input_tensor, output_tensor))


class _UnderWay(dist.Work):
    """What FSDP2 waits for before it first uses what was gathered; or another axis, that shares a slow link."""

    def __init__(self, axis: Axis, gathering: Gathering) -> None:
        super().__init__()
        self.axis, self.gathering = axis, gathering
        if axis.link is not None:
            axis.link.enter(axis.name, self)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.gathering.finish()
        if self.axis.link is not None:
            self.axis.link.leave(self)
        return True


class _ReduceScatter(_Transfer, ReduceScatter):
    """Sums that are there before the next block's are sent, or when the backward pass ends.

    FSDP2 expects them at once, but does not read them: it makes the gradient a view of where they are put, or adds them
    to the gradient of the step's earlier passes. Then it is given zeros to add, and what came is added when it is there.
    So there are the whole gradients of two blocks at most: one's on their way, the next one's being made.
    """

    def __init__(self, axis: Axis, module: FSDPModule, under_way: "list[_Sum]") -> None:
        super().__init__(axis)
        self.module, self.under_way = module, under_way

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
        if not self.axis.freely:
            self.axis.reduce_scatter(input_tensor, output_tensor)
            return
        _end(self.under_way)
        gradient = self._earlier(output_tensor)
        if gradient is not None:
            output_tensor.zero_()
        scattering = self.stream.scatter(input_tensor, output_tensor if gradient is None else None)
        self.under_way.append(_Sum(self.axis, scattering.at_once(), gradient))
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_end, self.under_way))

    def _earlier(self, like: Tensor) -> Tensor | None:
        """The sums of the step's earlier passes, all parameters' gradients being views of them; None in the first."""
        group = self.module._get_fsdp_state()._fsdp_param_group
        for one in group.fsdp_params if group else ():
            if isinstance(one.sharded_param.grad, DTensor):
                return like.new_empty(0).set_(one.sharded_param.grad.to_local().untyped_storage(), 0, like.shape, (1,))
        return None


class _Sum:
    """A block's gradients on their way to be summed, into where they belong or on top of what is there."""

    def __init__(self, axis: Axis, scattering: Scattering, gradient: Tensor | None) -> None:
        self.axis, self.scattering, self.gradient = axis, scattering, gradient
        if axis.link is not None:
            axis.link.enter(axis.name, self)

    def wait(self) -> None:
        """Have them there; at once, where that has been done before."""
        total = self.scattering.total()
        if self.gradient is not None:
            self.gradient.add_(total)
            self.gradient = None
        if self.axis.link is not None:
            self.axis.link.leave(self)


def _end(under_way: list[_Sum]) -> None:
    while under_way:
        under_way.pop().wait()
