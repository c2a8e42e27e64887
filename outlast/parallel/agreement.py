"""The check at every start: ranks run the same thing, replicas are equal, and shards are not.

Ranks that should hold the same and drift, or that drew the same shard twice, still learn: the loss falls, and nothing
says so. It costs one pass over the weights.
"""

import hashlib
import itertools
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from outlast import layout
from outlast.errors import RanksDifferError
from outlast.parallel.gradients import Part
from outlast.parallel.mesh import Mesh

_AT_ONCE: Final = 1 << 22
_ODD: Final = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum(x: Tensor) -> int:
    """A 64-bit sum of the bits of a tensor's elements, each times an odd number of its place; exact in any order."""
    flat = x.detach().reshape(-1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].view(kind).to(torch.int64)
        places = torch.arange(start, start + bits.numel(), device=x.device)
        total += (bits * (2 * places * _ODD + 1)).sum()
    return int(total.item())


def same_folder(mesh: Mesh, folder: Path) -> None:
    """Check that all ranks see the folder that the leading one writes to: each keeps its part of a checkpoint there.

    Raises:
        RanksDifferError: naming the rank that does not.
    """
    if mesh.world is None:
        return
    mark = folder / f".seen-by-all-{secrets.token_hex(8)}"
    if mesh.leads:
        mark.touch()
    name = mesh.axes["checkpoint"].gather_objects(mark.name)[0]
    seen = mesh.axes["checkpoint"].gather_objects((folder / name).exists())
    if mesh.leads:
        mark.unlink()
    if not all(seen):
        raise RanksDifferError(
            f"rank {seen.index(False)} does not see the run folder that rank 0 writes to",
            fix="put the run folder on a disk that all hosts share, and give every rank the same --folder",
            where=str(folder),
        )


def same_everywhere(mesh: Mesh, facts: dict[str, Any]) -> None:
    """Check that all ranks go by the same facts.

    Raises:
        RanksDifferError: naming the first that one rank sees otherwise than rank 0, and both values.
    """
    if mesh.world is None:
        return
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=mesh.device)
    if len(set(mesh.world.all_gather(mine).tolist())) == 1:
        return
    told = mesh.world.gather_objects(facts)
    for rank, one in enumerate(told):
        for key in told[0] | one:
            if told[0].get(key) != one.get(key):
                raise RanksDifferError(
                    f"the ranks do not run the same thing: {key} is {told[0].get(key)!r} on rank 0, {one.get(key)!r} on rank {rank}",
                    fix="start every rank with the same command, corpus and run folder",
                )


def replicas_equal_shards_different(parts: Sequence[Part], mesh: Mesh) -> None:
    """Check, along each axis, that what its ranks should hold alike they do, and that what they share out differs.

    A matrix whose parts have the same values along an axis is wrong; one that is a constant, such as weights of
    deviation 0, may be. Every rank tells the same: one that went on would wait for those that did not.

    Raises:
        RanksDifferError: naming the axis, the ranks and the parameter.
    """
    if mesh.world is None:
        return
    sums = torch.tensor([checksum(part.parameter) for part in parts], device=mesh.device)
    varied = [
        bool(part.place.elements) and bool((part.parameter != part.parameter.view(-1)[0]).any()) for part in parts
    ]
    facts = torch.stack((sums, torch.tensor(varied, device=mesh.device).to(sums)))
    found = []
    for name in (axis for axis in layout.AXES if axis in mesh.axes):
        told = mesh.axes[name].all_gather(facts[None]).tolist()
        found += _wrong_along(name, parts, told)
    for error in (error for errors in mesh.world.gather_objects(found) for error in errors):
        raise error


def _wrong_along(axis: str, parts: Sequence[Part], told: list[list[list[int]]]) -> list[RanksDifferError]:
    """The first that is not as it should be; told by every rank of the axis are checksums, and what is no constant."""
    for i, part in enumerate(parts):
        for (one, (sums, varied)), (other, (others, _)) in itertools.combinations(enumerate(told), 2):
            if axis in part.alike and sums[i] != others[i]:
                return [
                    RanksDifferError(
                        f"{part.name} should be the same along {axis}, and ranks {one} and {other} of it differ",
                        fix="start again from a checkpoint; if it comes back, a rank's memory or its software is at fault",
                    )
                ]
            matrix = len(part.place.whole) > 1 and varied[i]
            if axis not in part.alike and matrix and sums[i] == others[i]:
                return [
                    RanksDifferError(
                        f"{part.name} should be shared out along {axis}, and ranks {one} and {other} of it hold the same part",
                        fix="the checkpoint or the weights begun from are not what they should be",
                    )
                ]
    return []
