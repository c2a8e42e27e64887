"""The process that starts a run's ranks, watches over them, writes their journal and tells why they ended.

1. It takes the run folder and opens what the ranks will meet at: a port for the journal, a store for the process group.
2. It starts them, each in its own session: a ctrl-C in the terminal reaches the supervisor alone.
3. It waits for news: a rank is gone, a rank reports why it fails, a signal asks to leave and is passed on.
4. Once one rank has failed it gives the others a moment to fail too, for they may know better why; then it ends them.
5. When all are gone it writes how the run was left, and raises the first cause.

Should the supervisor itself be killed, each rank leaves in that moment: see :func:`outlast.journal.leave_with_supervisor`.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, Signals
from subprocess import Popen
from typing import Any, Final, cast

from torch.distributed import TCPStore

from outlast import environment
from outlast.environment import Launched
from outlast.errors import DONE, INTERRUPTED, RESTART, StorageError
from outlast.journal import Journal, Report, end
from outlast.records import storage_errors

HOST: Final = "127.0.0.1"
PASSED_ON: Final = (SIGTERM, SIGINT, SIGUSR1, SIGHUP)
AFTER_A_FAULT: Final = ((2.0, SIGTERM), (5.0, SIGKILL))
AFTER_A_RANK_LEFT: Final = ((60.0, SIGTERM), (63.0, SIGKILL))
AFTER_A_SECOND_SIGNAL: Final = ((1.0, SIGKILL),)
"""What is done to the ranks that are still there: seconds from then, and the signal."""
THE_REST: Final = "the other ranks were stopped; the same command goes on from the newest checkpoint"


@dataclass(frozen=True)
class Gone:
    """A rank has ended, with this exit code; below 0 it is the signal that ended it."""

    rank: int
    code: int


News = queue.SimpleQueue[Gone | Report | Signals]


def supervise(command: Sequence[str], ranks: int, folder: Path) -> int:
    """Run a command as several ranks on this machine, to their end.

    Args:
        command: what each rank runs; it learns which one it is from its environment, by `config.launched`.
        ranks: how many.
        folder: the run's; rank 0 keeps the terminal, the others write to logs/rank-N.log in it.

    Returns:
        The exit code of a run that failed nowhere: it is done, or was asked to leave.

    Raises:
        ResumeError: another process holds the folder.
        OutlastError: a rank failed; this is the first cause, with the exit code that it calls for.
        StorageError: the journal or a log could not be written.
    """
    news: News = queue.SimpleQueue()
    with signals_as_news(news), contextlib.closing(Journal(folder / "journal.jsonl")) as journal:
        logs = [folder / "logs" / f"rank-{rank}.log" for rank in range(ranks)]
        for log in logs:
            append(log, f"--- attempt {journal.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n")
        store = rendezvous()
        # Every line that the ranks have sent is in the journal when this block is left.
        port = JournalPort(journal, news)
        with contextlib.closing(port), started(command, port, store, logs) as processes:
            watch = Watch(processes, logs, news)
            watch.until_all_are_gone()
        outcome, code, cause = watch.ending()
        # Before its first line nothing of this start has happened to the run: it may even be another's, and was refused.
        if journal.step is not None:
            with contextlib.suppress(StorageError) if cause else contextlib.nullcontext():
                if cause:
                    journal.write("fault", journal.step, rank=cause.rank, what=cause.in_short, exit_code=code)
                end(journal, journal.step, outcome, code)
    if cause:
        raise cause.as_told(logs[cause.rank])
    return code


@contextlib.contextmanager
def signals_as_news(news: News) -> Iterator[None]:
    """Let the signals that ask to leave come as news; one that is ignored, as under nohup, stays so."""
    before = {one: handler for one in PASSED_ON if (handler := signal.getsignal(one)) is not signal.SIG_IGN}
    for one in before:
        signal.signal(one, lambda number, _: news.put(Signals(number)))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def append(log: Path, text: str) -> None:
    """Add to a rank's log. Raises StorageError."""
    with storage_errors("cannot write a rank's log", log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def rendezvous() -> TCPStore:
    """The store in which the ranks find each other: on a port that is taken already, and open to this machine alone."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


class JournalPort:
    """Where the ranks reach the journal: each connection has a thread that answers it."""

    def __init__(self, journal: Journal, news: News) -> None:
        self.key = secrets.token_bytes(32)
        self._journal, self._news, self._lock, self._open = journal, news, threading.Lock(), True
        self._listener = Listener((HOST, 0), backlog=128)
        self.address = cast(tuple[str, int], self._listener.address)
        self._threads: list[threading.Thread] = []
        self._thread(self._accept)

    def _thread(self, *what: Any) -> None:
        # A daemon, so that whoever connects and then says nothing holds up nobody.
        self._threads.append(threading.Thread(target=what[0], args=what[1:], daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Hear those out who have left; a connection that is no rank's is not waited for."""
        self._open = False
        Client(self.address, "AF_INET").close()  # wakes the thread that accepts
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            if not self._open:
                connection.close()
                return
            self._thread(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError, AuthenticationError):
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            while True:
                said = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(self._answer(said)).encode())

    def _answer(self, said: dict[str, Any]) -> dict[str, Any]:
        match said:
            case {"hello": _}:
                return {"attempt": self._journal.attempt, "path": str(self._journal.path)}
            case {"report": told}:
                self._news.put(Report(**told))
            case {"write": line}:
                try:
                    with self._lock:
                        self._journal.write(**line)
                except StorageError as error:
                    return {"error": {"what": error.what, "fix": error.fix, "where": error.where}}
        return {}


@contextlib.contextmanager
def started(command: Sequence[str], port: JournalPort, store: TCPStore, logs: list[Path]) -> Iterator[list[Popen]]:
    """The ranks' processes, each in a session of its own. Those left are killed when this is left."""
    count = len(logs)
    met = {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes: list[Popen] = []
    try:
        for rank, log in enumerate(logs):
            launched = Launched(rank, count, rank, count, port.address, port.key)
            with log.open("ab") if rank else contextlib.nullcontext() as out:
                env = environment.copy() | launched.environment() | met
                processes.append(Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))
        yield processes
    finally:
        send(processes, SIGKILL)
        for process in processes:
            process.wait()


def send(processes: list[Popen], one: Signals) -> None:
    """Send a signal to the ranks that are there; SIGKILL also to what they have started."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if one is SIGKILL else os.kill)(process.pid, one)


class Watch:
    """What has become of the ranks so far, and what is still to be done to those that are there."""

    def __init__(self, processes: list[Popen], logs: list[Path], news: News) -> None:
        self.processes, self.logs, self.news = processes, logs, news
        self.codes: dict[int, int] = {}
        self.faults: dict[int, Report] = {}  # as they came; of each rank the first
        self.asked: list[Signals] = []
        self.due: list[tuple[float, Signals]] = []
        self.stopping = False

    def until_all_are_gone(self) -> None:
        """Take the news as they come, and do what is due meanwhile."""
        for rank_and_process in enumerate(self.processes):
            threading.Thread(target=self._wait, args=rank_and_process, daemon=True).start()
        while len(self.codes) < len(self.processes):
            if self.due and self.due[0][0] <= time.monotonic():
                self.stopping = True
                send(self.processes, self.due.pop(0)[1])
            try:
                # Not for ever: a signal that comes to another thread, or just before the wait, does not wake this one.
                happened = self.news.get(timeout=0.1)
            except queue.Empty:
                continue
            match happened:
                case Signals():
                    self._signal(happened)
                case Report():
                    self._fault(happened)
                case Gone(rank, code):
                    self.codes[rank] = code
                    self._gone(rank, code)

    def _wait(self, rank: int, process: Popen) -> None:
        self.news.put(Gone(rank, process.wait()))

    def _plan(self, what: Sequence[tuple[float, Signals]]) -> None:
        """Have this done, unless the ranks are to be ended earlier already."""
        due = [(time.monotonic() + seconds, one) for seconds, one in what]
        if not self.due or due[-1] < self.due[-1]:
            self.due = due

    def _signal(self, one: Signals) -> None:
        """Pass it on; a second one means haste. Ranks mind only the first: a scheduler may have sent it to them as well."""
        send(self.processes, one)
        if one in self.asked:
            self._plan(AFTER_A_SECOND_SIGNAL)
        self.asked.append(one)

    def _fault(self, told: Report) -> None:
        self.faults.setdefault(told.rank, told)
        if told.traceback:
            with contextlib.suppress(StorageError):
                append(self.logs[told.rank], told.traceback)
        self._plan(AFTER_A_FAULT)

    def _gone(self, rank: int, code: int) -> None:
        if code == DONE or self.stopping:
            return
        # A rank that was asked to leave while Python itself was still starting ends with a code of Python's.
        if code in (RESTART, INTERRUPTED) or -code in self.asked or (code == 1 and self.asked):
            self._plan(AFTER_A_RANK_LEFT)  # it has done as it was asked, and so should they
            return
        names = {one.value: one.name for one in Signals}
        how = f"was ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        fix, where = (
            THE_REST if code < 0 else "",
            f"its last words are in {self.logs[rank]}" if rank else "its last words are above",
        )
        self._fault(Report(rank, "", how, fix, where, RESTART if code < 0 else code, peer=False, traceback=""))

    def ending(self) -> tuple[str, int, Report | None]:
        """How the run was left: the outcome and the exit code as the journal gets them, and the first cause of a failure.

        A rank that tells only of another's end has no cause of its own: where they were asked to leave, it has left.
        """
        causes = [fault for fault in self.faults.values() if not fault.peer]
        if not (causes or self.asked):
            causes = list(self.faults.values())
        if causes:
            return f"rank {causes[0].rank}: {causes[0].in_short}", causes[0].exit_code, causes[0]
        if not any(self.codes.values()):
            return "done", DONE, None
        interrupted = SIGINT in self.asked or INTERRUPTED in self.codes.values()
        by = self.asked[0].name if self.asked else "a signal to its ranks"
        return f"left at {by}", INTERRUPTED if interrupted else RESTART, None
