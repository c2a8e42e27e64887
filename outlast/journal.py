"""journal.jsonl: everything that happened in a run, a line each, appended by one writer and never changed.

A line is a JSON object with `time` (seconds since 1970), `event`, `attempt` (how often the run was started) and `step`
(the last one finished when it was written), and the event's own fields. The *surviving history* is what is left when
every start has taken back the steps after the one it resumed from.
"""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from outlast.errors import ResumeError, StorageError
from outlast.records import open_lines, storage_errors


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line, in order. A last line that a crash cut short is left out; no file is no lines.

    Raises:
        StorageError: a line in the middle is damaged.
    """
    lines = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            lines.append(json.loads(line))
            lines[-1]["event"], lines[-1]["attempt"], lines[-1]["step"]
        except (ValueError, KeyError, TypeError):
            raise StorageError(
                f"line {number} of the journal is damaged: {line[:40]!r}",
                fix="take the line out; the checkpoints do not depend on it",
                where=str(path),
            ) from None
    return lines


def surviving(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `step` lines that made the weights as they are: one a step, in order."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["event"] == "start":
            steps = {step: kept for step, kept in steps.items() if step <= line["step"]}
        elif line["event"] == "step":
            steps[line["step"]] = line
    return [steps[step] for step in sorted(steps)]


class Journal:
    """The one writer of a run's journal.

    Args:
        path: the file, made where it is not there.

    Raises:
        ResumeError: another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors("cannot open the journal", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.parent, os.O_RDONLY)  # held as long as the run
        try:
            with storage_errors("cannot lock the run folder", path.parent):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.attempt = 1 + sum(line["event"] == "start" for line in read(path))
            self._file = open_lines(path)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error.__cause__, BlockingIOError):
                raise ResumeError(
                    "another process is training in this run folder",
                    fix="wait for it, end it, or give this run another folder: --folder runs/NAME",
                    where=str(path.parent),
                ) from None
            raise

    def write(self, event: str, step: int, *, durable: bool = True, **fields: Any) -> None:
        """Append a line.

        Args:
            event: its name.
            step: the last step finished.
            durable: wait until it would survive a power cut. A step's own line need not: what a power cut takes of
                it is taken back anyway, as its weights are since the last checkpoint. It survives the process's death.
            fields: the event's own.

        Raises:
            StorageError: it could not be written.
        """
        line = {"time": round(time.time(), 3), "event": event, "attempt": self.attempt, "step": step, **fields}
        with storage_errors("cannot write the journal", self.path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()
        os.close(self._lock)
