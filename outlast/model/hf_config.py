"""A Hugging Face config.json of Llama, Qwen2 or Qwen3 as [model] knobs, and back.

What a configuration asks for and we do not compute in the same way is refused by name, never passed over.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from outlast.config import Model
from outlast.errors import WeightsError
from outlast.model import rotary

_Kind = TypeVar("_Kind", int, float, bool)
_ARCHITECTURES: Final = (("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
# Keys with the one value that we compute; absent and null mean that value too.
_ONLY: Final = (
    ("hidden_act", "silu"),
    ("use_sliding_window", False),
    ("partial_rotary_factor", 1.0),
    ("attention_dropout", 0.0),
    ("pretraining_tp", 1),
    ("is_causal", True),
    ("quantization_config", None),
    ("auto_map", None),
)
_ROPE_ONLY: Final = (("partial_rotary_factor", 1.0), ("truncate", True), ("mscale", None), ("mscale_all_dim", None))
_ROPE_KINDS: Final = (("default", "none"), ("linear", "linear"), ("llama3", "llama3"), ("yarn", "yarn"))
_ORIGINAL: Final = "original_max_position_embeddings"
_ROPE_KEYS: Final = (
    *("rope_type", "type", "rope_theta", "factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", *dict(_ROPE_ONLY)),
)
_REWRITTEN: Final = ("rope_parameters", "rope_theta", "rope_scaling", _ORIGINAL, "dtype", "torch_dtype")
_ADVICE: Final = "outlast would compute another function than the one these weights were trained for"


@dataclass(frozen=True)
class _Keys:
    """A JSON object with its place, read key by key."""

    content: dict[str, Any]
    where: str

    def get(self, key: str, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
        """A value of its kind; the default where it is absent or null, an error where there is none."""
        value = default if self.content.get(key) is None else self.content[key]
        if value is None:
            raise WeightsError(f"the model's configuration lacks {key}", where=self.where)
        if type(value) is not kind and not (kind is float and type(value) is int):
            wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
            raise WeightsError(f"{key} is {value!r}", fix=f"it must be {wanted}", where=self.where)
        return kind(value)

    def only(self, allowed: Iterable[tuple[str, Any]]) -> None:
        """Refuse other values than the ones we compute."""
        for key, one in allowed:
            found = self.content.get(key)
            if found is not None and found != one:
                shown = repr(found) if len(repr(found)) <= 60 else f"{repr(found)[:60]}..."
                instead = "that is not computed here" if one is None else f"only {one!r} is computed here"
                raise WeightsError(f"{key} is {shown}, and {instead}", fix=_ADVICE, where=self.where)


def read_json(path: Path) -> dict[str, Any]:
    """Read a foreign JSON object.

    Raises:
        WeightsError: it is not there or is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        what = f"it holds a {type(content).__name__}, not an object"
    except (OSError, ValueError) as error:
        content, what = None, str(error)
    if not isinstance(content, dict):
        raise WeightsError(f"cannot read {path.name}: {what}", fix="download or copy it again", where=str(path))
    return content


def read_shape(folder: Path) -> dict[str, Any]:
    """Read the [model] knobs a directory fixes, both from transformers 5 and from before.

    Args:
        folder: with a config.json of a Llama, Qwen2 or Qwen3.

    Returns:
        Values by dotted key, as :func:`outlast.config.replaced` takes them. What a directory does not fix (`init_std`,
        `dropout`, and rope knobs that its kind of scaling does not use) is left out.

    Raises:
        WeightsError: there is no configuration, it is damaged, or it asks for what is not computed here.

    Not covered: whether the knobs fit each other, which :func:`outlast.settings.check` says.
    """
    path = folder / "config.json"
    if not path.exists():
        what = f"{folder} has no config.json" if folder.is_dir() else f"there is no model directory {folder}"
        fix = "name a folder that holds config.json and safetensors, as transformers' save_pretrained writes it"
        raise WeightsError(what, fix=fix, key="model.weights")
    keys = _Keys(read_json(path), str(path))
    family, known = keys.content.get("model_type"), [name for name, _ in _ARCHITECTURES]
    if family not in known:
        what = f"model_type {family!r} is not a family outlast computes"
        raise WeightsError(what, fix=f"known: {', '.join(known)}", where=str(path))
    keys.only(_ONLY)
    kinds = keys.content.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            what = f"layer_types has {kind!r}, and only 'full_attention' is computed here"
            raise WeightsError(what, fix=_ADVICE, where=str(path))
    width, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    biases = keys.get("attention_bias", bool, False)
    shape = {
        "vocab_size": keys.get("vocab_size", int),
        "hidden_size": width,
        "intermediate_size": keys.get("intermediate_size", int),
        "num_layers": keys.get("num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", int, heads if family == "llama" else None),
        "head_dim": keys.get("head_dim", int, 128 if family == "qwen3" else width // max(heads, 1)),
        "tie_embeddings": keys.get("tie_word_embeddings", bool, False),
        "qk_norm": family == "qwen3",
        "qkv_bias": biases or family == "qwen2",
        "out_bias": biases and family != "qwen2",
        "mlp_bias": family == "llama" and keys.get("mlp_bias", bool, False),
        "norm_eps": keys.get("rms_norm_eps", float, 1e-6),
    }
    return {f"model.{name}": value for name, value in (shape | _read_rope(keys)).items()}


def _read_rope(keys: _Keys) -> dict[str, Any]:
    """The rope knobs, from `rope_parameters` or from the older `rope_scaling` beside `rope_theta`."""
    section = "rope_scaling" if keys.content.get("rope_scaling") else "rope_parameters"
    content = keys.content.get(section) or {}
    if not isinstance(content, dict):
        raise WeightsError(f"{section} is {content!r}", fix="it must be an object", where=keys.where)
    rope = _Keys(content, f"{keys.where} {section}")
    rope.only(_ROPE_ONLY)
    for key in content:
        if key not in _ROPE_KEYS:
            raise WeightsError(f"{section} has {key}, which is not computed here", fix=_ADVICE, where=keys.where)
    kind = content.get("rope_type", content.get("type", "default"))
    kinds = [theirs for theirs, _ in _ROPE_KINDS]
    if kind not in kinds:
        what = f"rope_type {kind!r} is not computed here"
        raise WeightsError(what, fix=f"known: {', '.join(kinds)}", where=rope.where)
    theta = rope.get("rope_theta", float, keys.get("rope_theta", float, 10000.0))
    return {"rope_theta": theta, "rope_scaling": dict(_ROPE_KINDS)[kind]} | _read_stretch(kind, rope, keys)


def _read_stretch(kind: str, rope: _Keys, keys: _Keys) -> dict[str, Any]:
    """The knobs of one kind of scaling, with what transformers takes where a key is left out."""
    if kind == "default":  # nothing is stretched, but this is what a stretch would start from
        longest = keys.content.get("max_position_embeddings")
        return {"rope_original": longest} if type(longest) is int else {}
    factor = {"rope_factor": rope.get("factor", float)}
    if kind == "linear":
        return factor
    beside = keys if keys.content.get(_ORIGINAL) is not None else rope
    implied = keys.content.get("max_position_embeddings")
    original = {"rope_original": beside.get(_ORIGINAL, int, implied if type(implied) is int else None)}
    if kind == "llama3":
        low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
        if low >= high:
            what = f"low_freq_factor {low} is not below high_freq_factor {high}"
            raise WeightsError(what, fix="set them as they were published", where=rope.where)
        return factor | original | {"rope_low": low, "rope_high": high}
    attention = rope.get("attention_factor", float, 0.0)
    if not attention and rope.content.get("attention_factor") is not None:
        raise WeightsError("attention_factor is 0", fix="leave it out, or set it as published", where=rope.where)
    # A zero among the next two means the default.
    low, high = rope.get("beta_slow", float, 1.0) or 1.0, rope.get("beta_fast", float, 32.0) or 32.0
    return factor | original | {"rope_low": low, "rope_high": high, "rope_attention": attention}


def written(
    shape: Model, dtype: torch.dtype, max_positions: int, eos: int | None, before: dict[str, Any]
) -> dict[str, Any]:
    """The configuration of a shape, as every transformers of the last years reads it.

    Args:
        shape: the [model] knobs.
        dtype: of most weights.
        max_positions: longest context in tokens; an earlier configuration's longer one stays.
        eos: end-of-document token, if there is one.
        before: the configuration the weights came with, or empty. What outlast has no knob for is kept, and a
            configuration in the form of transformers 5 stays so; the older form, which both read, is the default.

    Raises:
        WeightsError: no published family computes this shape.
    """
    kind = _needed_family(shape)
    named = str(dtype).removeprefix("torch.")
    rope = _written_rope(shape)
    if "rope_parameters" in before:
        form = {"dtype": named, "rope_parameters": rope | {"rope_theta": shape.rope_theta}}
    else:
        stretched = None if shape.rope_scaling == "none" else rope
        form = {"torch_dtype": named, "rope_theta": shape.rope_theta, "rope_scaling": stretched}
    biases = {"attention_bias": shape.out_bias} if kind != "qwen2" else {}
    biases |= {"mlp_bias": shape.mlp_bias} if kind == "llama" else {}
    kept = {
        "bos_token_id": None,
        "pad_token_id": None,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    kept |= {key: value for key, value in before.items() if key not in _REWRITTEN}
    own = {
        "architectures": [dict(_ARCHITECTURES)[kind]],
        "model_type": kind,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tie_embeddings,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": max(max_positions, before.get("max_position_embeddings") or 0),
        "eos_token_id": with_eos(before.get("eos_token_id"), eos),
    }
    return kept | own | form | biases


def with_eos(before: Any, eos: int | None) -> Any:
    """The end tokens, one or a list, once `eos` is among them."""
    return before if eos is None or before == eos or (isinstance(before, list) and eos in before) else eos


def family(shape: Model) -> str | None:
    """The one family that computes a shape: llama, qwen2 or qwen3; None where none does."""
    same = shape.qkv_bias == shape.out_bias
    if same and not shape.qk_norm and shape.hidden_size % shape.num_heads == 0:
        return "llama"
    if shape.qkv_bias and not (shape.out_bias or shape.qk_norm or shape.mlp_bias):
        return "qwen2"
    return "qwen3" if same and shape.qk_norm and not shape.mlp_bias else None


def _needed_family(shape: Model) -> str:
    if found := family(shape):
        return found
    knobs = ", ".join(f"{knob}={getattr(shape, knob)}" for knob in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias"))
    raise WeightsError(
        f"no family of Hugging Face directories has {knobs} with hidden_size {shape.hidden_size} and {shape.num_heads} heads",
        fix="llama: no qk_norm, qkv_bias as out_bias, hidden_size a multiple of the heads; qwen2: qkv_bias alone; "
        "qwen3: qk_norm, qkv_bias as out_bias, no mlp_bias",
    )


def _written_rope(shape: Model) -> dict[str, Any]:
    """The kind of scaling and what it needs, nothing implied."""
    original = {"factor": shape.rope_factor, _ORIGINAL: shape.rope_original}
    match shape.rope_scaling:
        case "none":
            return {"rope_type": "default"}
        case "linear":
            return {"rope_type": "linear", "factor": shape.rope_factor}
        case "llama3":
            bounds = {"low_freq_factor": shape.rope_low, "high_freq_factor": rotary.high(shape)}
            return {"rope_type": "llama3", **original, **bounds}
        case "yarn":
            bounds = {"beta_slow": shape.rope_low, "beta_fast": rotary.high(shape)}
            factor = {"attention_factor": shape.rope_attention} if shape.rope_attention else {}
            return {"rope_type": "yarn", **original, **bounds, **factor}
