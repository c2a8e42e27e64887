"""Hosts of a network of their own on one machine, by hosts.sh: network namespaces, and what the kernel counts in each."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from outlast import environment

SCRIPT: Final = str(Path(__file__).parent / "hosts.sh")


def reason_not_to() -> str:
    """Why this machine cannot; empty where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces"
    made = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "probe", "type", "veth"], capture_output=True, check=False
    )
    return f"no network namespaces here: {made.stderr.decode().strip()}" if made.returncode else ""


@contextmanager
def hosts(count: int, counted: bool = False) -> Iterator[str]:
    """Hosts with an interface each; yields the number they are named by.

    Args:
        count: of hosts.
        counted: every packet is sent by itself, so that the kernel's counts are those of a wire. It costs the processors
            some 10 times what letting the interface cut large packets does, as those of a network do: not for timing.

    A guard takes them away, with all that runs on them, when its pipe closes: also when this process is killed.
    """
    name = str(os.getpid())
    guard = 'trap "" INT TERM HUP; cat; exec "$0" down "$1"'
    with subprocess.Popen(["bash", "-c", guard, SCRIPT, name], stdin=subprocess.PIPE, start_new_session=True):
        subprocess.run([SCRIPT, "up", name, str(count)], check=True)
        for host in range(count if counted else 0):
            apart = ["ip", "link", "set", "eth0", "gso_max_segs", "1"]
            subprocess.run([SCRIPT, "run", name, str(host), *apart], check=True)
        yield name


def told_by_ranks(name: str, where: Sequence[int], words: Sequence[str], limit: float) -> list[Any]:
    """Run `python -m` with some words as every rank of a run, and wait for all of them.

    Args:
        name: of the hosts.
        where: the host of each rank.
        words: the module and its arguments.
        limit: seconds.

    Returns:
        What each wrote as its last line, from JSON; None where it wrote nothing.

    Raises:
        RuntimeError: a rank failed; with what it wrote.
    """
    processes = []
    try:
        for rank, host in enumerate(where):
            launched = environment.Launched(rank, len(where), list(where[:rank]).count(host), list(where).count(host))
            told = os.environ | launched.environment() | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
            command = [SCRIPT, "run", name, str(host), sys.executable, "-m", *words]
            root, told = Path(__file__).parent.parent, told | {"OMP_WAIT_POLICY": "PASSIVE"}
            processes.append(subprocess.Popen(command, env=told, cwd=root, stdout=-1, stderr=-1))
        answers = [process.communicate(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, error) in zip(processes, answers, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank ended with {process.returncode}: {error.decode()}")
    return [json.loads((out.decode().splitlines() or ["null"])[-1]) for out, _ in answers]


def sent_by_kernel() -> tuple[int, int, int]:
    """Bytes and packets that have left this namespace's interface, and how many of these TCP had sent before."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.strip().startswith("eth0:")).partition(":")[2].split()
    names, counts = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(numbers[8]), int(numbers[9]), int(counts[names.index("RetransSegs")])


def shape(name: str, host: int, megabits: int) -> None:
    """Give a host's interface a rate, in either direction of its own."""
    for command in (
        [SCRIPT, "run", name, str(host), *_tbf("eth0", megabits)],
        _tbf(f"ol{name}v{host}", megabits),
    ):
        subprocess.run(command, check=True)


def _tbf(interface: str, megabits: int) -> list[str]:
    limits = ["rate", f"{megabits}mbit", "burst", "128kb", "latency", "100ms"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limits]
