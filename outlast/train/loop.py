"""The training loop: one step, readable from top to bottom."""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psutil
import torch

from outlast import layout, settings
from outlast.data import IGNORED, batches
from outlast.data.batches import Step
from outlast.errors import RanksDifferError
from outlast.model.transformer import Transformer
from outlast.parallel.gradients import complete, let_go
from outlast.parallel.inputs import inputs
from outlast.parallel.mesh import Mesh
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
    run, mesh, model, last, begun = training.run, training.mesh, training.model, training.last_step, time.perf_counter()
    batch = settings.batch_sequences(run)
    ending = Ending(batch * run.data.sequence_length)
    if run.train.compile:
        compile_blocks(model)
    with stop_requests(alone=mesh.world is None) as requests:
        if training.step == 0:
            evaluate(training, watchers)
        ending.signal = agreed(requests, mesh)
        while training.step < last and not ending.signal:
            step, started = training.step + 1, time.perf_counter()
            mesh.counts.take()
            share = (run.train.micro_batch, mesh.data_ranks, mesh.data_rank)
            work = batches.step(training.feed, training.position, batch, *share)
            waited = time.perf_counter() - started
            work = of_all_ranks(work, mesh)
            for watcher in watchers:
                watcher.batch(step, work)

            model.train()
            total = torch.zeros((), dtype=torch.float64, device=mesh.device)
            for one in work.batches:
                loss = model(*inputs(one, mesh))
                # Over the whole step's learned tokens, so that no micro-batch or rank weighs more than its tokens do.
                (loss / max(1, work.learned)).backward()
                total += loss.detach()
            complete(training.parts, mesh)
            norm = clip(training.parts, mesh, run.optim.clip)
            mean = mesh.sum(total, alike=("tp",)).item() / max(1, work.learned)
            for watcher in watchers:
                watcher.gradients(step, mean, norm)

            lr = run.optim.lr * lr_factor(run.schedule, run.train.steps, step)
            training.optimizer.step(lr)
            training.step, training.position = step, work.stop
            ending.signal = agreed(requests, mesh)

            ending.seconds.append(time.perf_counter() - started)
            numbers = measured(training, mean, norm, lr, ending.seconds[-1], waited)
            training.measure(numbers)
            for watcher in watchers:
                watcher.update(step, numbers)

            if step % run.checkpoint.every == 0 or step == last or ending.signal:
                training.save()
            if run.eval.every and step % run.eval.every == 0 and step < last and not ending.signal:
                evaluate(training, watchers)
                ending.signal = agreed(requests, mesh)
        if training.step != training.saved_step and ending.seconds:  # asked to leave during an evaluation
            training.save()
        if training.step == last and training.evaluated_step != last:
            evaluate(training, watchers)
            ending.signal = agreed(requests, mesh)
    ending.total_seconds = time.perf_counter() - begun
    return ending


def of_all_ranks(work: Step, mesh: Mesh) -> Step:
    """A rank's step with what is learned and fed by all of them; the hash adds up modulo 2^64.

    Raises:
        RanksDifferError: ranks that should be fed the same were not.
    """
    signed, counts = work.fed - (work.fed >> 63 << 64), mesh.first_along(*layout.FED_ALIKE)
    mine = torch.tensor([work.learned * counts, signed * counts, signed], dtype=torch.int64, device=mesh.device)
    learned, fed, of_all = mesh.sum(mine).tolist()
    alike = math.prod(layout.degrees(mesh.parallel)[axis] for axis in layout.FED_ALIKE)
    if (fed * alike - of_all) % 2**64:
        raise RanksDifferError(
            f"ranks of {', '.join(axis for axis in layout.FED_ALIKE if axis in mesh.axes)} were fed other tokens than one another at positions {work.first} to {work.stop - 1}",
            fix="a host's corpus cache or memory is at fault: remove the cache (data.cache), and start again",
        )
    return replace(work, learned=learned, fed=fed % 2**64)


def agreed(requests: Sequence[signal.Signals], mesh: Mesh) -> str:
    """The signal by which any rank was asked to leave, known to all of them; empty where none was."""
    number = mesh.largest(requests[0] if requests else 0)
    return signal.Signals(number).name if number else ""


def measured(
    training: Training, loss: float, norm: float, lr: float, seconds: float, waited: float
) -> dict[str, float | None]:
    """A step's numbers, as metrics.jsonl keeps them. None where this device does not tell.

    Memory, waits and transfers are the leading rank's; the transfers by axis and operation, `comm.tp.all_gather.bytes`.
    """
    run, device = training.run, training.settled.device
    tokens = settings.batch_sequences(run) * run.data.sequence_length
    peak = memory.peak_flops(device_name(device)) if run.train.dtype == "bfloat16" else None
    model_flops = tokens * memory.flops_per_token(run.model, run.data.sequence_length)
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    sent = {
        f"comm.{axis}.{op}.{what}": number
        for (axis, op), tally in training.mesh.counts.take().items()
        for what, number in vars(tally).items()
    }
    return sent | {
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
    run, mesh = training.run, training.mesh
    training.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    share = (run.train.micro_batch, mesh.data_ranks, mesh.data_rank)
    for one in training.feed.evaluation(run.eval.samples, *share):
        tokens, targets, packing = inputs(one, mesh)
        loss = training.model(tokens, targets, packing)
        sums += torch.stack((loss.double(), (targets != IGNORED).sum()))
    let_go(training.model)
    total, learned = mesh.sum(sums, alike=("tp",)).tolist()
    if learned:
        training.note("evaluation", loss=total / learned)
        training.evaluated_step = training.step
        training.measure({"held_out_loss": total / learned})
        for watcher in watchers:
            watcher.evaluation(training.step, total / learned)


def compile_blocks(model: Transformer) -> None:
    """Compile each block; attention is left out, since its work differs with every sample's documents."""
    model.fill(attend=torch.compiler.disable(model.seams.attend))
    for block in model.layers:
        block.compile()


@contextmanager
def stop_requests(alone: bool = True) -> Iterator[list[signal.Signals]]:
    """Signals that ask to leave after the step, as they come; a second one is not held back.

    Of several ranks each may be told twice, by the supervisor and by a scheduler: only a second ctrl-C means haste then.
    """
    requests: list[signal.Signals] = []
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in asked}

    def note(number: int, _frame: object) -> None:
        requests.append(signal.Signals(number))
        if alone or number == signal.SIGINT:
            signal.signal(number, before[signal.Signals(number)])

    for one in asked:
        signal.signal(one, note)
    try:
        yield requests
    finally:
        for one in asked:
            signal.signal(one, before[one])
