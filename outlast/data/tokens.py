"""The corpus as tokens on disk: tokenised once, before ranks start, and memory-mapped by all of them.

A document is the tokeniser's prefix, its pieces' tokens, and the end token. Each piece is encoded by itself, and a long
text is cut into pieces: the few tokens about a cut may be other than those of the uncut text, and a tokeniser that
begins every text with a space does so after each cut.

    <cache>/<key>/manifest.json       what is below, and each file's size; written last
                  <group>-<split>/    a stream, as streams.py has it; split is train or held_out

The folder is written under a hidden name, made durable, and renamed: what bears the name is complete.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from outlast import records
from outlast.config import Data
from outlast.data.sources import Damaged, Document, SourceFile, documents, identity, listing
from outlast.data.streams import StreamWriter, TokenStream
from outlast.data.tokenizer import Tokenizer, open_tokenizer
from outlast.environment import cache_folder, usable_cores
from outlast.errors import DataError, OutlastError, StorageError

__all__ = ["Corpus", "Group", "TokenStream", "Tokenizer", "open_tokenizer", "prepare"]

SHARD: Final = 1 << 30
"""Tokens in a file, at most. A mapped file stays open, and a process may often have no more than 1,024 of them."""
_RECORD: Final = ("corpus", 1)
_SPLITS: Final = ("train", "held_out")
_TELLING: Final = 1 << 15  # so many first characters tell a document from others
_NAMED: Final = 10  # damaged records that are named


@dataclass(frozen=True)
class Group:
    """Documents that have one share of the samples: those of one source, or of all where there are no shares."""

    name: str
    train: TokenStream
    held_out: TokenStream


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus.

    Attributes:
        fingerprint: of all tokens, document ends and learn masks, wherever they came from and however they are filed.
        groups: in the order of `data.sources`.
        damaged: records passed over.
        first_damaged: where the first ten of them are, and what is wrong with each.
        empty: documents without text, left out.
        bytes: size of the source files.
        folder: where it is kept.
    """

    fingerprint: str
    groups: list[Group]
    damaged: int
    first_damaged: list[tuple[str, str]]
    empty: int
    bytes: int
    folder: Path


def prepare(
    data: Data,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None] | None = None,
    shard: int = SHARD,
) -> Corpus:
    """Open the tokenised corpus, tokenising it first where the cache does not have it.

    Which documents are held out follows from their text alone: equal texts are always on the same side. Where that
    would leave a group nothing to learn from, its held-out documents are learned from instead.

    Args:
        data: the [data] knobs.
        tokenizer: what to tokenise with.
        progress: told bytes read and bytes in all, while tokenising.
        shard: most tokens in a file.

    Raises:
        DataError: a source is not there, has no text, changes meanwhile, or has a damaged record under
            ``bad_records = "stop"``.
        StorageError: the cache cannot be written; what was half written is removed.
    """
    listings = [listing(source) for source in data.sources]
    key = [_RECORD, [identity(files) for files in listings], tokenizer.fingerprint, tokenizer.eos, data.text_field]
    key += [data.held_out, data.bad_records, bool(data.weights)]
    folder = cache_folder(data) / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    if corpus := _opened(folder):
        return corpus
    with records.storage_errors("cannot write the tokenised corpus", folder), _workplace(folder) as half:
        manifest = _tokenised(data, tokenizer, listings, half, shard, progress or (lambda done, total: None))
        _check_unchanged(data, listings)
        records.write_json(half / "manifest.json", *_RECORD, manifest)
        try:
            os.rename(half, folder)
        except OSError:
            if not folder.exists():
                raise  # else another process was faster, and has written the same
        records.fsync(folder.parent)
    if corpus := _opened(folder):
        return corpus
    raise StorageError("the tokenised corpus cannot be read back", fix="is it removed by something?", where=str(folder))


def _tokenised(
    data: Data,
    tokenizer: Tokenizer,
    listings: list[list[SourceFile]],
    folder: Path,
    shard: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write all token streams into a folder. Returns the manifest."""
    total = sum(file.bytes for files in listings for file in files)
    work = _Tokenising(data, tokenizer, shard, progress, total)
    named = zip(data.sources, listings, strict=True) if data.weights else [("corpus", list(chain(*listings)))]
    groups: list[dict[str, Any]] = [
        {"name": name} | work.group(files, f"{folder}/{i}") for i, (name, files) in enumerate(named)
    ]
    if not any(group["train"]["documents"] for group in groups):
        first = "".join(f", the first {where}: {why}" for where, why in work.first_damaged[:1])
        raise DataError(
            f"there is no text in {', '.join(data.sources)}",
            fix=f"documents without text: {work.empty}; damaged: {work.damaged}{first}",
            key="data.sources",
        )
    contents = [[group[split]["sha256"] for split in _SPLITS] for group in groups]
    return {
        "fingerprint": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        "dtype": tokenizer.dtype.str,
        "shard": shard,
        "groups": groups,
        "damaged": work.damaged,
        "first_damaged": work.first_damaged,
        "empty": work.empty,
        "bytes": total,
        "sizes": {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.glob("*/*"))},
    }


def _check_unchanged(data: Data, listings: list[list[SourceFile]]) -> None:
    now = {file for source in data.sources for file in listing(source)}
    changed = [file.shown for files in listings for file in files if file not in now]
    if changed:
        raise DataError(
            "a file was changed while it was tokenised", fix="start again when it is whole", where=changed[0]
        )


def _opened(folder: Path) -> Corpus | None:
    """The corpus in a folder, or None where there is none, or not all of it. Raises StorageError."""
    try:
        told = records.read_json(folder / "manifest.json", *_RECORD)
    except OutlastError:
        return None
    with records.storage_errors("cannot open the tokenised corpus", folder):
        files = {folder / name: size for name, size in told["sizes"].items()}
        if any(not path.exists() or path.stat().st_size != size for path, size in files.items()):
            return None
        stream = partial(TokenStream, dtype=np.dtype(told["dtype"]), shard=told["shard"])
        groups = [
            Group(about["name"], *(stream(folder / f"{i}-{split}", about[split]) for split in _SPLITS))
            for i, about in enumerate(told["groups"])
        ]
    damaged = [(where, why) for where, why in told["first_damaged"]]
    return Corpus(told["fingerprint"], groups, told["damaged"], damaged, told["empty"], told["bytes"], folder)


@contextlib.contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """A hidden folder beside the one to be made, for this process alone; removed in the end where it was not renamed.

    Before that, what dead processes left is removed, and a folder of that name that is not whole. A process lives as
    long as it holds its lock file; where a file system has no locks, nothing of another process is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for lock in folder.parent.glob(".*.lock"):
        with contextlib.suppress(OSError), open(lock, "ab") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.with_suffix(".half"), ignore_errors=True)
            lock.unlink()
    half = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.half")
    lock = half.with_suffix(".lock")
    try:
        taken = lock.with_suffix(".taken")
        with open(taken, "ab") as ours:
            with contextlib.suppress(OSError):
                fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(taken, lock)  # seen by others only once it is held
            half.mkdir()
            if folder.exists() and not _opened(folder):
                os.rename(folder, half / "damaged")
                shutil.rmtree(half / "damaged")
            yield half
    finally:
        shutil.rmtree(half, ignore_errors=True)
        lock.unlink(missing_ok=True)


class _Stretch(NamedTuple):
    """A stretch of a document, the file it is from, the split it goes to, and whether the document begins with it."""

    document: Document
    file: str
    split: str
    first: bool


@dataclass
class _Tokenising:
    """Documents on their way from files to token streams, and what is to be told of them."""

    data: Data
    tokenizer: Tokenizer
    shard: int
    progress: Callable[[int, int], None]
    total: int
    read: int = 0
    damaged: int = 0
    first_damaged: list[tuple[str, str]] = field(default_factory=list)
    empty: int = 0

    def group(self, files: list[SourceFile], into: str) -> dict[str, Any]:
        """Write the documents of some files to the folders `into`-train and `into`-held_out.

        Returns:
            The group's part of the manifest.
        """
        splits = {split: StreamWriter(Path(f"{into}-{split}"), self.tokenizer.dtype, self.shard) for split in _SPLITS}
        batch, size, most = [], 0, min(usable_cores(), 32) << 20
        for stretch in self._stretches(files):
            batch.append(stretch)
            size += sum(len(piece.text) for piece in stretch.document.pieces)
            if size >= most:
                self._write(batch, splits)
                batch, size = [], 0
        self._write(batch, splits)
        about = {split: writer.close() for split, writer in splits.items()}
        if not about["train"]["documents"] and about["held_out"]["documents"]:
            for old, new in (("train", "none"), ("held_out", "train"), ("none", "held_out")):
                os.rename(f"{into}-{old}", f"{into}-{new}")
            about = {"train": about["held_out"], "held_out": about["train"]}
        return about

    def _stretches(self, files: list[SourceFile]) -> Iterator[_Stretch]:
        """Read files, leaving out empty documents."""
        for file in files:
            before, split, first = self.read, "", True
            for item in documents(file, self.data.text_field):
                self.read = before + item.read
                if isinstance(item, Damaged):
                    self._note(item)
                elif first and not item.continues and not any(piece.text for piece in item.pieces):
                    self.empty += 1
                else:
                    split = _split(item, self.data.held_out) if first else split
                    yield _Stretch(item, file.shown, split, first)
                    first = not item.continues
            self.read = before + file.bytes

    def _note(self, record: Damaged) -> None:
        if self.data.bad_records == "stop":
            raise DataError(
                f"a record cannot be used: {record.why}",
                fix='mend it, or pass over such records: data.bad_records = "skip"',
                where=record.where,
            )
        self.damaged += 1
        if self.damaged <= _NAMED:
            self.first_damaged.append((record.where, record.why))

    def _write(self, batch: list[_Stretch], splits: dict[str, StreamWriter]) -> None:
        pieces = [piece for stretch in batch for piece in stretch.document.pieces]
        special = [self.tokenizer.special(piece.text) if piece.marker else None for piece in pieces]
        texts = [piece.text for piece, token in zip(pieces, special, strict=True) if token is None]
        encoded = iter(self.tokenizer.encode(texts))
        ids = (next(encoded) if token is None else self._array(token) for token in special)
        prefix, eos = self._array(*self.tokenizer.prefix), self._array(self.tokenizer.eos)
        for document, file, split, first in batch:
            parts = [(next(ids), piece.learn) for piece in document.pieces]
            if first:
                parts.insert(0, (prefix, parts[0][1]))
            if not document.continues:
                parts.append((eos, document.learn_end))
            splits[split].add(parts, "" if document.continues else file)
        for writer in splits.values():
            writer.flush()
        self.progress(self.read, self.total)

    def _array(self, *ids: int) -> np.ndarray:
        return np.array(ids, dtype=self.tokenizer.dtype)


def _split(document: Document, held_out: float) -> str:
    """The split a document belongs to: a pure function of its first characters."""
    told = "".join(piece.text for piece in document.pieces)[:_TELLING]
    drawn = int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")
    return "held_out" if drawn < held_out * 2**64 else "train"
