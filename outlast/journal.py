"""journal.jsonl: everything that happened in a run, a line each, appended by one writer and never changed.

A line is a JSON object with `time` (seconds since 1970), `event`, `attempt` (how often the run was started) and `step`
(the last one finished when it was written), and the event's own fields. The *surviving history* is what is left when
every start has taken back the steps after the one it resumed from.

Where a run has several ranks, their supervisor holds the `Journal`, and rank 0 has a `Sender` in its place. What they say
to each other is a JSON object a message, each answered by one.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from outlast.environment import Launched
from outlast.errors import RESTART, OutlastError, PeerError, ResumeError, StorageError
from outlast.records import append_line, open_lines, storage_errors, write_json


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

    Attributes:
        attempt: how often the run was started, this start included.
        step: that of the last line written; None before the first.

    Raises:
        ResumeError: another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step: int | None = None
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
            StorageError: it could not be written; what there was of it is taken out again.
        """
        line = {"time": round(time.time(), 3), "event": event, "attempt": self.attempt, "step": step, **fields}
        with storage_errors("cannot write the journal", self.path):
            append_line(self._file, line)
            if durable:
                os.fsync(self._file.fileno())
        self.step = step

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()
        os.close(self._lock)


def end(journal: Journal, step: int, outcome: str, exit_code: int) -> None:
    """Write how the run was left: the journal's last line, and outcome.json beside it.

    Raises:
        StorageError: it could not be written.
    """
    journal.write("end", step, outcome=outcome, exit_code=exit_code)
    told = {"outcome": outcome, "exit_code": exit_code, "step": step}
    write_json(journal.path.parent / "outcome.json", "outcome", 1, told)


class Sender:
    """The journal as a rank has it: its supervisor writes the lines.

    Raises:
        PeerError: the supervisor is gone; any call may.
    """

    def __init__(self, launched: Launched) -> None:
        self._connection, self._lock = _connect(launched), threading.Lock()
        told = _ask(self._connection, {"hello": launched.rank})
        self.attempt: int = told["attempt"]
        self.path = Path(told["path"])

    def write(self, event: str, step: int, *, durable: bool = True, **fields: Any) -> None:
        """Have a line appended, and wait until it is, as :meth:`Journal.write` does.

        Raises:
            StorageError: it could not be written.
        """
        with self._lock:
            _ask(self._connection, {"write": {"event": event, "step": step, "durable": durable, **fields}})

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()


@dataclass(frozen=True)
class Report:
    """Why a rank failed, as it tells its supervisor; where it could not, as the supervisor sees it.

    Attributes:
        kind: the error's class; empty where the rank ended without a word.
        what, fix, where: of an OutlastError; of any other its message, and nothing.
        exit_code: the one that this failure calls for.
        peer: the error says only that another process is gone.
        traceback: of an error that nobody expected; else empty.
    """

    rank: int
    kind: str
    what: str
    fix: str
    where: str
    exit_code: int
    peer: bool
    traceback: str

    @property
    def in_short(self) -> str:
        """As the journal has it: the error's class and what it says."""
        return f"{self.kind}: {self.what}" if self.kind else self.what

    def as_told(self, log: Path) -> OutlastError:
        """As the user reads it: one of the house's own errors as in one process, but for the rank; of another a line."""
        if self.traceback:
            said = f"rank {self.rank}: {self.in_short}".partition("\n")[0]
            error = OutlastError(said, where=f"the traceback is in {log}")
        elif self.kind:
            where = f"rank {self.rank}, {self.where}" if self.where else f"rank {self.rank}"
            error = OutlastError(self.what, fix=self.fix, where=where)
        else:
            error = OutlastError(f"rank {self.rank} {self.what}", fix=self.fix, where=self.where)
        error.exit_code = self.exit_code
        return error


def report(launched: Launched, error: BaseException) -> bool:
    """Tell the supervisor why this rank fails, from wherever in the rank that is known.

    Returns:
        Whether somebody was told. If so, the user reads it from there, if it is the first cause; else it is the
        caller's to say.
    """
    if launched.journal is None:
        return False
    kind, peer = type(error).__name__, isinstance(error, PeerError)
    if isinstance(error, OutlastError):
        told = Report(launched.rank, kind, error.what, error.fix, error.where, error.exit_code, peer, "")
    else:
        trace = "".join(traceback.format_exception(error))
        told = Report(launched.rank, kind, str(error), "", "", 1, peer, trace)
    try:
        with _connect(launched) as connection:
            _ask(connection, {"report": asdict(told)})
    except PeerError:
        return False
    return True


def leave_with_supervisor(launched: Launched) -> None:
    """From now on, end this process in the moment its supervisor is gone, whatever it is at.

    Nobody holds the run folder any more then: a rank that went on could write beside the ranks of the next start.

    Raises:
        PeerError: it is gone already.
    """
    if launched.journal is None:
        return
    connection = _connect(launched)

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()  # nothing ever comes
        os._exit(RESTART)

    threading.Thread(target=wait, name="until the supervisor is gone", daemon=True).start()


@contextlib.contextmanager
def _supervisor_there() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, AuthenticationError):
        raise PeerError("the supervisor is gone", fix="the same command goes on from the newest checkpoint") from None


def _connect(launched: Launched) -> Connection:
    if launched.journal is None:
        raise ValueError("this rank has no supervisor")
    with _supervisor_there():
        return Client(launched.journal, "AF_INET", authkey=launched.key)


def _ask(connection: Connection, question: dict[str, Any]) -> dict[str, Any]:
    """Say something to the supervisor; its answer."""
    with _supervisor_there():
        connection.send_bytes(json.dumps(question).encode())
        answer = json.loads(connection.recv_bytes())
    if "error" in answer:
        raise StorageError(**answer["error"])
    return answer
