"""The training loop: one step, readable from top to bottom."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from outlast import settings
from outlast.data import batches
from outlast.data.batches import MicroBatch
from outlast.model.transformer import Packing, Transformer
from outlast.plan import memory
from outlast.train.optimizer import clip, lr_factor
from outlast.train.start import Training, device_name
from outlast.train.watchers import Watcher


@dataclass
class Ending:
    """How the loop was left.

    Attributes:
        signal: name of the signal that asked for it, or empty.
        tokens: in each step.
        seconds: time of each step taken.
        total_seconds: time of all of it, checkpoints and evaluations included.
    """

    tokens: int
    signal: str = ""
    seconds: list[float] = field(default_factory=list)
    total_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Over all of it; None where no step was taken."""
        return self.tokens * len(self.seconds) / self.total_seconds if self.seconds else None

    @property
    def compile_seconds(self) -> float | None:
        """What the first step took longer than the second; None where there were not two."""
        return self.seconds[0] - self.seconds[1] if len(self.seconds) > 1 else None


def train(training: Training, watchers: Sequence[Watcher]) -> Ending:  # noqa: C901  a step is read in one piece
    """Take the steps that are left, with checkpoints and evaluations on the way.

    Args:
        training: the opened run; its step and position move with each step.
        watchers: told of every step.

    Raises:
        DivergedError: the loss or the gradient norm is not a number; the last checkpoint is untouched.
        StorageError: a record or a checkpoint could not be written.
    """
    run, model, last, begun = training.run, training.model, training.last_step, time.perf_counter()
    batch = settings.batch_sequences(run)
    ending = Ending(batch * run.data.sequence_length)
    if run.train.compile:
        compile_blocks(model)
    with stop_requests() as requests:
        if training.step == 0:
            evaluate(training, watchers)
        while training.step < last and not requests:
            step, started = training.step + 1, time.perf_counter()
            work = batches.step(training.feed, training.position, batch, run.train.micro_batch)
            waited = time.perf_counter() - started
            for watcher in watchers:
                watcher.batch(step, work)

            model.train()
            total = torch.zeros((), dtype=torch.float64, device=training.settled.device)
            for one in work.batches:
                loss = model(*on_device(one, training.settled.device))
                # Over the whole step's learned tokens, so that no micro-batch or rank weighs more than its tokens do.
                (loss / max(1, work.learned)).backward()
                total += loss.detach()
            norm = clip(model.parameters(), run.optim.clip).item()
            mean = total.item() / max(1, work.learned)
            for watcher in watchers:
                watcher.gradients(step, mean, norm)

            lr = run.optim.lr * lr_factor(run.schedule, run.train.steps, step)
            training.optimizer.step(lr)
            training.step, training.position = step, work.stop

            ending.seconds.append(time.perf_counter() - started)
            numbers = measured(training, mean, norm, lr, ending.seconds[-1], waited)
            training.metrics.write(step, numbers)
            for watcher in watchers:
                watcher.update(step, numbers)

            if step % run.checkpoint.every == 0 or step == last or requests:
                training.save()
            if run.eval.every and step % run.eval.every == 0 and step < last and not requests:
                evaluate(training, watchers)
        if training.step != training.saved_step and ending.seconds:  # asked to leave during an evaluation
            training.save()
        if training.step == last and training.evaluated_step != last:
            evaluate(training, watchers)
    ending.signal, ending.total_seconds = requests[0] if requests else "", time.perf_counter() - begun
    return ending


def on_device(one: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Packing]:
    """A micro-batch as the model takes it."""
    tokens, targets, places, samples = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (one.tokens_BS, one.targets_BS, one.places_BS, one.positions_B)
    )
    return tokens, targets, Packing(samples, places, one.documents)


def measured(
    training: Training, loss: float, norm: float, lr: float, seconds: float, waited: float
) -> dict[str, float | None]:
    """A step's numbers, as metrics.jsonl keeps them. None where this device does not tell."""
    run, device = training.run, training.settled.device
    tokens = settings.batch_sequences(run) * run.data.sequence_length
    peak = memory.peak_flops(device_name(device)) if run.train.dtype == "bfloat16" else None
    model_flops = tokens * memory.flops_per_token(run.model, run.data.sequence_length)
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return {
        "loss": loss,
        "grad_norm": norm,
        "lr": lr,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": model_flops / seconds / peak if peak else None,
        "memory_bytes": held,
        "data_wait_seconds": waited,
    }


@torch.no_grad()
def evaluate(training: Training, watchers: Sequence[Watcher]) -> None:
    """Record the mean loss over the learned tokens of the held-out samples, in nats; nothing where none are held out."""
    training.model.eval()
    total, learned = 0.0, 0
    for one in training.feed.evaluation(training.run.eval.samples, training.run.train.micro_batch):
        total += training.model(*on_device(one, training.settled.device)).item()
        learned += one.learned
    if learned:
        training.journal.write("evaluation", training.step, loss=total / learned)
        training.evaluated_step = training.step
        training.metrics.write(training.step, {"held_out_loss": total / learned})
        for watcher in watchers:
            watcher.evaluation(training.step, total / learned)


def compile_blocks(model: Transformer) -> None:
    """Compile each block; attention is left out, since its work differs with every sample's documents."""
    model.fill(attend=torch.compiler.disable(model.seams.attend))
    for block in model.layers:
        block.compile()


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """Signals that ask to leave after the step, by name as they come; a second one is not held back."""
    requests: list[str] = []
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in asked}

    def note(number: int, _frame: object) -> None:
        requests.append(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for one in asked:
        signal.signal(one, note)
    try:
        yield requests
    finally:
        for one in asked:
            signal.signal(one, before[one])
