"""Checkpoints on disk: whole or invisible, and never loaded damaged.

One checkpoint is a folder `step-00000100` with the shards torch.distributed.checkpoint writes and a `manifest.json` that
lists each file's length and checksum. It is written under a hidden name, manifest last, made durable, and only then
renamed: what bears the name is complete. Which one is newest follows from the manifests, counted by order of commit; no
file says it.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from outlast import records
from outlast.errors import OutlastError, StorageError

_RECORD: Final = ("checkpoint", 1)
_NAME: Final = re.compile(r"step-\d{8}")
_READ_AT_ONCE: Final = 1 << 24
_MOVE_AWAY: Final = "move its folder away, and the same command goes on from the one before"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: the last step that went into it.
        commit: how many were committed before it, and it.
        about: what the loop keeps beside the tensors.
        files: length and crc32 of each file.
    """

    path: Path
    step: int
    commit: int
    about: dict[str, Any]
    files: dict[str, dict[str, int]]

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file["bytes"] for file in self.files.values())


class Store:
    """The checkpoints of a run.

    Args:
        folder: where they lie.
        keep: how many of the newest to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Saved]:
        """Every complete checkpoint, oldest commit first."""
        names = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(
            (_opened(path) for path in names if (path / "manifest.json").exists()), key=lambda saved: saved.commit
        )

    def newest(self) -> Saved | None:
        """The last one committed, or None."""
        return max(self.all(), key=lambda saved: saved.commit, default=None)

    def save(self, step: int, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> Saved:
        """Commit a checkpoint.

        Args:
            step: the last step that went into it.
            tensors: by name.
            about: JSON values to keep beside them.

        Returns:
            The new one.

        Raises:
            StorageError: it could not be written; the earlier ones are untouched, the half one is gone.
        """
        path = self.folder / f"step-{step:08d}"
        half = self.folder / f".{path.name}.half"
        commit = 1 + max((saved.commit for saved in self.all()), default=0)
        with records.storage_errors(f"cannot write the checkpoint of step {step}", path):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            try:
                _write_shards(tensors, half)
                files = {
                    name.name: {"bytes": name.stat().st_size, "crc32": _crc32(name)} for name in sorted(half.iterdir())
                }
                for name in files:
                    records.fsync(half / name)
                manifest = {"step": step, "commit": commit, "about": about, "files": files}
                records.write_json(half / "manifest.json", *_RECORD, manifest | {"crc32": _crc32_of(manifest)})
                if path.exists():  # the same step of a history that was taken back
                    os.rename(path, self.folder / f".{path.name}.old")
                os.rename(half, path)
                records.fsync(self.folder)
            finally:
                self._clear_leftovers()
        return Saved(path, step, commit, about, files)

    def trim(self) -> list[Saved]:
        """Remove the checkpoints beyond the newest `keep`. Returns them.

        Raises:
            StorageError: one could not be removed.
        """
        beyond = self.all()[: -self.keep]
        for old in beyond:
            with records.storage_errors("cannot remove an old checkpoint", old.path):
                # Renamed first: a removal cut short must not leave a folder that looks complete.
                hidden = self.folder / f".{old.path.name}.old"
                os.rename(old.path, hidden)
                shutil.rmtree(hidden)
        return beyond

    def _clear_leftovers(self) -> None:
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _opened(path: Path) -> Saved:
    try:
        manifest = records.read_json(path / "manifest.json", *_RECORD)
        content = {name: manifest[name] for name in ("step", "commit", "about", "files")}
        if manifest["crc32"] != _crc32_of(content):
            raise OutlastError("its content is not what was written")
    except (OutlastError, KeyError) as error:
        raise StorageError(
            f"checkpoint {path.name} is damaged: manifest.json: {error}".splitlines()[0],
            fix=_MOVE_AWAY,
            where=str(path),
        ) from None
    return Saved(path, manifest["step"], manifest["commit"], manifest["about"], manifest["files"])


def verify(saved: Saved) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises:
        StorageError: naming the first file that is missing, of another length, or of other content.
    """
    for name, wanted in saved.files.items():
        file = saved.path / name
        found = {"bytes": file.stat().st_size, "crc32": _crc32(file)} if file.exists() else None
        if found != wanted:
            raise StorageError(
                f"checkpoint {saved.path.name} is damaged: {name} "
                + ("is missing" if found is None else f"has {found}, the manifest says {wanted}"),
                fix=_MOVE_AWAY,
                where=str(saved.path),
            )


def contents(saved: Saved) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a checkpoint."""
    entries = dcp.FileSystemReader(saved.path).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def load(saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint in place, in whatever layout they are kept now. Verify it first.

    Raises:
        OutlastError: the checkpoint has no such tensor, or one of another shape.
    """
    there = contents(saved)
    for name, tensor in tensors.items():
        if there.get(name) != tensor.shape:
            raise OutlastError(
                f"the checkpoint's {name} is {tuple(there[name]) if name in there else 'missing'}, wanted {tuple(tensor.shape)}",
                where=str(saved.path),
            )
    with _one_process():
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(saved.path), no_dist=True)


def _write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    # One thread: with more, torch 2.13 loses the error of any but the first, a full disk included.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
    try:
        with _one_process():
            dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    except dcp.api.CheckpointException as error:
        raise _cause(error.failures.values()) from error


def _cause(failures: Iterable[Any]) -> BaseException:
    """The system's error inside torch's: it gives (exception, traceback) a rank, and covers one by another."""
    first = next(iter(failures))
    error = first[0] if isinstance(first, tuple) else first
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__cause__ or inner.__context__
    return inner or StorageError(f"cannot write the checkpoint: {error}")


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Quiet torch's warning that it saves or loads without a process group: that is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _crc32_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_READ_AT_ONCE):
            value = zlib.crc32(block, value)
    return value
