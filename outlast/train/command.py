"""One start of a run, from settings to exit code: by one process, by one of its ranks, or by the supervisor of these."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from outlast import errors, journal, layout, records
from outlast.checkpoint.store import Store
from outlast.config import Run
from outlast.environment import Launched
from outlast.errors import OutlastError
from outlast.faults.supervisor import supervise
from outlast.train import console as say
from outlast.train import loop, watchers
from outlast.train.start import Training, check_start, check_trace, open_run, settle

Progress = Callable[[Console], AbstractContextManager[Callable[[int, int], None]]]


def start(
    run: Run, dry_run: bool, profile: bool, rank: Sequence[str], launched: Launched | None, progress: Progress
) -> int:
    """Train a run, or show what would be trained, and say how it went: on the terminal and in outcome.json.

    Args:
        run: the settings, as the user gave them.
        dry_run: show and leave.
        profile: write a trace.
        rank: the command that starts one of its ranks.
        launched: which rank this process is; None where it is alone, or starts them.
        progress: shows how far tokenising is.

    Returns:
        The exit code.
    """
    folder = Path(run.folder)
    if launched:
        journal.leave_with_supervisor(launched)
    console = say.terminal(folder, launched)
    with progress(console) as report:
        settled = settle(run, report, launched)
    if dry_run:
        console.print(records.run_file(settled.run), highlight=False, soft_wrap=True, markup=False)
        say.opening(console, settled, Store(folder / "checkpoints", 1).newest())
        return errors.DONE
    if profile:
        check_trace(settled, watchers.Trace.STEPS)
    if launched is None and layout.ranks(run.parallel) > 1:
        check_start(settled)
        return supervise(rank, layout.ranks(run.parallel), folder)
    return _train(open_run(settled, launched), console, profile)


def _train(training: Training, console: Console, profile: bool) -> int:
    """Take the steps that are left. Returns the exit code."""
    counted = watchers.Counted(training)
    try:
        say.opening(console, training.settled, training.saved, training.mesh)
        ending = loop.train(training, [*_watching(training, console, profile), counted])
    except BaseException as error:
        code = errors.INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        with contextlib.suppress(OutlastError):  # a full disk, say, that the first error is about already
            training.close(f"{type(error).__name__}: {error}", code)
        raise
    outcome, code = ("done", errors.DONE)
    if ending.signal:
        code = errors.INTERRUPTED if ending.signal == "SIGINT" else errors.RESTART
        outcome = f"left at {ending.signal}"
    training.close(outcome, code)
    if training.mesh.leads:
        say.closing(console, training, ending, counted)
    training.mesh.leave()
    return code


def _watching(training: Training, console: Console, profile: bool) -> list[watchers.Watcher]:
    """Those who look on: every rank stops where a number is none, and the leading one tells and records."""
    lookers: list[watchers.Watcher] = [watchers.Finite(training)]
    if training.mesh.leads:
        lookers += [watchers.Record(training), say.Lines(console, training.run.train.steps)]
        if profile:
            lookers.append(watchers.Trace(Path(training.run.folder) / "trace.json", training.step + 1))
    return lookers
