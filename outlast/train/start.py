"""From settings to a run that can take its next step: the corpus, the folder, the model, the checkpoint gone on from."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import torch

import outlast
from outlast import config, environment, layout, records, settings
from outlast.checkpoint import store
from outlast.checkpoint.shards import Shard
from outlast.config import Run
from outlast.data.batches import Feed
from outlast.data.tokens import Corpus, Tokenizer, open_tokenizer, prepare
from outlast.errors import DataError, StorageError, UsageError, WeightsError
from outlast.journal import Journal, Sender, end
from outlast.journal import read as read_journal
from outlast.metrics import Metrics
from outlast.model import hf
from outlast.model.transformer import Transformer
from outlast.parallel import agreement, build, links
from outlast.parallel.chosen_pieces import chosen
from outlast.parallel.gradients import Part
from outlast.parallel.mesh import Mesh, make
from outlast.plan import memory
from outlast.train.identity import compare, facts, identity_hash
from outlast.train.optimizer import Group, Optimizer, groups


@dataclass(frozen=True)
class Settled:
    """A run with everything decided that its settings left open, and the data it is for.

    Attributes:
        run: the settings; the compute type and the vocabulary decided.
        tokenizer, corpus: what it learns from.
        device: where it computes.
        weights: fingerprint of the weights it begins from; empty where they are random.
    """

    run: Run
    tokenizer: Tokenizer
    corpus: Corpus
    device: torch.device
    weights: str

    @property
    def identity(self) -> dict[str, Any]:
        """What the result is a function of: the result knobs, and the data by content."""
        return config.result_knobs(self.run) | {
            "corpus": self.corpus.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "weights": self.weights,
        }


@dataclass
class Training:
    """A run in memory.

    Attributes:
        mesh: the rank grid.
        model, parts: this rank's part of the model, and of each of its parameters.
        journal, metrics: the run's records; None on the ranks that do not lead.
        saved: the checkpoint it went on from, or None.
        saved_step: the step of its newest checkpoint, or -1.
        evaluated_step: the last step whose held-out loss the journal has, or -1.
        step: the last finished.
        position: how many samples it and those before it took.
    """

    settled: Settled
    mesh: Mesh
    model: Transformer
    parts: list[Part]
    optimizer: Optimizer
    feed: Feed
    store: store.Store
    journal: Journal | Sender | None
    metrics: Metrics | None
    saved: store.Saved | None
    saved_step: int
    evaluated_step: int
    step: int
    position: int

    @property
    def run(self) -> Run:
        """The settings."""
        return self.settled.run

    @property
    def last_step(self) -> int:
        """The step to leave after."""
        return self.run.train.stop_at or self.run.train.steps

    def note(self, event: str, **fields: Any) -> None:
        """Write a line about the last finished step to the journal: one rank does for all."""
        if self.journal:
            self.journal.write(event, self.step, **fields)

    def measure(self, numbers: dict[str, float | None]) -> None:
        """Write the last finished step's numbers, where this rank keeps them."""
        if self.metrics:
            self.metrics.write(self.step, numbers)

    def save(self) -> None:
        """Commit a checkpoint of the last finished step."""
        about = {"position": self.position, "identity": self.settled.identity}
        saved = self.store.save(self.step, tensors(self.parts, self.optimizer), about)
        self.saved_step = self.step
        self.note("checkpoint", path=saved.path.name, bytes=saved.bytes)
        if self.mesh.leads:
            try:
                for old in self.store.trim():
                    self.note("checkpoint removed", path=old.path.name)
            except StorageError as error:  # costs room, but no work
                self.note("checkpoint not removed", why=error.what)

    def close(self, outcome: str, exit_code: int) -> None:
        """Write how the run was left, and let go of the folder."""
        try:
            if isinstance(self.journal, Journal):  # else the supervisor writes it
                end(self.journal, self.step, outcome, exit_code)
        finally:
            if self.metrics:
                self.metrics.close()
            if self.journal:
                self.journal.close()


def tensors(parts: Sequence[Part], optimizer: Optimizer) -> dict[str, Shard]:
    """The rank's parts of everything a checkpoint holds, by name."""
    weights = {f"model.{part.name}": Shard(part.parameter.detach(), part.place) for part in parts}
    return weights | optimizer.state()


def settle(
    run: Run, progress: Callable[[int, int], None] | None = None, launched: environment.Launched | None = None
) -> Settled:
    """Decide what the settings leave open, and tokenise the corpus where that is still to be done.

    Args:
        run: as the run file and the command line say; `model` already that of `model.weights`.
        progress: told bytes read and bytes in all while tokenising.
        launched: as which rank of how many this process was started; None where it is alone, or starts them.

    Raises:
        OutlastError: something in it cannot be.
    """
    settings.check(run)
    layout.check(run, launched.ranks if launched else None)
    device = _device(run, launched)
    torch.set_num_threads(threads(run, launched.local_ranks if launched else layout.ranks(run.parallel)))
    torch.use_deterministic_algorithms(run.train.deterministic)
    tokenizer = open_tokenizer(run.data, run.model.weights)
    if run.model.weights:
        _check_tokenizer(run, tokenizer)
    if run.model.vocab_size and run.model.vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"model.vocab_size is {run.model.vocab_size}, and the tokeniser {tokenizer.name} has {tokenizer.vocab_size} tokens",
            fix=f"set it to 0, which takes the tokeniser's, or to {tokenizer.vocab_size} or more",
            key="model.vocab_size",
        )
    corpus = prepare(run.data, tokenizer, progress)
    decided = {"train.dtype": _dtype(run, device), "model.vocab_size": run.model.vocab_size or tokenizer.vocab_size}
    weights = hf.fingerprint(Path(run.model.weights)) if run.model.weights else ""
    run = config.replaced(run, decided)
    layout.check(run)  # what hangs on these
    return Settled(run, tokenizer, corpus, device, weights)


def _device(run: Run, launched: environment.Launched | None) -> torch.device:
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "train.device is cuda, and torch finds no CUDA device", fix="set it to auto or cpu", key="train.device"
        )
    if run.train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    here = launched.local_ranks if launched else layout.ranks(run.parallel)
    if here > torch.cuda.device_count():
        raise UsageError(
            f"{here} ranks on this host, and it has {torch.cuda.device_count()} CUDA devices",
            fix="start one rank a device, or set train.device to cpu",
            key="train.device",
        )
    if here > 1 and not launched:  # who starts the ranks takes none of their memory
        return torch.device("cuda", 0)
    device = torch.device("cuda", launched.local_rank if launched else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def threads(run: Run, local_ranks: int) -> int:
    """Threads of each rank: the cores are shared out."""
    return run.train.threads or max(1, environment.usable_cores() // local_ranks)


def _dtype(run: Run, device: torch.device) -> str:
    if run.train.dtype != "auto":
        return run.train.dtype
    return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def _check_tokenizer(run: Run, tokenizer: Tokenizer) -> None:
    """The tokeniser must be the one beside the weights, where there is one: other numbers would mean other words."""
    folder = Path(run.model.weights)
    if (folder / "tokenizer.json").exists():
        theirs = open_tokenizer(config.replaced(run, {"data.tokenizer": "auto"}).data, run.model.weights)
        if theirs.fingerprint != tokenizer.fingerprint:
            raise WeightsError(
                f"the weights are for another tokeniser: theirs has {theirs.vocab_size} tokens, {tokenizer.name} has {tokenizer.vocab_size}",
                fix="leave data.tokenizer at auto, which takes the one beside the weights",
                where=str(folder / "tokenizer.json"),
                key="data.tokenizer",
            )
    elif run.model.vocab_size < tokenizer.vocab_size:
        raise WeightsError(
            f"the weights have {run.model.vocab_size} tokens, the tokeniser {tokenizer.name} has {tokenizer.vocab_size}",
            fix="set data.tokenizer to the tokenizer.json the weights were trained with",
            where=run.model.weights,
            key="data.tokenizer",
        )


def open_run(settled: Settled, launched: environment.Launched | None = None) -> Training:
    """Take the run's folder, and go on from its newest checkpoint where it has one.

    Raises:
        ResumeError: the folder holds another run, or is in use.
        StorageError: it cannot be written, or the checkpoint is damaged.
        RanksDifferError: the ranks do not run the same thing.
    """
    run, folder = settled.run, Path(settled.run.folder)
    _check_memory(settled, launched.local_ranks if launched else 1)
    mesh = make(run.parallel, settled.device)
    journal = _journal(mesh, folder, launched)
    try:
        kept = store.Store(folder / "checkpoints", run.checkpoint.keep, mesh.axes.get("checkpoint"))
        saved = kept.newest()
        told = [line["step"] for line in read_journal(folder / "journal.jsonl") if line["event"] == "evaluation"]
        evaluated_step = told[-1] if told else -1
        agreement.same_folder(mesh, folder)
        agreement.same_everywhere(
            mesh,
            {
                **facts(run, settled.identity),
                "newest checkpoint": saved and saved.step,
                "last evaluation": evaluated_step,
            },
        )
        changed = compare(run, settled.identity, saved)
        feed = Feed(settled.corpus, run.data, run.train.seed, settled.tokenizer.eos)
        if not all(feed.order.sizes):
            raise DataError("a source has no training tokens at all", fix="give it more text", key="data.sources")
        measured = links.choose(mesh, run, launched.local_rank if launched else mesh.rank)
        pieces = chosen(run, mesh, sum(map(len, feed.held_out)))
        asked, run = run, config.replaced(run, {"parallel.overlap": pieces})
        settled = replace(settled, run=run)
        model, parts = build(run, mesh)
        optimizer = Optimizer(parts, run, mesh)
        if saved:
            optimizer.make_room(store.contents(saved))
            kept.load(saved, tensors(parts, optimizer))
            optimizer.copies.settle()
        elif run.model.weights:
            weights = ((part.name, part.parameter.detach(), part.place) for part in parts)
            hf.load(model, Path(run.model.weights), weights)
        agreement.replicas_equal_shards_different(parts, mesh)
        step, position = (saved.step, saved.about["position"]) if saved else (0, 0)
        metrics = Metrics(folder, run.log, config.result_knobs(run), journal.attempt, step) if journal else None
    except BaseException:
        if journal:
            journal.close()
        raise
    state = (saved, saved.step if saved else -1, evaluated_step, step, position)
    training = Training(settled, mesh, model, parts, optimizer, feed, kept, journal, metrics, *state)
    if journal:
        training.note("start", **_start(settled, mesh, position, saved, changed))
        if measured:
            training.note("links measured", path=links.FILE)
        _write_records(replace(settled, run=asked), folder)  # the next start may choose anew
        (folder / "outcome.json").unlink(missing_ok=True)  # of the start before
    return training


_OF_A_PROCESS: Final = 300_000_000
"""Bytes of a rank that has only loaded torch and us: what metrics.jsonl shows of the smallest run, rounded down."""


def _journal(mesh: Mesh, folder: Path, launched: environment.Launched | None) -> Journal | Sender | None:
    if not mesh.leads:
        return None
    return Sender(launched) if launched and launched.journal else Journal(folder / "journal.jsonl")


def _start(
    settled: Settled, mesh: Mesh, position: int, saved: store.Saved | None, changed: dict[str, list[Any]]
) -> dict[str, Any]:
    """What the journal is told at a start."""
    run = settled.run
    return {
        "position": position,
        "identity": identity_hash(settled.identity),
        "corpus": settled.corpus.fingerprint,
        "checkpoint": saved.path.name if saved else None,
        "changed": changed,
        "layout": layout.degrees(run.parallel)
        | {"sp": run.parallel.sp, "shard_sequence_ranks": run.parallel.shard_sequence_ranks},
        "overlap": run.parallel.overlap,
        "batch": settings.batch_sequences(run),
        "dtype": run.train.dtype,
        "device": device_name(settled.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def check_trace(settled: Settled, steps: int) -> None:
    """Refuse a trace where fewer steps are left than it takes. Raises UsageError."""
    run = settled.run
    saved = store.Store(Path(run.folder) / "checkpoints", run.checkpoint.keep).newest()
    left = (run.train.stop_at or run.train.steps) - (saved.step if saved else 0)
    if left < steps:
        raise UsageError(
            f"--profile takes {steps} steps, and {left} are left", fix="profile an earlier part, or a longer run"
        )


def check_start(settled: Settled) -> None:
    """Refuse, before any rank is started on this machine, what each of them would.

    Raises:
        UsageError: it does not fit into memory.
        ResumeError: the folder holds another run.
    """
    run, folder = settled.run, Path(settled.run.folder)
    ranks, there = layout.ranks(run.parallel), psutil.virtual_memory().total
    if ranks * _OF_A_PROCESS > there:
        raise UsageError(
            f"{ranks:,} ranks on this machine take {ranks * _OF_A_PROCESS / 1e9:,.0f} GB before anything is in them, and it has {there / 1e9:,.0f} GB",
            fix="lower the degrees, or start the ranks on several machines with torchrun",
            key=next(f"parallel.{axis}" for axis, degree in layout.degrees(run.parallel).items() if degree > 1),
        )
    _check_memory(settled, ranks)
    compare(run, settled.identity, store.Store(folder / "checkpoints", run.checkpoint.keep).newest())


def _check_memory(settled: Settled, local_ranks: int) -> None:
    """Refuse what could never fit, before the system ends the process for it."""
    run, cuda = settled.run, settled.device.type == "cuda"
    needed = memory.state(run.model, run.train.dtype, run.optim.name, run.parallel).total
    here = 1 if cuda else local_ranks
    there = torch.cuda.mem_get_info(settled.device)[1] if cuda else psutil.virtual_memory().total
    if needed * here > there:
        ranks = f"for each of {here} ranks, " if here > 1 else ""
        raise UsageError(
            f"weights, gradients and moments take {needed / 1e9:,.1f} GB, {ranks}and {device_name(settled.device)} has {there / 1e9:,.1f} GB",
            fix="make the model smaller or share it among more ranks; outlast train --dry-run shows what takes how much",
            key="model.hidden_size",
        )


def parameter_groups(settled: Settled) -> list[Group]:
    """The parameter groups of the whole model, for looking at: no weight takes memory."""
    with torch.device("meta"):
        return groups(dict(Transformer(settled.run.model).named_parameters()), settled.run.optim)


def _write_records(settled: Settled, folder: Path) -> None:
    records.write_text(folder / "run.toml", records.run_file(settled.run))
    records.write_json(folder / "identity.json", "identity", 1, {"knobs": settled.identity})
    records.write_json(
        folder / "env.json",
        "environment",
        1,
        {
            "outlast": outlast.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "host": platform.node(),
            "device": device_name(settled.device),
            "threads": torch.get_num_threads(),
            "cores": environment.usable_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "process": os.getpid(),
        },
    )
    settled.tokenizer.save(folder / "tokenizer")


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
