"""What makes a run this run: compared with the folder's at every start, and between ranks."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from outlast import config, records
from outlast.checkpoint.store import Saved
from outlast.config import Run
from outlast.errors import ResumeError

_OF_EACH_HOST: Final = (
    *("folder", "data.sources", "data.tokenizer", "data.cache", "model.weights"),  # known by content, or looked into
    *("train.threads", "train.device", "log.tensorboard", "log.wandb"),
)
"""Knobs that may differ from rank to rank: neither what is computed nor when ranks meet hangs on them."""


def facts(run: Run, identity: dict[str, Any]) -> dict[str, Any]:
    """What all ranks must go by alike."""
    return {
        knob.key: config.value(run, knob.key) for knob in config.knobs() if knob.key not in _OF_EACH_HOST
    } | identity


def identity_hash(identity: dict[str, Any]) -> str:
    """The run's identity, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def compare(run: Run, identity: dict[str, Any], saved: Saved | None) -> dict[str, list[Any]]:
    """What differs between the run in the folder and this one, old and new by name.

    Raises:
        ResumeError: something does that may not, or was not allowed to.
    """
    folder = Path(run.folder)
    path = folder / "identity.json"
    if not (path.exists() or saved):
        return {}
    before = records.read_json(path, "identity", 1).get("knobs") if path.exists() else saved and saved.about["identity"]
    if not isinstance(before, dict):
        raise ResumeError(
            "the run's identity is damaged", fix="remove the file: the checkpoints have it too", where=str(path)
        )
    # A knob that there was not when the run was begun does by default what was done then.
    defaults = {knob.key: knob.default for knob in config.knobs() if knob.result}
    before, now = (json.loads(json.dumps(told)) for told in (defaults | before, identity))
    changed = {key: [before.get(key), now.get(key)] for key in before | now if before.get(key) != now.get(key)}
    for key, (old, new) in changed.items():
        about_data = key.startswith("data.") or key in ("corpus", "tokenizer", "train.seed")
        # Of another shape, or with moments of another kind, it could not go on; what it began from is in the past.
        fixed = key.startswith("model.") or key in ("weights", "train.dtype", "optim.name")
        section = "data" if about_data else "train"
        if fixed or not getattr(run, section).allow_change:
            way_on = "" if fixed else f", or go on with the change: --{section}.allow-change"
            if key == "parallel.dp_compress" and old in ("onebit", "topk"):
                way_on += ", which lets go of what the copies have not sent yet"
            raise ResumeError(
                f"the run in {folder} was begun with {key} = {old!r}, and this command has {new!r}",
                fix=f"give this one another folder: --folder runs/NAME{way_on}",
                key={"corpus": "data.sources", "tokenizer": "data.tokenizer", "weights": "model.weights"}.get(key, key),
            )
    return changed
