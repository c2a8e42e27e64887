"""The small text records that verbs meet in, written so that a reader finds the old one or the new one, never half.

Every JSON record carries ``"record"`` and ``"version"``: a reader refuses what it was not written for.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import tomlkit

from outlast.config import Run, knobs, value
from outlast.errors import OutlastError, StorageError


@contextlib.contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn the system's refusals while writing into one message.

    Args:
        doing: what was being written, for the message: ``cannot write the checkpoint``.
        path: where.

    Raises:
        StorageError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        fix = {
            errno.ENOSPC: "free some space, or point it at another disk; the same command then goes on",
            errno.EDQUOT: "free some of your quota, or point it at another disk; the same command then goes on",
            errno.EROFS: "the file system is read-only: point it at another",
            errno.EACCES: "this user may not write there: change the permissions or the folder",
        }.get(error.errno or 0, "")
        raise StorageError(
            f"{doing}: {os.strerror(error.errno) if error.errno else error}", fix=fix, where=str(path)
        ) from error


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Put a whole new text in place of a file, durably.

    Raises:
        StorageError: it could not be written; the old file is still there.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with storage_errors(f"cannot write {path.name}", path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text, encoding="utf-8")
            fsync(new)
            new.replace(path)
            fsync(path.parent)
        finally:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


def open_lines(path: Path) -> BinaryIO:
    """Open a file of lines to append to, made where it is not there; what a crash cut short of its last line is cut off.

    Raises:
        StorageError: it cannot be opened.
    """
    with storage_errors(f"cannot open {path.name}", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+")  # noqa: SIM115  held by who asks
        size = file.seek(0, os.SEEK_END)
        while size and (file.seek(size - 1), file.read(1))[1] != b"\n":
            size -= 1
        file.truncate(size)
        return file


def append_line(file: BinaryIO, content: dict[str, Any]) -> None:
    """Append a JSON object as a line: whole, or not at all. Past the file's buffer, where what a disk refuses would stay.

    Raises:
        OSError: it could not be written; what there was of it is taken out again.
    """
    left, number = json.dumps(content).encode() + b"\n", file.fileno()
    before = os.fstat(number).st_size
    try:
        while left:
            left = left[os.write(number, left) :]
    except OSError:
        os.ftruncate(number, before)
        raise


def write_json(path: Path, record: str, version: int, content: dict[str, Any]) -> None:
    """Write a record. Raises StorageError as :func:`write_text` does."""
    write_text(path, json.dumps({"record": record, "version": version, **content}, indent=1) + "\n")


def read_json(path: Path, record: str, version: int) -> dict[str, Any]:
    """Read a record.

    Raises:
        OutlastError: it is not there, is not JSON, or is another record or version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutlastError(f"cannot read the {record} record: {error}", where=str(path)) from None
    found = (content.get("record"), content.get("version")) if isinstance(content, dict) else (None, None)
    if found != (record, version):
        raise OutlastError(
            f"this is record {found[0]!r} version {found[1]}, wanted {record!r} version {version}",
            fix="it was written by another version of outlast",
            where=str(path),
        )
    return content


def run_file(run: Run) -> str:
    """The run as a TOML run file: every knob with its help as a comment, those that bear on the result marked."""
    document = tomlkit.document()
    document.add(tomlkit.comment("A run of outlast, as resolved. Knobs marked * bear on the result."))
    tables: dict[str, Any] = {"": document}
    for knob in knobs():
        section, _, name = knob.key.rpartition(".")
        if section not in tables:
            tables[section] = tomlkit.table()
            document.add(tomlkit.nl())
            document.add(section, tables[section])
        given = value(run, knob.key)
        tables[section].add(tomlkit.comment(("* " if knob.result else "") + knob.help))
        tables[section].add(name, list(given) if isinstance(given, tuple) else given)
    return tomlkit.dumps(document)
