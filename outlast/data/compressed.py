"""Compressed files as the bytes they hold, where one that was cut short or is damaged says so."""

import io
import zlib
from collections.abc import Callable
from typing import Any, Final

import zstandard

SUFFIXES: Final = (".gz", ".zst")
_BUFFER: Final = 1 << 16
_AT_ONCE: Final = 1 << 10  # compressed bytes; at zstd's best some 12 MB of text


class BrokenError(Exception):
    """The file cannot be decompressed further, for the reason this gives."""


def stream(raw: io.FileIO, name: str) -> io.BufferedReader:
    """The bytes in a file: decompressed where its name ends in .gz or .zst, else as they are.

    Returns:
        A stream. Reading raises BrokenError at a damage; the bytes before it were read, to within a block.
    """
    kind = name.lower()
    if kind.endswith(".gz"):
        return io.BufferedReader(_Decompressed(raw, lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)), _BUFFER)
    if kind.endswith(".zst"):
        window = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(_Decompressed(raw, window.decompressobj), _BUFFER)
    return io.BufferedReader(raw, _BUFFER)


class _Decompressed(io.RawIOBase):
    """A compressed file as the bytes it holds. (zstandard's own reader takes a file that was cut short for a whole one.)

    Args:
        raw: the file: one or more frames, one after the other.
        frame: makes what decompresses one frame.
    """

    def __init__(self, raw: io.FileIO, frame: Callable[[], Any]) -> None:
        self._raw, self._begin, self._frame, self._unread, self._ready = raw, frame, None, b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready:
            block = self._unread or self._raw.read(_BUFFER)
            block, later = block[:_AT_ONCE], block[_AT_ONCE:]
            if self._frame is None:
                block = block.lstrip(b"\0")  # gzip files may be padded
            if not block and later:
                self._unread = later
                continue
            if not block:
                if self._frame is not None:
                    raise BrokenError("is cut short: the compressed data ends in the middle")
                return 0
            self._frame = self._frame or self._begin()
            try:
                self._ready, self._unread = memoryview(self._frame.decompress(block)), later
            except (zlib.error, zstandard.ZstdError) as error:
                raise BrokenError(f"cannot be decompressed: {error}") from None
            if self._frame.eof:
                self._frame, self._unread = None, self._frame.unused_data + later
        part = self._ready[: len(into)]
        into[: len(part)], self._ready = part, self._ready[len(part) :]
        return len(part)
