"""What the process's environment says and is made to say: the only file that reads it."""

import dataclasses
import os
import typing
from dataclasses import dataclass
from pathlib import Path

from outlast.config import Data
from outlast.errors import UsageError


def cache_folder(data: Data) -> Path:
    """Where tokenised corpora are kept."""
    return Path(os.path.expandvars(data.cache)).expanduser()


def prepare() -> None:
    """Set what libraries read from the environment when torch is loaded, unless the user has chosen.

    CPU threads sleep while they wait for each other. By default they spin: on a core that something else wants too, the
    thread that others spin for does not get to run. cuBLAS gets the fixed workspace that `train.deterministic` needs.

    Source: benchmarks/busy_core.py: a training step beside one busy process, sleeping against spinning.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Launched:
    """Which of a run's ranks this process is, as its launcher says: our supervisor, or torchrun.

    Attributes:
        rank, ranks: its number, and how many there are.
        local_rank, local_ranks: the same on this machine.
        journal: host and port where its supervisor takes journal lines; None where it has no supervisor.
        key: by which the two know each other.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    journal: tuple[str, int] | None = None
    key: bytes = dataclasses.field(default=b"", repr=False)

    def environment(self) -> dict[str, str]:
        """The variables from which :func:`launched` reads this."""
        numbers = (self.rank, self.ranks, self.local_rank, self.local_ranks)
        told = {name: str(number) for name, number in zip(_RANK_VARIABLES, numbers, strict=True)}
        if self.journal:
            told |= {"OUTLAST_JOURNAL": "{}:{}".format(*self.journal), "OUTLAST_JOURNAL_KEY": self.key.hex()}
        return told


_RANK_VARIABLES: typing.Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launched() -> Launched | None:
    """What a launcher has told this process; None where RANK is not set: it was started alone.

    Raises:
        UsageError: RANK is set, and what goes with it is missing, is no number, or does not fit.
    """
    if not os.environ.get("RANK"):
        return None
    told = {name: os.environ.get(name, "") for name in _RANK_VARIABLES}
    address, key = os.environ.get("OUTLAST_JOURNAL", ""), os.environ.get("OUTLAST_JOURNAL_KEY", "")
    fix = "start the ranks by torchrun, or unset RANK: outlast train then starts them itself"
    for name, text in told.items():
        if not (text.isascii() and text.isdigit()):
            wrong = f"is {text!r}, which is no number" if text else "is not"
            raise UsageError(f"RANK is set in the environment, and {name} {wrong}", fix=fix)
    rank, ranks, local_rank, local_ranks = map(int, told.values())
    if not (rank < ranks and local_rank < local_ranks <= ranks):
        values = ", ".join(f"{name}={text}" for name, text in told.items())
        raise UsageError(f"the environment's {values} do not fit together", fix=fix)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if ranks > 1 and missing:
        raise UsageError(
            f"RANK is set in the environment, and {' and '.join(missing)} not: the ranks cannot meet", fix=fix
        )
    if not address:
        return Launched(rank, ranks, local_rank, local_ranks)
    host, _, port = address.rpartition(":")
    try:
        return Launched(rank, ranks, local_rank, local_ranks, (host, int(port)), bytes.fromhex(key))
    except ValueError:
        raise UsageError(
            f"OUTLAST_JOURNAL={address} or its key in the environment cannot be read",
            fix="only the supervisor of a run sets them: unset both",
        ) from None


def copy() -> dict[str, str]:
    """A copy of this process's environment, for those it starts."""
    return dict(os.environ)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
