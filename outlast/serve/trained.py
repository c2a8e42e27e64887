"""A trained run as a model: opened from its newest checkpoint, or written out as a Hugging Face directory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from outlast import config, settings
from outlast.checkpoint import shards, store
from outlast.config import Run
from outlast.data.tokens import Tokenizer, open_tokenizer
from outlast.errors import UsageError
from outlast.model import hf
from outlast.model.transformer import Transformer


@dataclass(frozen=True)
class Trained:
    """What a run has come to.

    Attributes:
        run: its settings.
        model: with the newest checkpoint's weights, in evaluation mode.
        tokenizer: the one it was trained with.
        step: how far it came.
    """

    run: Run
    model: Transformer
    tokenizer: Tokenizer
    step: int


def open_trained(folder: Path) -> Trained:
    """Open a run folder, or the run of that name below runs/.

    Raises:
        UsageError: there is no run, or it has no checkpoint yet.
        StorageError: the checkpoint is damaged.
    """
    if not (folder / "run.toml").exists():
        folder = Path("runs") / folder if (Path("runs") / folder / "run.toml").exists() else folder
    if not (folder / "run.toml").exists():
        raise UsageError(
            f"{folder} is not a run folder: it has no run.toml", fix="name one that outlast train has made"
        )
    run = config.replaced(Run(), settings.read_file(folder / "run.toml"))
    checkpoints = store.Store(folder / "checkpoints", run.checkpoint.keep)
    saved = checkpoints.newest()
    if saved is None:
        raise UsageError(f"the run in {folder} has no checkpoint yet", fix="train it until one is written")
    model = Transformer.on(torch.device("cpu"), run.model, torch.float32, run.train.seed).eval()
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    checkpoints.load(saved, shards.whole(weights))
    data = config.replaced(run, {"data.tokenizer": str(folder / "tokenizer"), "data.eos": ""}).data
    return Trained(run, model, open_tokenizer(data, ""), saved.step)


def export(trained: Trained, into: Path) -> None:
    """Write weights, configuration and tokeniser as transformers reads them.

    Weights that came from a Hugging Face directory go back in its type, others as float32.

    Raises:
        OutlastError: `into` is not empty or cannot be written, or no published family has this shape.
    """
    like = Path(trained.run.model.weights) if trained.run.model.weights else None
    dtype = hf.tensor_dtype(like) if like else torch.float32
    state = dict(trained.model.named_parameters())
    shape, length = trained.run.model, trained.run.data.sequence_length
    if shape.rope_scaling in ("llama3", "yarn"):
        length = max(length, round(shape.rope_original * shape.rope_factor))
    hf.save(
        state,
        shape,
        into,
        dtype,
        max_positions=length,
        eos=trained.tokenizer.eos,
        like=like,
        beside=trained.tokenizer.files(),
    )
