"""Hugging Face directories of Llama, Qwen2 and Qwen3: shape and weights in, a trained model out.

Weights move one tensor at a time, so that the whole model is never in memory twice. Files are safetensors: no pickle is
read, and none written. The configuration is :mod:`outlast.model.hf_config`'s.
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outlast import records
from outlast.config import Model
from outlast.errors import UsageError, WeightsError
from outlast.model.hf_config import family, read_json, read_shape, with_eos, written
from outlast.model.transformer import Transformer
from outlast.places import Place

__all__ = ["family", "fingerprint", "load", "read_shape", "save", "tensor_dtype"]

_DTYPES: Final = (("F64", torch.float64), ("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16))
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"
_AGAIN: Final = "download or copy it again"


@dataclass(frozen=True)
class _Shard:
    """A safetensors file by its header.

    Attributes:
        name: of the file.
        metadata: what its writer noted.
        tensors: type and shape by name, in the order of their bytes.
    """

    name: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _shards(folder: Path) -> list[_Shard]:
    """The headers of a directory's weight files."""
    if (folder / _SINGLE).exists():
        return [_shard(folder / _SINGLE)]
    if not (folder / _INDEX).exists():
        pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
        if pickles:
            what = f"{pickles[0]} is a pickle, which may run any code when it is read: outlast reads safetensors alone"
            fix = "where you trust it, load it with transformers and save_pretrained() it: that writes safetensors"
            raise WeightsError(what, fix=fix, where=str(folder))
        raise WeightsError(f"there are no weights: neither {_SINGLE} nor {_INDEX}", where=str(folder))
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightsError(f"{_INDEX} has no weight_map", fix=_AGAIN, where=str(folder))
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{_INDEX} names {name!r}, not a safetensors file beside it", where=str(folder))
    shards = [_shard(folder / name) for name in sorted(set(places.values()))]
    held = {(tensor, shard.name) for shard in shards for tensor in shard.tensors}
    for tensor, name in places.items():
        if (tensor, name) not in held:
            raise WeightsError(f"{name} lacks {tensor}, which {_INDEX} promises", fix=_AGAIN, where=str(folder))
    return shards


def _shard(path: Path) -> _Shard:
    """Read a file's header: its length in 8 bytes, then JSON.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - length
            if size < 0:
                raise ValueError("it ends in its header")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][1] > size:
                raise ValueError(f"it ends before the end of {name}")
            if entry["dtype"] not in dict(_DTYPES):
                fix = f"known: {', '.join(known for known, _ in _DTYPES)}"
                raise WeightsError(f"{name} is stored as {entry['dtype']}", fix=fix, where=str(path))
            tensors[name] = (dict(_DTYPES)[entry["dtype"]], tuple(entry["shape"]))
    except FileNotFoundError:
        raise WeightsError(f"{path.name} is missing", fix=_AGAIN, where=str(path.parent)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightsError(f"{path.name} is damaged: {error}", fix=_AGAIN, where=str(path)) from None
    return _Shard(path.name, metadata, tensors)


def tensor_dtype(folder: Path) -> torch.dtype:
    """The type a directory's weights are stored in; where there are several, that of most elements.

    Raises:
        WeightsError: there are no weights, or they cannot be read.
    """
    return _bulk_dtype(_shards(folder))


def fingerprint(folder: Path) -> str:
    """A hash of a directory's weights, wherever it lies: of each file's header, size, and the MiB in its middle.

    Raises:
        WeightsError: there are no weights, or they cannot be read.
    """
    known = hashlib.sha256()
    for shard in _shards(folder):
        path = folder / shard.name
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size // 2 - (1 << 19)))
            known.update(f"{shard.name} {size} {shard.tensors}".encode() + file.read(1 << 20))
    return known.hexdigest()


def _bulk_dtype(shards: list[_Shard]) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for shard in shards:
        for dtype, size in shard.tensors.values():
            elements[dtype] += math.prod(size)
    return max(elements, key=lambda dtype: elements[dtype], default=torch.float32)


def _published(name: str) -> str:
    """What a parameter is called in a directory."""
    return name if name == _HEAD else f"model.{name}"


@torch.no_grad()
def load(model: Transformer, folder: Path, parts: Iterable[tuple[str, Tensor, Place]] | None = None) -> None:
    """Copy a directory's weights into the model, a tensor at a time, each cast to the type its parameter is kept in.

    Args:
        model: of the shape :func:`read_shape` gave; on any device.
        folder: with model.safetensors, or with shards and their index.
        parts: name, memory and place of what is here of each parameter; None where all of it is.

    Raises:
        WeightsError: a tensor is missing, has no place in the model or is of another shape, in which case the model is
            as it was; or a file is damaged.
    """
    shards = _shards(folder)
    whole = ((name, p, Place.all_of(tuple(p.shape))) for name, p in model.named_parameters())
    targets = {_published(name): (part, place) for name, part, place in (whole if parts is None else parts)}
    if model.shape.tie_embeddings:
        targets[_HEAD] = targets[_EMBEDDING]
    _compare(shards, targets, model.shape, folder)
    filled: set[int] = set()
    for shard in shards:
        for name, tensor in _tensors(folder / shard.name, [name for name in shard.tensors if name in targets]):
            part, place = targets[name]
            tensor = tensor[place.slices]
            if id(part) not in filled:
                part.copy_(tensor)
            elif not torch.equal(part, tensor.to(part)):
                what = f"{_HEAD} differs from the embedding, and tie_word_embeddings says they are one"
                raise WeightsError(what, fix="set tie_word_embeddings to false in config.json", where=str(folder))
            filled.add(id(part))


def _compare(shards: list[_Shard], targets: Mapping[str, tuple[Tensor, Place]], shape: Model, folder: Path) -> None:
    """Refuse tensors that are missing, in excess or of another shape, the first of them by name."""
    stored = {name: size for shard in shards for name, (_, size) in shard.tensors.items()}
    optional = {_HEAD} if shape.tie_embeddings else set()
    missing = [name for name in targets if name not in stored and name not in optional]
    # Old directories keep the rotary frequencies too, which follow from the configuration.
    excess = [name for name in stored if name not in targets and not name.endswith(".rotary_emb.inv_freq")]
    fix = "config.json and the weights must be of one model, saved for causal language modelling"
    for names, what in ((missing, "missing from the weights"), (excess, "in the weights, and the model has no such")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise WeightsError(f"{names[0]}{more} is {what}", fix=fix, where=str(folder))
    for name, (_, place) in targets.items():
        if name in stored and stored[name] != place.whole:
            what = f"{name} is {stored[name]} in the weights, and {place.whole} in the model"
            raise WeightsError(what, fix=fix, where=str(folder))


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """A file's tensors, one after the other."""
    reading = "its header"
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for reading in names:
                yield reading, file.get_tensor(reading)
    except (SafetensorError, OSError) as error:
        what = f"{path.name} is damaged at {reading}: {error}"
        raise WeightsError(what, fix=_AGAIN, where=str(path)) from None


def save(
    state: Mapping[str, Tensor],
    shape: Model,
    folder: Path,
    dtype: torch.dtype,
    *,
    max_positions: int,
    eos: int | None = None,
    like: Path | None = None,
    beside: Mapping[str, str] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model as a directory that transformers and everything akin to it reads. It appears whole or not at all.

    Args:
        state: the model's parameters by name.
        shape: the [model] knobs.
        folder: where to; it may exist, but empty.
        dtype: the type to store weights in.
        max_positions: longest context, in tokens.
        eos: end-of-document token; None: not known.
        like: the directory the weights came from. Its files' division and its other configuration are kept, and tensors
            it stores in another type than most stay in it: weights loaded and saved again give the same bytes.
        beside: texts of further files by name, such as the tokeniser's.
        shard_bytes: largest file, unless `like` says where tensors go or one tensor is larger.

    Raises:
        UsageError: the folder is not empty.
        WeightsError: no family has this shape, or `like` cannot be read.
        StorageError: it could not be written; nothing is left of it.
    """
    before = read_json(like / "config.json") if like else {}
    content: dict[str, Any] = {"config.json": written(shape, dtype, max_positions, eos, before)}
    about = like / "generation_config.json" if like else None
    generation = read_json(about) if about and about.exists() else {}
    if generation or eos is not None:
        ends = with_eos(generation.get("eos_token_id"), eos)
        content["generation_config.json"] = generation | ({} if ends is None else {"eos_token_id": ends})
    tensors = {_published(name): tensor for name, tensor in state.items()}
    if shape.tie_embeddings:
        tensors.pop(_HEAD, None)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    shards = (_as_before(tensors, shape, like, dtype) if like else None) or _divided(tensors, dtype, shard_bytes)
    if shape.tie_embeddings:  # some directories store it twice
        tensors[_HEAD] = tensors[_EMBEDDING]
    if [shard.name for shard in shards] != [_SINGLE]:
        content[_INDEX] = _index(shards, parameters)
    texts = {name: json.dumps(about, indent=2, sort_keys=True) + "\n" for name, about in content.items()}
    _write(folder.absolute(), shards, tensors, texts | dict(beside or {}))


def _as_before(tensors: Mapping[str, Tensor], shape: Model, like: Path, dtype: torch.dtype) -> list[_Shard] | None:
    """The files of the directory the weights came from; None where they have no place for some tensor."""
    before = _shards(like)
    bulk, known = _bulk_dtype(before), {*tensors, *([_HEAD] if shape.tie_embeddings else [])}
    shards = [
        _Shard(
            shard.name,
            shard.metadata,
            {
                name: (dtype if theirs == bulk else theirs, tuple(tensors.get(name, tensors[_EMBEDDING]).shape))
                for name, (theirs, _) in shard.tensors.items()
                if name in known
            },
        )
        for shard in before
    ]
    placed = {name for shard in shards for name in shard.tensors}
    return [shard for shard in shards if shard.tensors] if placed >= tensors.keys() else None


def _divided(tensors: Mapping[str, Tensor], dtype: torch.dtype, most: int) -> list[_Shard]:
    """Files of at most so many bytes, filled in the model's order, each sorted by name as the library sorts."""
    parts: list[list[str]] = [[]]
    room = most
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if size > room and parts[-1]:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return [
        _Shard(name, {"format": "pt"}, {tensor: (dtype, tuple(tensors[tensor].shape)) for tensor in sorted(part)})
        for name, part in zip(names if len(parts) > 1 else [_SINGLE], parts, strict=True)
    ]


def _index(shards: list[_Shard], parameters: int) -> dict[str, Any]:
    """Which file holds which tensor."""
    held = [(name, shard.name, *stored) for shard in shards for name, stored in shard.tensors.items()]
    size = sum(dtype.itemsize * math.prod(shape) for _, _, dtype, shape in held)
    return {
        "metadata": {"total_parameters": parameters, "total_size": size},
        "weight_map": {name: file for name, file, _, _ in held},
    }


def _write(folder: Path, shards: list[_Shard], tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write everything to a hidden folder, make it durable, and give it its name."""
    half = folder.with_name(f".{folder.name}.{os.getpid()}.half")
    with records.storage_errors("cannot write the model directory", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = f"{folder} is not empty" if folder.is_dir() else f"{folder} is a file"
            raise UsageError(what, fix="name a new folder: nothing is written over")
        try:
            half.mkdir(parents=True)
            for shard in shards:
                _write_shard(half / shard.name, shard, tensors)
            for name, text in texts.items():
                (half / name).write_text(text, encoding="utf-8")
            for path in (*half.iterdir(), half):
                records.fsync(path)
            half.rename(folder)
            records.fsync(folder.parent)
        finally:
            shutil.rmtree(half, ignore_errors=True)


def _write_shard(path: Path, shard: _Shard, tensors: Mapping[str, Tensor]) -> None:
    """Write one file, cast tensor by tensor; the library's own writer wants all of a file's tensors in memory."""
    named = {dtype: name for name, dtype in _DTYPES}
    header: dict[str, Any] = {"__metadata__": shard.metadata} if shard.metadata else {}
    end = 0
    for name, (dtype, shape) in shard.tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": named[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, _) in shard.tensors.items():
            plain = tensors[name].detach().to("cpu", dtype).contiguous().flatten()
            file.write(plain.view(torch.uint8).numpy().data)
