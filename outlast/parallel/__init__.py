"""One model spread over a grid of ranks. :func:`apply` is the whole composition, a line a parallelism."""

import torch

from outlast.config import Run
from outlast.model.transformer import Transformer
from outlast.parallel import data_parallel, ring_attention, tensor_parallel, ulysses
from outlast.parallel.gradients import Part, local, parts
from outlast.parallel.mesh import Mesh


def apply(model: Transformer, run: Run, mesh: Mesh) -> None:
    """Keep of a model without memory what is this rank's, and fill the seams with what moves between ranks.

    Each line may be deleted, with its file and its import: the layouts that do not need it still work.
    """
    ring_attention.apply(model, mesh)
    ulysses.apply(model, mesh)
    tensor_parallel.apply(model, run, mesh)
    data_parallel.apply(model, mesh)


def build(run: Run, mesh: Mesh) -> tuple[Transformer, list[Part]]:
    """The rank's part of a run's model, with its initial weights drawn where they are kept."""
    with torch.device("meta"):
        model = Transformer(run.model, getattr(torch, run.train.dtype), run.train.seed)
    apply(model, run, mesh)
    model.take_memory(mesh.device)
    mine = parts(model, run, mesh)
    model.initialize(run.train.seed, ((part.name, local(part.source), part.place) for part in mine))
    return model, mine
