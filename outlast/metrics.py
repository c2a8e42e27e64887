"""metrics.jsonl: the numbers of every step, a line each. TensorBoard and Weights & Biases are views of it."""

from pathlib import Path
from typing import Any

from outlast.config import Log
from outlast.errors import UsageError
from outlast.records import append_line, open_lines, storage_errors


class Metrics:
    """Where a step's numbers go.

    Args:
        folder: the run's.
        log: which views to keep besides.
        settings: the run's knobs, for the views that show them.
        attempt: how often the run was started; in every line, since a step that was taken back is taken again.
        step: the last finished; the views forget what they have after it.

    Raises:
        UsageError: a view is asked for whose library is not installed.
    """

    def __init__(self, folder: Path, log: Log, settings: dict[str, Any], attempt: int, step: int) -> None:
        self._tensorboard = _tensorboard(folder, step) if log.tensorboard else None
        self._wandb = _wandb(folder, log.wandb, settings) if log.wandb else None
        self.path, self.attempt = folder / "metrics.jsonl", attempt
        self._file = open_lines(self.path)

    def write(self, step: int, numbers: dict[str, float | None]) -> None:
        """Keep a step's numbers; None is what could not be measured.

        Raises:
            StorageError: the line could not be written.
        """
        with storage_errors("cannot write the metrics", self.path):
            append_line(self._file, {"attempt": self.attempt, "step": step, **numbers})
        known = {name: number for name, number in numbers.items() if number is not None}
        if self._tensorboard:
            for name, number in known.items():
                self._tensorboard.add_scalar(name, number, step)
        if self._wandb:
            self._wandb.log(known, step=step)

    def close(self) -> None:
        """Write out what the views hold back."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "log.tensorboard is on, but tensorboard is not installed",
            fix="pip install 'outlast[tensorboard]'",
            key="log.tensorboard",
        ) from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def _wandb(folder: Path, project: str, settings: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "log.wandb is set, but wandb is not installed", fix="pip install 'outlast[wandb]'", key="log.wandb"
        ) from None
    # The folder's name as the id: a resumed run goes on in the same chart.
    return wandb.init(
        project=project, id=folder.name, name=folder.name, dir=str(folder), resume="allow", config=settings
    )
