"""A config.json is read as transformers reads it, or refused by name; one of ours says the same to both."""

import json

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_reference import LINEAR, LLAMA3, OLD, TINY, YARN, YARN_SET, config_file, shape_of
from outlast import config
from outlast.errors import WeightsError
from outlast.model import hf, hf_config, rotary


@pytest.mark.parametrize(
    ("rope", "more"),
    [
        (LLAMA3 | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}, {}),
        (LLAMA3 | {"rope_theta": 5e5, "factor": 8, "original_max_position_embeddings": 8192}, {"head_dim": 64}),
        (YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32768}, {}),
        (YARN_SET | {"rope_theta": 1e6, "factor": 3}, {"head_dim": 96}),
        (YARN | {"rope_theta": 100.0, "original_max_position_embeddings": 10**6}, {}),  # no pair turns slowly
        (YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 5}, {}),  # none turns fast
        (LINEAR | {"rope_theta": 12345.0, "factor": 3}, {"head_dim": 80}),
        ({"rope_type": "default", "rope_theta": 1000000}, {"head_dim": 126}),
    ],
)
def test_rotary_angles_are_bit_for_bit_those_of_transformers(rope, more, tmp_path):
    theirs = LlamaConfig(**TINY | {"head_dim": 128} | more, rope_parameters=dict(rope))
    theirs.architectures = ["LlamaForCausalLM"]
    theirs.save_pretrained(tmp_path)
    shape = shape_of(tmp_path)
    embedding = LlamaRotaryEmbedding(theirs)
    frequencies, factor = rotary.frequencies(shape)
    assert torch.equal(frequencies, embedding.inv_freq)
    positions = torch.tensor([[0, 1, 2, 500, 100_000]])
    cos, sin = embedding(torch.zeros(1), positions)
    half = shape.head_dim // 2
    for mine, whole in zip(rotary.cos_sin(positions, frequencies, factor), (cos, sin), strict=True):
        assert torch.equal(mine[:, :, 0], whole[..., :half])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_scaling": None}, {"rope_type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": LLAMA3}, LLAMA3),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, YARN | {"original_max_position_embeddings": 1024}),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 512}, "original_max_position_embeddings": 256},
            YARN,
        ),
        ({"rope_scaling": YARN | {"beta_fast": 0, "beta_slow": None}}, YARN | {"beta_fast": 32.0, "beta_slow": 1}),
        ({"rope_scaling": YARN_SET | {"truncate": True, "partial_rotary_factor": 1.0}}, YARN_SET),
    ],
)
def test_both_forms_of_rope_are_read(old, new, tmp_path):
    before = hf.read_shape(config_file(tmp_path / "old", **OLD | old))
    now = config_file(tmp_path / "new", **OLD | {"rope_theta": ..., "rope_parameters": new | {"rope_theta": 20000.0}})
    assert before == hf.read_shape(now)
    assert before["model.rope_theta"] == 20000.0
    kinds = {knob.key: knob.type for knob in config.knobs()}
    assert all(type(value) is kinds[key] or isinstance(value, str) for key, value in before.items())


@pytest.mark.parametrize(
    ("keys", "knobs"),
    [
        ({"head_dim": ...}, {"head_dim": 6}),
        ({"head_dim": None}, {"head_dim": 6}),
        ({"model_type": "qwen2", "head_dim": ...}, {"head_dim": 6, "qkv_bias": True, "out_bias": False}),
        ({"model_type": "qwen3", "head_dim": ...}, {"head_dim": 128, "qk_norm": True, "qkv_bias": False}),
        ({"model_type": "qwen2", "attention_bias": True, "mlp_bias": True}, {"out_bias": False, "mlp_bias": False}),
        ({"model_type": "qwen3", "attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True, "mlp_bias": False, "qk_norm": False}),
        (
            {"mlp_bias": True, "tie_word_embeddings": True},
            {"mlp_bias": True, "tie_embeddings": True, "out_bias": False},
        ),
        ({"num_key_value_heads": ..., "rms_norm_eps": ...}, {"num_kv_heads": 4, "norm_eps": 1e-6}),
        ({"rope_theta": ...}, {"rope_theta": 10000.0}),
        (
            {"hidden_act": "silu", "attention_dropout": 0, "layer_types": ["full_attention"] * 2, "pretraining_tp": 1},
            {},
        ),
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(keys, knobs, tmp_path):
    shape = hf.read_shape(config_file(tmp_path, **OLD | keys))
    assert shape | {f"model.{name}": value for name, value in knobs.items()} == shape


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not a family.*known: llama, qwen2, qwen3"),
        ({"model_type": ...}, "model_type None is not a family"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' is computed here"),
        ({"use_sliding_window": True}, "use_sliding_window is True, and only False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": 3}, "layer_types has 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and only 1.0"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and only 0.0"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, and only 1"),
        ({"is_causal": False}, "is_causal is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}, and that is not"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map is .*, and that is not computed"),
        ({"vocab_size": ...}, "configuration lacks vocab_size"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "lacks num_key_value_heads"),
        ({"hidden_size": "24"}, "hidden_size is '24'\n  it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'\n  it must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1\n  it must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'\n  it must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not.*known: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling has short_factor, which is not"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not computed here"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters has full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale is 1.0"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 0.5}}, "mscale_all_dim is 0.5"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate is False, and only True"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor 1.0 is not below high_freq_factor 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": ...}, "lacks original_max_position"),
    ],
)  # fmt: skip
def test_what_is_not_computed_the_same_way_is_refused_by_name(keys, message, tmp_path):
    with pytest.raises(WeightsError, match=f"(?s){message}") as caught:
        hf.read_shape(config_file(tmp_path, **OLD | keys))
    assert caught.value.exit_code == 2
    assert "config.json" in caught.value.where


def test_a_folder_that_is_no_model_directory_is_one_clear_error(tmp_path):
    with pytest.raises(WeightsError, match=r"there is no model directory .*/nowhere\n  name a folder"):
        hf.read_shape(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        hf.read_shape(tmp_path)
    for text, what in (
        ("{", "Expecting property name"),
        ("[1]", "it holds a list"),
        ("\xff", "cannot read config.json"),
    ):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(WeightsError, match=what):
            hf.read_shape(tmp_path)


@pytest.mark.parametrize("rope", [None, LINEAR, LLAMA3, YARN, YARN_SET])
@pytest.mark.parametrize("form", ["old", "new"])
def test_the_configuration_written_is_the_shape_read(rope, form, tmp_path):
    theirs = Qwen2Config(**TINY, rope_parameters={"rope_theta": 123.0} | (rope or {"rope_type": "default"}))
    theirs.architectures = ["Qwen2ForCausalLM"]
    theirs.save_pretrained(tmp_path / "there")
    shape = shape_of(tmp_path / "there")
    before = json.loads((tmp_path / "there" / "config.json").read_text()) if form == "new" else {}
    mine = hf_config.written(shape, torch.float16, 1024, None, before)
    config_file(tmp_path / "back", **mine)
    assert shape_of(tmp_path / "back") == shape
    again = Qwen2Config.from_pretrained(tmp_path / "back")
    assert again.rope_parameters["rope_type"] == theirs.rope_parameters["rope_type"]
    embeddings = [LlamaRotaryEmbedding(one) for one in (theirs, again)]
    assert torch.equal(embeddings[0].inv_freq, embeddings[1].inv_freq)
    assert embeddings[0].attention_scaling == embeddings[1].attention_scaling
    assert again.dtype == torch.float16
    assert ("rope_parameters" in mine) == (form == "new")
