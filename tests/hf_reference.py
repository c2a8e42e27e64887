"""Small models of transformers with random weights, the reference for ours, and their directories."""

import json

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from outlast import config
from outlast.config import Run
from outlast.model import hf
from outlast.model.transformer import Packing, Transformer

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
YARN_SET = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.9}
TINY = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 1024,
}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-biases": (Qwen3Config, {"attention_bias": True}),
}


def reference(family, changes=None, dtype=torch.float64):
    """A model of transformers with random weights: norms not 1, biases not 0."""
    kind, own = FAMILIES[family]
    keys = TINY | own | (changes or {})
    if "rope_parameters" in keys:
        keys["rope_parameters"] = {"rope_theta": 10000.0} | keys["rope_parameters"]
    model = AutoModelForCausalLM.from_config(kind(**keys), attn_implementation="sdpa").to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return exact(model)


def exact(model):
    """Take transformers' norms in the model's own type: they cast to float32 inside. Its sdpa attention does not."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
    return model.eval()


def saved(model, folder, **how):
    model.save_pretrained(folder, **how)
    return folder


def opened(folder, compute=torch.float64):
    """A directory as our model."""
    model = Transformer(shape_of(folder), compute)
    hf.load(model, folder)
    return model


def shape_of(folder):
    return config.replaced(Run(), hf.read_shape(folder)).model


def packed(*documents):
    """Where tokens stand when each sequence is these stretches."""
    positions = torch.cat([torch.arange(length) for length in documents])
    return Packing.of(torch.arange(2), positions.expand(2, -1).contiguous(), (tuple(documents),) * 2)


def batch(length):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(TINY["vocab_size"], (2, length), generator=generator)
    targets = torch.randint(TINY["vocab_size"], (2, length), generator=generator)
    targets[:, ::5] = -100
    return tokens, targets


def apart(mine, theirs):
    return ((mine - theirs).norm() / theirs.norm()).item()


def config_file(folder, **keys):
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in keys.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


OLD = TINY | {"model_type": "llama", "rope_theta": 20000}
