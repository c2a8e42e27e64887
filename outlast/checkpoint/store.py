"""Checkpoints on disk: whole or invisible, and never loaded damaged.

One checkpoint is a folder `step-00000100` with the shards torch.distributed.checkpoint writes and a `manifest.json` that
lists each file's length and checksum. It is written under a hidden name, manifest last, made durable, and only then
renamed: what bears the name is complete. Which one is newest follows from the manifests, counted by order of commit; no
file says it.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from outlast import records
from outlast.checkpoint import shards
from outlast.checkpoint.shards import Shard
from outlast.comm.collectives import Axis
from outlast.errors import OutlastError, StorageError

_T = TypeVar("_T")
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
        folder: where they lie; every rank's, on a disk they share.
        keep: how many of the newest to keep.
        ranks: those that write a checkpoint together; None where this process is alone.
    """

    def __init__(self, folder: Path, keep: int, ranks: Axis | None = None) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks

    def all(self) -> list[Saved]:
        """Every complete checkpoint, oldest commit first."""
        names = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(
            (_opened(path) for path in names if (path / "manifest.json").exists()), key=lambda saved: saved.commit
        )

    def newest(self) -> Saved | None:
        """The last one committed, or None."""
        return max(self.all(), key=lambda saved: saved.commit, default=None)

    def save(self, step: int, tensors: Mapping[str, Shard], about: dict[str, Any]) -> Saved:
        """Commit a checkpoint, together with all ranks.

        Args:
            step: the last step that went into it.
            tensors: this rank's parts, by name.
            about: JSON values to keep beside them.

        Returns:
            The new one.

        Raises:
            StorageError: a rank could not write; the earlier ones are untouched, the half one is gone.
        """
        path = self.folder / f"step-{step:08d}"
        half = self.folder / f".{path.name}.half"
        group = self.ranks.group if self.ranks else None

        def written() -> dict[str, dict[str, int]]:
            shards.write(tensors, half, group)
            mine = half.glob(f"__{self.ranks.rank if self.ranks else 0}_*")
            return {
                name.name: _durable(name) for name in sorted([*mine, *((half / ".metadata",) if self._leads else ())])
            }

        with records.storage_errors(f"cannot write the checkpoint of step {step}", path):
            try:
                commit = self._leader(self._prepare)
                files = {name: about for mine in self._everyone(written) for name, about in mine.items()}
                manifest = {"step": step, "commit": commit, "about": about, "files": files}
                self._leader(lambda: self._commit(path, half, manifest))
            finally:
                if self._leads:
                    self._clear_leftovers()
        return Saved(path, step, commit, about, files)

    @property
    def _leads(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def _everyone(self, work: Callable[[], _T]) -> list[_T]:
        """Do it on every rank, and hear what came of it; where one fails all raise its error."""
        result, error = None, None
        try:
            result = work()
        except (OSError, OutlastError) as failed:
            error = failed
        told = self.ranks.gather_objects((result, error)) if self.ranks else [(result, error)]
        for _, error in told:
            if error is not None:
                raise error
        return [result for result, _ in told]

    def _leader(self, work: Callable[[], _T]) -> _T:
        """Do it on the leading rank, and let all know."""
        return self._everyone(work if self._leads else lambda: None)[0]  # pyrefly: ignore[bad-return]

    def _prepare(self) -> int:
        """Make room; returns the new checkpoint's place in the order of commit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        return 1 + max((saved.commit for saved in self.all()), default=0)

    def _commit(self, path: Path, half: Path, manifest: dict[str, Any]) -> None:
        records.write_json(half / "manifest.json", *_RECORD, manifest | {"crc32": _crc32_of(manifest)})
        if path.exists():  # the same step of a history that was taken back
            os.rename(path, self.folder / f".{path.name}.old")
        os.rename(half, path)
        records.fsync(self.folder)

    def load(self, saved: Saved, tensors: Mapping[str, Shard]) -> None:
        """Fill this rank's parts from a checkpoint, whatever layout wrote it, once it is found undamaged.

        Raises:
            StorageError: a file is missing, of another length, or of other content.
            OutlastError: the checkpoint has no such tensor, or one of another shape.
        """
        ranks, rank = (self.ranks.size, self.ranks.rank) if self.ranks else (1, 0)
        self._everyone(lambda: verify(saved, list(saved.files)[rank::ranks]))
        shards.read(tensors, saved.path)

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


def verify(saved: Saved, names: Sequence[str] | None = None) -> None:
    """Read the files of a checkpoint, or some of them, and compare them with the manifest.

    Raises:
        StorageError: naming the first file that is missing, of another length, or of other content.
    """
    for name in saved.files if names is None else names:
        file, wanted = saved.path / name, saved.files[name]
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
    return shards.contents(saved.path)


def _durable(file: Path) -> dict[str, int]:
    """Make a file survive a power cut. Returns its length and checksum."""
    about = {"bytes": file.stat().st_size, "crc32": _crc32(file)}
    records.fsync(file)
    return about


def _crc32_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_READ_AT_ONCE):
            value = zlib.crc32(block, value)
    return value
