"""One stream of tokens on disk, written once and memory-mapped by any number of ranks.

tokens-00000.bin …  ids, little-endian, 2 or 4 bytes each
ends.bin            where each document ends, counted in tokens from the start of the stream: int64
learn-00000.bin …   a byte a token, 1 where it may be a target; only where there is one that may not
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, UInt

from outlast import records


class TokenStream:
    """The tokens of one split of one group, documents end to end.

    Args:
        folder: where its files are.
        about: its part of the manifest.
        dtype: of the tokens.
        shard: tokens in a file.

    Attributes:
        documents: how many there are.
        ends: where each document ends, counted in tokens from the start of the stream.
    """

    def __init__(self, folder: Path, about: dict[str, Any], dtype: np.dtype, shard: int) -> None:
        self._folder = folder
        self._tokens_in, self.documents, self._shard, self._dtype = about["tokens"], about["documents"], shard, dtype
        self.ends: Int64[np.ndarray, "D"] = _mapped(folder / "ends.bin", "<i8")
        self._tokens = [_mapped(path, dtype) for path in sorted(folder.glob("tokens-*.bin"))]
        self._learn = [_mapped(path, "?") for path in sorted(folder.glob("learn-*.bin"))]
        self._files = [name for name, _ in about["files"]]
        self._files_upto = list(accumulate(count for _, count in about["files"]))

    def __len__(self) -> int:
        return self._tokens_in

    def read(self, start: int, stop: int) -> UInt[np.ndarray, "T"]:
        """Tokens [start, stop), which must be there."""
        return self._across(self._tokens, start, stop, self._dtype)

    def learn(self, start: int, stop: int) -> Bool[np.ndarray, "T"] | None:
        """Which of the tokens [start, stop) may be targets; None: all, throughout the stream."""
        return self._across(self._learn, start, stop, np.dtype(bool)) if self._learn else None

    def file_of(self, document: int) -> str:
        """The file that a document is from."""
        return self._files[bisect_right(self._files_upto, document)]

    def kept(self, name: str, numbers: Callable[[], Iterator[np.ndarray]]) -> Int64[np.ndarray, "N"]:
        """Numbers that follow from the stream, made at the first call and then kept beside it, memory-mapped.

        Args:
            name: of the file.
            numbers: makes them, part by part.

        Raises:
            StorageError: they cannot be written there.
        """
        path = self._folder / name
        new = path.with_name(f".{name}.{os.getpid()}.new")
        if not path.exists():
            with records.storage_errors(f"cannot write {name} beside the tokens", path):
                try:
                    with open(new, "wb") as file:
                        for part in numbers():
                            file.write(np.ascontiguousarray(part, dtype="<i8").data)
                    records.fsync(new)
                    new.replace(path)
                finally:
                    new.unlink(missing_ok=True)
        return _mapped(path, "<i8")

    def _across(self, shards: list[np.ndarray], start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        parts = [
            shards[i][max(0, start - i * self._shard) : stop - i * self._shard]
            for i in range(start // self._shard, -(-stop // self._shard))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, dtype)])


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    # An ndarray, not a memmap: slices of those are slow. An empty file cannot be mapped.
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


class _Numbers:
    """Numbers appended to files of at most `shard` each, and a hash of them. No file is left open."""

    def __init__(self, folder: Path, name: str, shard: int) -> None:
        self._folder, self._name, self._shard = folder, name, shard
        self.count, self.digest = 0, hashlib.sha256()
        (folder / name.format(0)).touch()

    def write(self, numbers: np.ndarray) -> None:
        self.digest.update(numbers.data)
        while len(numbers):
            shard, filled = divmod(self.count, self._shard)
            part = numbers[: self._shard - filled]
            with open(self._folder / self._name.format(shard), "ab") as file:
                file.write(part.data)
            self.count, numbers = self.count + len(part), numbers[len(part) :]


class StreamWriter:
    """A token stream being written.

    Args:
        folder: where; made here.
        dtype: of the tokens.
        shard: most tokens in a file.
    """

    def __init__(self, folder: Path, dtype: np.dtype, shard: int) -> None:
        folder.mkdir()
        self.folder, self._shard = folder, shard
        self._tokens, self._ends = _Numbers(folder, "tokens-{:05d}.bin", shard), _Numbers(folder, "ends.bin", 1 << 62)
        self._learn: _Numbers | None = None
        self._files: list[tuple[str, int]] = []
        self._parts: list[tuple[np.ndarray, bool]] = []
        self._new_ends: list[int] = []
        self._length = 0

    def add(self, parts: list[tuple[np.ndarray, bool]], ended_in: str) -> None:
        """Take the next tokens, each part with whether it is learned; `ended_in` is the file where a document ends."""
        self._parts += parts
        self._length += sum(len(ids) for ids, _ in parts)
        if ended_in:
            self._new_ends.append(self._length)
            last, count = self._files[-1] if self._files else ("", 0)
            if last == ended_in:
                self._files[-1] = (last, count + 1)
            else:
                self._files.append((ended_in, 1))

    def flush(self) -> None:
        """Write what was added."""
        if not self._parts:
            return
        learn = np.array([learned for _, learned in self._parts])
        if self._learn is None and not learn.all():  # the first tokens that are not learned: all before them are
            self._learn = _Numbers(self.folder, "learn-{:05d}.bin", self._shard)
            for start in range(0, self._tokens.count, 1 << 20):
                self._learn.write(np.ones(min(1 << 20, self._tokens.count - start), dtype=bool))
        if self._learn is not None:
            self._learn.write(np.repeat(learn, [len(ids) for ids, _ in self._parts]))
        self._tokens.write(np.concatenate([ids for ids, _ in self._parts]))
        self._ends.write(np.array(self._new_ends, dtype="<i8"))
        self._parts, self._new_ends = [], []

    def close(self) -> dict[str, Any]:
        """Make it durable. Returns its part of the manifest."""
        for path in (*self.folder.iterdir(), self.folder):
            records.fsync(path)
        digests = [kind.digest.hexdigest() for kind in (self._tokens, self._ends, self._learn) if kind is not None]
        return {"tokens": self._length, "documents": self._ends.count, "files": self._files, "sha256": digests}
