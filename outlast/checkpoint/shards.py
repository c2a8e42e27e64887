"""The tensors of a checkpoint on disk, in the form of torch.distributed.checkpoint (DCP), each rank with its parts.

DCP is told where a part lies in the whole, and nothing of the layout: what one layout wrote any other reads.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from outlast.errors import OutlastError, StorageError
from outlast.places import Place


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor, as DCP asks for it (torch.distributed._checkpointable).

    Attributes:
        tensor: the part.
        place: where it lies in the whole. Ranks may have the same part: one of them writes it.
    """

    tensor: Tensor
    place: Place

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.place.offset), torch.Size(self.place.shape))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.place.elements:
            return []
        properties = TensorProperties.create_from_tensor(self.tensor)
        about = TensorWriteData(self._chunk(), properties, torch.Size(self.place.whole))
        return [WriteItem(MetadataIndex(name, torch.Size(self.place.offset)), WriteItemType.SHARD, tensor_data=about)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.place.elements else []


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # what it covers does not travel to the other ranks
            raise _system_error(error) or error from error


class _Save(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class _Load(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own puts None in the place of what is neither a tensor nor a number.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Tensors that this rank has all of."""
    return {name: Shard(tensor, Place.all_of(tuple(tensor.shape))) for name, tensor in tensors.items()}


def contents(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a checkpoint's folder."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def write(shards: Mapping[str, Shard], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's shards, together with the ranks of a group; None where this process is alone.

    Raises:
        OSError: the system's error, of whichever rank had it, on every rank.
    """
    # One thread: with more, torch 2.13 loses the error of any but the first, a full disk included.
    writer = _Writer(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
    try:
        with _one_process():
            dcp.save(dict(shards), storage_writer=writer, planner=_Save(), process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:
        raise _cause(error.failures.values()) from error


def read(shards: Mapping[str, Shard], folder: Path) -> None:
    """Fill this rank's shards, whatever layout wrote them. Each rank reads for itself.

    Raises:
        OutlastError: the checkpoint has no such tensor, or one of another shape.
    """
    there = contents(folder)
    for name, shard in shards.items():
        if there.get(name) != shard.place.whole:
            found = tuple(there[name]) if name in there else "missing"
            raise OutlastError(f"the checkpoint's {name} is {found}, wanted {shard.place.whole}", where=str(folder))
    reader, planner = dcp.FileSystemReader(folder), _Load(flatten_state_dict=False)
    with _one_process():
        dcp.load(dict(shards), storage_reader=reader, planner=planner, no_dist=True)


def _cause(failures: Iterable[Any]) -> BaseException:
    """The system's error inside torch's: it gives (exception, traceback) a rank, and covers one by another."""
    errors = [failure[0] if isinstance(failure, tuple) else failure for failure in failures]
    known = next((inner for error in errors if (inner := _system_error(error))), None)
    return known or StorageError(f"cannot write the checkpoint: {errors[0]}")


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Quiet torch's warning that it saves or loads without a process group: that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
