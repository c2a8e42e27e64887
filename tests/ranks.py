"""Worker groups for tests and benchmarks: processes with a gloo process group, started once and shared.

    with Ranks() as ranks:                       # in tests: the fixture `ranks`
        results = ranks.run(4, function, *args)  # function(*args) on each of 4 ranks; results in rank order

A template process imports everything once and forks the ranks, so that a group is there in a moment. A group in which a
rank failed, died or hung is killed, and started anew at its next use. Nothing outlives the process that asked: the
template ends its ranks when its socket closes, and the kernel ends them should the template itself be killed.

Not covered: environment variables set after the template began, state that a function leaves in a rank's modules.
"""

import functools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Final

import psutil
from rank_process import packed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

LIMIT_S: Final = 60.0
GRACE_S: Final = 2.0
"""After a failure: how long the other ranks may take to tell theirs. Also for a hung rank to write its stacks."""
CLOSED: Final = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "failed to recv", "likely closed")
"""What an error says that only tells of a peer's end."""


class RankError(AssertionError):
    """A rank failed, died or hung: the message has each rank's own account, the first cause first."""


@functools.lru_cache(maxsize=64)
def once(make: Callable[..., Any], *args: Any) -> Any:
    """In a rank: make(*args), kept for later calls with equal arguments. All ranks must ask in the same order."""
    return make(*args)


@functools.lru_cache(maxsize=64)
def mesh(**axes: int) -> DeviceMesh:
    """In a rank: the mesh of these axes, slowest first, as in mesh(dp_shard=2, tp=2); made once and kept."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


class Ranks:
    """Groups by their size, each started at its first use and kept until `close`.

    Args:
        warning_filters: in force in the ranks, written as in pytest's configuration.
        checked: shapes and types in signatures are checked in the ranks, as in tests.
    """

    def __init__(self, warning_filters: Sequence[str] = (), checked: bool = False) -> None:
        self._groups: dict[int, Group] = {}
        self._filters, self._checked = list(warning_filters), checked
        self._template: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def group(self, n: int) -> "Group":
        """The group of n ranks."""
        return self._groups.setdefault(n, Group(n, self._order))

    def run(self, n: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What `Group.run` of the group of n returns; takes `limit` too."""
        __tracebackhide__ = True
        return self.group(n).run(function, *args, **kwargs)

    def close(self) -> None:
        """End every rank and the template; what is used after that starts anew."""
        if self._template:
            self._template[1].close()
            self._template[0].wait()
        for group in self._groups.values():
            group.forget()
        self._template = None

    def _order(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> list[int]:
        """Have the template fork (process ids come back) or end ranks (exit codes come back)."""
        process, link = self._template = self._template or self._start()
        try:
            socket.send_fds(link, [json.dumps(order).encode()], descriptors)
            return json.loads(link.recv(1 << 16))
        except BaseException as error:  # an interrupt too: its answer would be taken for that of the next order
            self.close()
            if isinstance(error, OSError | ValueError):
                raise RankError(
                    f"the ranks' template ended with {process.returncode}: its words are on stderr"
                ) from error
            raise

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        link, theirs = socket.socketpair()
        tests = Path(__file__).parent
        ready = "from outlast import environment; environment.prepare()"  # before torch is loaded
        if self._checked:
            ready = f"import runpy; runpy.run_path({str(tests / 'conftest.py')!r})"
        serve = f"from rank_process import template; template({theirs.fileno()}, {self._filters!r})"
        code = f"import sys; sys.path[:] = {[*sys.path, str(tests)]!r}\n{ready}\n{serve}"
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # or numpy starts threads, and the template must not
        command = [sys.executable, "-c", code]  # in a session of its own: an interrupt from the terminal is for us
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, env=environment)
        theirs.close()
        return process, link

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Group:
    """n processes in one process group, each on one thread."""

    def __init__(self, n: int, order: Callable[..., list[int]]) -> None:
        self.n = n
        self.pids: list[int] = []  # by rank; empty while the group is not started
        self._order = order
        self._connections: list[Connection] = []
        self._stacks: list[IO[bytes]] = []  # where each rank's faulthandler writes: files without a name

    def run(self, function: Callable[..., Any], *args: Any, limit: float = LIMIT_S, **kwargs: Any) -> list[Any]:
        """function(*args, **kwargs) on every rank at once.

        Args:
            function: of a module's top level, importable by name. Torch is seeded with 0 before it.
            args, kwargs: pickled. Tensors arrive as plain CPU copies, without gradients, as those of the results do.
            limit: seconds until the group counts as hung.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: a rank raised, died or hung, or collectives were left unmatched. The group is ended.
        """
        __tracebackhide__ = True
        reference = _reference(function)
        message = pickle.dumps((sys.path, os.getcwd(), reference, packed((args, kwargs))))
        try:
            if not self.pids:
                self._start()
                self._collect("start", LIMIT_S)
            for connection in self._connections:
                with suppress(OSError):  # a rank has died since: collecting tells
                    connection.send_bytes(message)
            outcomes = self._collect(reference, limit)
        except BaseException:  # an interrupt too: a group in the midst of something is of no more use
            self.end()
            raise
        if not all(alive for alive, _ in outcomes):
            self.end()  # the function destroyed the process group; the next call finds a new one
        return [result for _, result in outcomes]

    def end(self) -> list[int]:
        """Kill the ranks. Returns the exit code of each, -signal where one ended it; empty if none was started."""
        codes = self._order({"end": self.pids}) if self.pids else []
        self.forget()
        return codes

    def forget(self) -> None:
        """Close what led to ranks that are no more."""
        for each in [*self._connections, *self._stacks]:
            each.close()
        self.pids, self._connections, self._stacks = [], [], []

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self.n)]
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self._stacks = [tempfile.TemporaryFile() for _ in pairs]  # noqa: SIM115
        self.pids = self._order({"fork": self.n}, [end.fileno() for end in [*(b for _, b in pairs), *self._stacks]])
        for _, theirs in pairs:
            theirs.close()

    def _collect(self, what: str, limit: float) -> list[Any]:
        """An answer of each rank, or RankError: after the first failure the others have a moment to tell theirs."""
        __tracebackhide__ = True
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}  # empty: ended without a word
        end = time.monotonic() + limit
        while len(answers) + len(failures) < self.n:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in answers and r not in failures}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                try:
                    good, content = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    good, content = False, ""
                if good:
                    answers[waiting[connection]] = pickle.loads(content)
                else:
                    end = min(end, time.monotonic() + GRACE_S)
                    failures[waiting[connection]] = content
        if len(answers) < self.n:
            raise RankError(self._account(what, limit, answers, failures))
        return [answers[rank] for rank in range(self.n)]

    def _account(self, what: str, limit: float, answers: dict[int, Any], failures: dict[int, str]) -> str:
        """What befell each rank, the first cause first. Ends the group."""
        silent = [rank for rank in range(self.n) if rank not in answers and rank not in failures]
        stacks = {rank: self._stack(rank) for rank in silent}
        written = {rank: self._written(rank) for rank in failures}
        codes = self.end()
        told: dict[str, list[int]] = {}
        for rank, text in failures.items():
            fate = (
                f"was ended by {signal.Signals(-codes[rank]).name}" if codes[rank] < 0 else f"left with {codes[rank]}"
            )
            told.setdefault(f"raised\n{text}" if text else f"{fate} without a word\n{written[rank]}", []).append(rank)
        causes = sorted(told.items(), key=lambda cause: any(mark in cause[0] for mark in CLOSED))
        still = "was still busy" if failures else f"had not answered after {limit:g} s"
        return "\n".join(
            [f"{what} on {self.n} ranks"]
            + [f"rank {', '.join(map(str, sorted(ranks)))} {text}" for text, ranks in causes]
            + [f"rank {rank} {still}\n{stacks[rank]}" for rank in silent]
            + [f"rank {rank} had finished" for rank in sorted(answers)]
        )

    def _stack(self, rank: int) -> str:
        """The stacks of a rank's threads, of its own telling."""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(self.pids[rank]).status() == psutil.STATUS_STOPPED:
                return "it is stopped (SIGSTOP) and cannot show its stacks"
            os.kill(self.pids[rank], signal.SIGUSR2)
        text, end = "", time.monotonic() + GRACE_S
        while time.monotonic() < end and (not text or text != self._written(rank)):  # until no more is added
            text = self._written(rank)
            time.sleep(0.05)
        return text or "it did not show its stacks"

    def _written(self, rank: int) -> str:
        return os.pread(self._stacks[rank].fileno(), 1 << 20, 0).decode(errors="replace")


def _reference(function: Callable[..., Any]) -> str:
    """module:name, as the ranks import it; a module run as a program (`python -m`) by its true name."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__":
        module = getattr(getattr(sys.modules[module], "__spec__", None), "name", module)
    if "<" in name or module == "__main__":
        raise TypeError(f"{module}:{name} cannot be imported by the ranks: make it a function of a module's top level")
    return f"{module}:{name}"
