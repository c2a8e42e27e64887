r"""Documents from files: text, .jsonl and .parquet, the first two also compressed, read as a stream.

Nothing in proportion to the corpus is held but the list of its files: a long document comes in stretches, whatever its
length. What cannot be read is handed on as `Damaged`, with its place, and the reading goes on behind it: at the next
line of a .jsonl file, the next row of a .parquet file, the next stretch of a text; not at all where a compressed or
.parquet file itself is broken.

*Chat records* are written as ChatML, ``<|im_start|>role\ncontent<|im_end|>\n`` a message, and learned on the
assistant's contents, each with its ``<|im_end|>``. Not covered: any other template, tool calls, contents that are not
one string; a tokeniser's own chat template is not read.
"""

import difflib
import hashlib
import io
import json
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from outlast.data import compressed
from outlast.errors import DataError

STRETCH: Final = 1 << 18
"""Bytes after which a long text is cut at the next newline. At 1 MiB a BPE takes 300 MB of memory more, and no less time."""
LONGEST_LINE: Final = 1 << 28
"""Bytes of the longest .jsonl line that is read."""
_LOOK: Final = 1 << 13  # a NUL in so many first bytes: not a text
_ROWS_AT_ONCE: Final = 256
_BOM: Final = "\ufeff"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source: its path as the source was spelled, its size, and when it was last changed."""

    path: str
    bytes: int
    mtime_ns: int

    @property
    def shown(self) -> str:
        """Its path, fit to be printed whatever bytes it is made of."""
        return os.fsencode(self.path).decode(errors="backslashreplace")


class Piece(NamedTuple):
    """Text that is encoded by itself.

    Args:
        text: what it says. Only a marker may stand for a special token; in other text the same letters are letters.
        learn: its tokens may be targets.
        marker: it is the template's own word, such as ``<|im_start|>``.
    """

    text: str
    learn: bool = True
    marker: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a stretch of a long one.

    Args:
        where: its file, with the line or row where it is a record.
        pieces: its text, in order; none, or only empty ones, where it is empty.
        learn_end: the end token may be a target.
        continues: the next item is the next stretch of the same document.
        read: bytes of its file read so far.
    """

    where: str
    pieces: tuple[Piece, ...]
    learn_end: bool = True
    continues: bool = False
    read: int = 0


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record, a stretch of text or a whole file that cannot be used: where it stands, why, and bytes read so far."""

    where: str
    why: str
    read: int = 0


def listing(source: str) -> list[SourceFile]:
    """The files of a source, in the order they are read: by path, the same on every machine.

    Args:
        source: a file; a folder, taken with all below it but hidden files and folders; or `stdlib`, the running
            Python's own library source. (A folder of that name is `./stdlib`.)

    Raises:
        DataError: there is no such thing, there is nothing in it, or it may not be read.
    """
    library = source == "stdlib"
    root = Path(sysconfig.get_path("stdlib")) if library else Path(source).expanduser()
    with _readable(root):
        if not root.exists():
            raise DataError(f"there is no file or folder {source}", fix=meant(root, "stdlib"), key="data.sources")
        files = [(path, os.stat(path)) for path in (sorted(_below(root, library)) if root.is_dir() else [str(root)])]
    found = [SourceFile(path, s.st_size, s.st_mtime_ns) for path, s in files if stat.S_ISREG(s.st_mode)]
    if not found:
        raise DataError(
            f"there is nothing to learn from in {source}",
            fix="it takes text, .jsonl or .parquet files; hidden ones are passed over",
            key="data.sources",
        )
    return found


def identity(files: Iterable[SourceFile]) -> str:
    """A hash of which files these are, and of when and with what size they were found: sha256, hexadecimal."""
    known = hashlib.sha256()
    for file in files:
        known.update(json.dumps([file.path, os.path.abspath(file.path), file.bytes, file.mtime_ns]).encode())
    return known.hexdigest()


def _below(root: Path, library: bool) -> Iterator[str]:
    """Paths of the files below a folder. A folder met twice, by links that go round, is entered once."""
    entered = set()

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        about = os.stat(folder)
        known = (about.st_dev, about.st_ino) in entered
        entered.add((about.st_dev, about.st_ino))
        passed = {"site-packages", "dist-packages", "__pycache__"} if library else set()
        folders[:] = [] if known else sorted(f for f in folders if not f.startswith(".") and f not in passed)
        wanted = [] if known else [n for n in names if not n.startswith(".") and (n.endswith(".py") or not library)]
        yield from (os.path.join(folder, name) for name in wanted)


def meant(path: Path, *words: str) -> str:
    """What a path that does not exist may have been meant for: the closest name where it first goes wrong, or a word."""
    while not path.parent.exists():
        path = path.parent
    names = [name.name for name in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, [*names, *words], n=1)
    return f"perhaps you meant {path.parent / close[0] if close[0] in names else close[0]}" if close else ""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the system's refusals, which are no damage to the data and may pass, into one message."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}", where=str(path)) from None


def documents(file: SourceFile, text_field: str) -> Iterator[Document | Damaged]:
    """Read a file's documents in order.

    A .jsonl or .parquet record has its text in `text_field`; or `prompt` and `completion`, learned on the completion
    and the end token; or `messages` (see the top of this file), where the end token is not learned. The first of these
    that a record has is taken. Any other file is one document of text; its name may end in .gz or .zst, as .jsonl may.

    Raises:
        DataError: the system does not let the file be read, a .parquet file has none of these columns, or pyarrow is
            not there to read it.
    """
    with _readable(Path(file.path)), open(file.path, "rb", buffering=0) as raw:
        name = file.path.lower()
        if name.endswith(".parquet"):
            yield from _parquet(file, raw, text_field)
            return
        for suffix in compressed.SUFFIXES:
            name = name.removesuffix(suffix)
        with compressed.stream(raw, file.path) as stream:
            if name.endswith(".jsonl"):
                yield from _jsonl(file, raw, stream, text_field)
            else:
                yield from _text(file, raw, stream)


def _until_broken(stream: io.BufferedReader, blocks: Iterable[bytes]) -> Iterator[bytes | str]:
    """Pass on what can be read of a stream, cut into blocks, and where it cannot be, last of all the reason."""
    try:
        start = stream.peek(_LOOK)[:_LOOK]
        if 0 in start:
            yield f"looks binary: its byte {start.index(0)} is NUL"
        else:
            yield from blocks
    except compressed.BrokenError as error:
        yield str(error)


def _stretches(stream: io.BufferedReader | io.BytesIO) -> Iterator[bytes]:
    """Cut a byte stream after the first newline beyond STRETCH; where as many bytes bring none, between characters."""
    while block := stream.read(STRETCH):
        block += stream.readline(STRETCH)
        yield block + stream.read(_lacking(block))


def _lacking(block: bytes) -> int:
    """How many bytes the last character of a UTF-8 block still lacks."""
    for back, byte in enumerate(reversed(block[-3:]), start=1):
        if byte >= 0b1100_0000:
            return max(0, (2 if byte < 0b1110_0000 else 3 if byte < 0b1111_0000 else 4) - back)
        if byte < 0b1000_0000:
            break
    return 0


def _text(file: SourceFile, raw: io.FileIO, stream: io.BufferedReader) -> Iterator[Document | Damaged]:
    """A file as one document. Where a stretch is damaged the document ends before it, and another begins behind it."""
    text, start = "", 0
    for block in _until_broken(stream, _stretches(stream)):
        new, why, at = "", "", start
        try:
            if isinstance(block, str):
                why = block
            else:
                new = block.decode().removeprefix(_BOM if start == 0 else "")
        except UnicodeDecodeError as error:
            why, at = _why(error), start + error.start
        if text:
            yield Document(file.shown, (Piece(text),), continues=not why, read=raw.tell())
        if why:
            yield Damaged(f"{file.shown}, byte {at}", why, raw.tell())
        text, start = new, start + len(block)
    if text or not start:
        yield Document(file.shown, (Piece(text),), read=raw.tell())


def _lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """The lines of a stream; of one that is too long, LONGEST_LINE + 1 bytes."""
    while line := stream.readline(LONGEST_LINE + 1):
        yield line
        while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            line = stream.readline(LONGEST_LINE + 1) or b"\n"


def _jsonl(file: SourceFile, raw: io.FileIO, stream: io.BufferedReader, field: str) -> Iterator[Document | Damaged]:
    """The records of a .jsonl file. Blank lines say nothing."""
    for number, line in enumerate(_until_broken(stream, _lines(stream)), start=1):
        where = f"{file.shown}:{number}"
        if isinstance(line, str):
            yield Damaged(where, line, raw.tell())
        elif len(line) > LONGEST_LINE:
            yield Damaged(where, f"is longer than {LONGEST_LINE} bytes", raw.tell())
        elif line.strip():
            try:
                record = json.loads(line.decode().rstrip().removeprefix(_BOM if number == 1 else ""))
                pieces, learn_end = _pieces(record, field)
            except (ValueError, RecursionError) as error:
                yield Damaged(where, _why(error), raw.tell())
            else:
                yield from _documents_of(where, pieces, learn_end, raw.tell())


def _parquet(file: SourceFile, raw: io.FileIO, text_field: str) -> Iterator[Document | Damaged]:
    """Rows of a .parquet file; of the columns wanted, a row group at a time is in memory."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            "reading .parquet needs pyarrow", fix="install it with: pip install 'outlast[parquet]'", where=file.shown
        ) from None
    number, broken = 0, (pyarrow.ArrowException, OSError)
    try:
        table = parquet.ParquetFile(raw)
        names = table.schema_arrow.names
        wanted = next((c for c in ([text_field], ["prompt", "completion"], ["messages"]) if set(c) <= set(names)), None)
        if wanted is None:
            raise DataError(
                f"{file.shown} has no column {text_field!r}, nor `prompt` and `completion`, nor `messages`",
                fix=f"set data.text_field to the one that holds the text; it has {', '.join(names)}",
                key="data.text_field",
            )
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted):
            for row in range(batch.num_rows):
                number += 1
                where, read = f"{file.shown}, row {number}", file.bytes * number // table.metadata.num_rows
                try:
                    record = {name: batch.column(name)[row].as_py() for name in wanted}
                    pieces, learn_end = _pieces(record, text_field)
                except ValueError as error:
                    yield Damaged(where, _why(error), read)
                else:
                    yield from _documents_of(where, pieces, learn_end, read)
    except broken as error:
        if isinstance(error, OSError) and error.errno:  # the system's, not the file's
            raise
        why = f"cannot be read as parquet: {' '.join(str(error).split())}"
        yield Damaged(f"{file.shown}, row {number + 1}", why, raw.tell())


def _why(error: Exception) -> str:
    """What is wrong with a record, of the error that its reading raised."""
    match error:
        case UnicodeDecodeError():
            return f"is not UTF-8: {error.reason}"
        case UnicodeEncodeError():
            return "has half a surrogate pair, which is no character"
        case json.JSONDecodeError():
            return f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        case RecursionError():
            return "is nested too deeply to be read"
    return str(error)


def _pieces(record: Any, text_field: str) -> tuple[list[Piece], bool]:
    """The text of a record, and whether its end token is learned. Raises ValueError saying what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"is {_kind(record)}, not an object")
    if text_field in record:
        return [Piece(_string(record[text_field], f"field {text_field!r}"))], True
    if "prompt" in record and "completion" in record:
        prompt, completion = (_string(record[name], f"field {name!r}") for name in ("prompt", "completion"))
        return [Piece(prompt, learn=False), Piece(completion)], True
    if "messages" not in record:
        has = ", ".join(list(record)[:8]) or "nothing"
        raise ValueError(f"has no field {text_field!r}, nor `prompt` and `completion`, nor `messages`; it has {has}")
    messages = record["messages"]
    if not isinstance(messages, list):
        raise ValueError(f"field 'messages' is {_kind(messages)}, not a list of messages")
    pieces = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {_kind(message)}, not an object")
        role, content = (_string(message.get(name), f"{name} of message {number}") for name in ("role", "content"))
        learn = role == "assistant"
        header, said = (f"{role}\n", content) if learn else (f"{role}\n{content}", "")
        pieces += [Piece("<|im_start|>", False, marker=True), Piece(header, False), Piece(said)]
        pieces += [Piece("<|im_end|>", learn, marker=True), Piece("\n", False)]
    return pieces, False


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {_kind(value)}, not a string")
    value.encode()  # JSON can spell half a surrogate pair
    return value


def _kind(value: Any) -> str:
    names = {"NoneType": "missing", "str": "a string", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, f"{value!r:.20}")


def _documents_of(where: str, pieces: list[Piece], learn_end: bool, read: int) -> Iterator[Document]:
    """A record as one document, in stretches where it is long. The first has all of a short text to tell it by."""
    stretch, size = [], 0
    for piece in pieces:
        for text in _cut(piece.text):
            if size >= STRETCH:
                yield Document(where, tuple(stretch), learn_end, continues=True, read=read)
                stretch, size = [], 0
            stretch.append(piece._replace(text=text))
            size += len(text)
    yield Document(where, tuple(stretch), learn_end, read=read)


def _cut(text: str) -> Iterable[str]:
    """A text as a file of it would be cut."""
    if len(text) <= STRETCH // 4:
        return (text,)
    return (block.decode() for block in _stretches(io.BytesIO(text.encode())))
