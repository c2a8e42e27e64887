"""From settings to a run that can take its next step: the corpus, the folder, the model, the checkpoint gone on from."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

import outlast
from outlast import config, layout, records, settings
from outlast.checkpoint import store
from outlast.config import Run
from outlast.data.batches import Feed
from outlast.data.tokens import Corpus, Tokenizer, open_tokenizer, prepare
from outlast.errors import DataError, ResumeError, StorageError, UsageError, WeightsError
from outlast.journal import Journal
from outlast.journal import read as read_journal
from outlast.metrics import Metrics
from outlast.model import hf
from outlast.model.transformer import Transformer
from outlast.plan import memory
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
        saved: the checkpoint it went on from, or None.
        saved_step: the step of its newest checkpoint, or -1.
        evaluated_step: the last step whose held-out loss the journal has, or -1.
        step: the last finished.
        position: how many samples it and those before it took.
    """

    settled: Settled
    model: Transformer
    optimizer: Optimizer
    feed: Feed
    store: store.Store
    journal: Journal
    metrics: Metrics
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

    def save(self) -> None:
        """Commit a checkpoint of the last finished step."""
        about = {"position": self.position, "identity": self.settled.identity}
        saved = self.store.save(self.step, tensors(self.model, self.optimizer), about)
        self.saved_step = self.step
        self.journal.write("checkpoint", self.step, path=saved.path.name, bytes=saved.bytes)
        try:
            for old in self.store.trim():
                self.journal.write("checkpoint removed", self.step, path=old.path.name)
        except StorageError as error:  # costs room, but no work
            self.journal.write("checkpoint not removed", self.step, why=error.what)

    def close(self, outcome: str, exit_code: int) -> None:
        """Write how the run was left, to the journal and to outcome.json, and let go of the folder."""
        try:
            self.journal.write("end", self.step, outcome=outcome, exit_code=exit_code)
            told = {"outcome": outcome, "exit_code": exit_code, "step": self.step}
            records.write_json(Path(self.run.folder) / "outcome.json", "outcome", 1, told)
        finally:
            self.metrics.close()
            self.journal.close()


def tensors(model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything a checkpoint holds, by name."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()} | optimizer.state()


def identity_hash(identity: dict[str, Any]) -> str:
    """The run's identity, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def settle(run: Run, progress: Callable[[int, int], None] | None = None) -> Settled:
    """Decide what the settings leave open, and tokenise the corpus where that is still to be done.

    Args:
        run: as the run file and the command line say; `model` already that of `model.weights`.
        progress: told bytes read and bytes in all while tokenising.

    Raises:
        OutlastError: something in it cannot be.
    """
    settings.check(run)
    layout.check(run.parallel, run.model, ranks=1)
    device = _device(run)
    _set_threads(run)
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
    return Settled(config.replaced(run, decided), tokenizer, corpus, device, weights)


def _device(run: Run) -> torch.device:
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "train.device is cuda, and torch finds no CUDA device", fix="set it to auto or cpu", key="train.device"
        )
    return torch.device("cuda" if run.train.device != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(run: Run, device: torch.device) -> str:
    if run.train.dtype != "auto":
        return run.train.dtype
    return "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def _set_threads(run: Run) -> None:
    torch.set_num_threads(run.train.threads or config.usable_cores())
    torch.use_deterministic_algorithms(run.train.deterministic)


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


def open_run(settled: Settled) -> Training:
    """Take the run's folder, and go on from its newest checkpoint where it has one.

    Raises:
        ResumeError: the folder holds another run, or is in use.
        StorageError: it cannot be written, or the checkpoint is damaged.
    """
    run, folder = settled.run, Path(settled.run.folder)
    _check_memory(settled)
    journal = Journal(folder / "journal.jsonl")
    try:
        kept = store.Store(folder / "checkpoints", run.checkpoint.keep)
        saved = kept.newest()
        changed = _compare(settled, folder, saved)
        told = [line["step"] for line in read_journal(journal.path) if line["event"] == "evaluation"]
        model = Transformer.on(settled.device, run.model, getattr(torch, run.train.dtype), run.train.seed)
        optimizer = Optimizer(model, run.optim)
        feed = Feed(settled.corpus, run.data, run.train.seed, settled.tokenizer.eos)
        if not all(feed.order.sizes):
            raise DataError("a source has no training tokens at all", fix="give it more text", key="data.sources")
        if saved:
            store.verify(saved)
            optimizer.make_room(store.contents(saved))
            store.load(saved, tensors(model, optimizer))
        elif run.model.weights:
            hf.load(model, Path(run.model.weights))
        step, position = (saved.step, saved.about["position"]) if saved else (0, 0)
        metrics = Metrics(folder, run.log, config.result_knobs(run), journal.attempt, step)
    except BaseException:
        journal.close()
        raise
    journal.write(
        "start",
        step,
        position=position,
        identity=identity_hash(settled.identity),
        corpus=settled.corpus.fingerprint,
        checkpoint=saved.path.name if saved else None,
        changed=changed,
        layout=layout.degrees(run.parallel),
        batch=settings.batch_sequences(run),
        dtype=run.train.dtype,
        device=device_name(settled.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    _write_records(settled, folder)
    (folder / "outcome.json").unlink(missing_ok=True)  # of the start before
    saved_step, evaluated_step = saved.step if saved else -1, told[-1] if told else -1
    state = (saved, saved_step, evaluated_step, step, position)
    return Training(settled, model, optimizer, feed, kept, journal, metrics, *state)


def check_trace(settled: Settled, steps: int) -> None:
    """Refuse a trace where fewer steps are left than it takes. Raises UsageError."""
    run = settled.run
    saved = store.Store(Path(run.folder) / "checkpoints", run.checkpoint.keep).newest()
    left = (run.train.stop_at or run.train.steps) - (saved.step if saved else 0)
    if left < steps:
        raise UsageError(
            f"--profile takes {steps} steps, and {left} are left", fix="profile an earlier part, or a longer run"
        )


def _check_memory(settled: Settled) -> None:
    """Refuse what could never fit, before the system ends the process for it."""
    run, cuda = settled.run, settled.device.type == "cuda"
    needed = memory.state(run.model, run.train.dtype, run.optim.name).total
    there = torch.cuda.mem_get_info(settled.device)[1] if cuda else psutil.virtual_memory().total
    if needed > there:
        raise UsageError(
            f"weights, gradients and moments take {needed / 1e9:,.1f} GB, and {device_name(settled.device)} has {there / 1e9:,.1f} GB",
            fix="make the model smaller; outlast train --dry-run shows what takes how much",
            key="model.hidden_size",
        )


def dry_groups(settled: Settled) -> list[Group]:
    """The parameter groups of a run that is only looked at: no weight takes memory."""
    with torch.device("meta"):
        return groups(Transformer(settled.run.model), settled.run.optim)


def _compare(settled: Settled, folder: Path, saved: store.Saved | None) -> dict[str, list[Any]]:
    """What differs between the run in the folder and this one; refused unless it was allowed."""
    path = folder / "identity.json"
    if not (path.exists() or saved):
        return {}
    before = records.read_json(path, "identity", 1).get("knobs") if path.exists() else saved and saved.about["identity"]
    if not isinstance(before, dict):
        raise ResumeError(
            "the run's identity is damaged", fix="remove the file: the checkpoints have it too", where=str(path)
        )
    now = json.loads(json.dumps(settled.identity))
    changed = {key: [before.get(key), now.get(key)] for key in before | now if before.get(key) != now.get(key)}
    for key, (old, new) in changed.items():
        about_data = key.startswith("data.") or key in ("corpus", "tokenizer", "train.seed")
        # Of another shape, or with moments of another kind, it could not go on; what it began from is in the past.
        fixed = key.startswith("model.") or key in ("weights", "train.dtype", "optim.name")
        section = "data" if about_data else "train"
        if fixed or not getattr(settled.run, section).allow_change:
            way_on = "" if fixed else f", or go on with the change: --{section}.allow-change"
            raise ResumeError(
                f"the run in {folder} was begun with {key} = {old!r}, and this command has {new!r}",
                fix=f"give this one another folder: --folder runs/NAME{way_on}",
                key={"corpus": "data.sources", "tokenizer": "data.tokenizer", "weights": "model.weights"}.get(key, key),
            )
    return changed


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
            "cores": config.usable_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "process": os.getpid(),
        },
    )
    settled.tokenizer.save(folder / "tokenizer")


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
