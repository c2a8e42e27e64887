"""Those who look on while a run trains: each is told of every step, and none is known to the loop by name."""

from collections import Counter
from pathlib import Path
from typing import Final

import torch

from outlast.data.batches import Step
from outlast.errors import DivergedError
from outlast.parallel.inputs import learned_here
from outlast.plan import traffic
from outlast.train.start import Training


class Watcher:
    """Someone who looks on; overrides those of the calls that it wants: three a step, one an evaluation."""

    def batch(self, step: int, work: Step) -> None:
        """The step's samples were read."""

    def gradients(self, step: int, loss: float, norm: float) -> None:
        """The gradients are complete and clipped; the loss is the mean over the step's learned tokens."""

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """The weights were updated; the step's numbers are as metrics.jsonl gets them."""

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out samples were evaluated: the mean loss over their learned tokens."""


class Record(Watcher):
    """Watcher: writes each step, with the samples it took and a hash of the tokens it fed, to the journal."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def batch(self, step: int, work: Step) -> None:
        """Keep what the line will say."""
        self.work = work

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Write the line."""
        work = self.work
        self.training.note(
            "step", durable=False, samples=[work.first, work.stop], fed=f"{work.fed:016x}", loss=numbers["loss"]
        )


class Finite(Watcher):
    """Watcher: stops a run whose loss or gradients are not numbers, before they reach the weights."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def batch(self, step: int, work: Step) -> None:
        """Keep which samples are at work."""
        self.work = work

    def gradients(self, step: int, loss: float, norm: float) -> None:
        """Look. Raises DivergedError."""
        if not (abs(loss) < float("inf") and norm < float("inf")):
            feed = self.training.feed
            places = [feed.order.at(position) for position in range(self.work.first, self.work.stop)]
            files = {file for at in places for file in feed.samples[at.group].documents(at.sample)}
            raise DivergedError(
                f"step {step}: the loss is {loss}, the gradient norm {norm}",
                fix="the weights are those of the last checkpoint; lower optim.lr, or look at the samples",
                where=f"samples {self.work.first} to {self.work.stop - 1}, from " + ", ".join(sorted(files)[:3]),
            )


class Counted(Watcher):
    """Watcher: adds up what this rank has sent in the run's steps, and what the formulas say it should have.

    Attributes:
        sent: calls, bytes and seconds waited, by axis and which of these.
        formula: bytes by axis.
        seconds: the steps took.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.sent: Counter[tuple[str, str]] = Counter()
        self.formula: Counter[str] = Counter()
        self.seconds = 0.0

    def batch(self, step: int, work: Step) -> None:
        """Add what the step will send."""
        mesh = self.training.mesh
        sequences, learned = (
            [len(one.positions_B) for one in work.batches],
            [learned_here(one, mesh) for one in work.batches],
        )
        said = traffic.step(self.training.run, sequences, learned, mesh.rank, step, mesh.choices)
        for (axis, _), one in said.items():
            self.formula[axis] += one.bytes

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Add what it has sent."""
        self.seconds += numbers["seconds"] or 0
        for name, number in numbers.items():
            if name.startswith("comm."):
                _, axis, _, what = name.split(".")
                self.sent[axis, what] += number or 0  # pyrefly: ignore[unsupported-operation]


class Trace(Watcher):
    """Watcher: a profiler's trace of the last three of five steps, in Chrome's format."""

    STEPS: Final = 5

    def __init__(self, path: Path, first: int) -> None:
        self.path, self.last, self.profile = path, first + self.STEPS - 1, torch.profiler.profile()

    def batch(self, step: int, work: Step) -> None:
        """Begin where the third last step begins."""
        if step == self.last - 2:
            self.profile.start()

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Write it after the last."""
        if step == self.last:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.path))
