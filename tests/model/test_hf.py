"""Hugging Face directories: the same function as transformers computes, the same bytes back, and clear refusals."""

import json
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_reference import (
    FAMILIES,
    LINEAR,
    LLAMA3,
    YARN,
    YARN_SET,
    apart,
    batch,
    exact,
    opened,
    packed,
    reference,
    saved,
    shape_of,
)
from outlast.config import Model
from outlast.errors import StorageError, UsageError, WeightsError
from outlast.model import hf
from outlast.model.transformer import Transformer

CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": YARN, "head_dim": None}),
    ("llama-biases", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    ("llama-biases", {"tie_word_embeddings": True}),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN_SET}),
    ("qwen2", {"rope_parameters": LINEAR, "num_attention_heads": 5, "num_key_value_heads": 1}),
    ("qwen3", {"rope_parameters": LLAMA3}),
    ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ("qwen3-biases", {"rope_parameters": LINEAR}),
]


def theirs_at(model, *pieces):
    """Logits and summed loss of transformers, each document run alone. The loss is not its own: that is float32."""
    logits = [model(tokens, use_cache=False).logits for tokens, _ in pieces]
    losses = [
        F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        for out, (_, targets) in zip(logits, pieces, strict=True)
    ]
    return torch.cat(logits, dim=1), sum(losses)


def largest_difference(ours, theirs, lengths):
    tokens, targets = batch(sum(lengths))
    logits, loss = theirs_at(theirs, *zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True))
    loss.backward()
    our_loss = ours(tokens, targets, packed(*lengths))
    our_loss.backward()
    seen = {"loss": apart(our_loss, loss), "logits": apart(ours.logits(tokens, packed(*lengths)), logits)}
    gradients = {name.removeprefix("model."): parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert gradients[name].norm() > 0 or name.endswith("k_proj.bias")
        seen[name] = apart(parameter.grad, gradients[name])
    return seen


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("lengths", [(40,), (13, 27)], ids=["one", "two documents"])
def test_it_computes_what_transformers_computes(family, changes, lengths, tmp_path):
    theirs = reference(family, changes)
    ours = opened(saved(theirs, tmp_path))
    assert torch.equal(ours.frequencies, theirs.model.rotary_emb.inv_freq.float())
    seen = largest_difference(ours, theirs, lengths)
    worst = max(seen, key=seen.get)
    print(f"{family} {changes}: largest relative difference {seen[worst]:.1e} at {worst}")
    assert seen[worst] <= 1e-9


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


def tensors(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def written(ours, folder, dtype, **how):
    hf.save(dict(ours.named_parameters()), ours.shape, folder, dtype, **{"max_positions": 64} | how)
    return folder


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [None, 9000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_directory_comes_back_byte_for_byte(family, tie, size, dtype, tmp_path):
    theirs = reference(family, {"tie_word_embeddings": tie, "rope_parameters": LLAMA3}, dtype)
    there = saved(theirs, tmp_path / "there", **({"max_shard_size": size} if size else {}))
    ours = opened(there, torch.float32)
    assert next(ours.parameters()).dtype == torch.float32
    assert hf.tensor_dtype(there) == dtype
    back = written(ours, tmp_path / "back", dtype, like=there)
    assert (len(files(back)) > 1) == bool(size)
    assert files(back) == files(there)
    generation = "generation_config.json"
    assert json.loads((back / generation).read_text()) == json.loads((there / generation).read_text())
    assert json.loads((back / "config.json").read_text()) == json.loads((there / "config.json").read_text()) | (
        {"head_dim": 10}
    )
    fresh = written(ours, tmp_path / "fresh", dtype, **({"shard_bytes": size} if size else {}))
    same(tensors(fresh), tensors(there))
    assert max(map(len, files(fresh).values())) < (size or 10**9) + 4000
    assert len(files(fresh)) <= len(files(there)) + 1
    if not size:
        assert files(fresh) == files(there)
    tokens, _ = batch(20)
    loaded = [AutoModelForCausalLM.from_pretrained(folder) for folder in (there, back, fresh)]
    assert all(again.dtype == dtype for again in loaded)
    logits = [again(tokens).logits for again in loaded]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_ours_is_the_same_function_in_transformers(family, tmp_path):
    shape = shape_of(saved(reference(family, {"rope_parameters": YARN_SET}), tmp_path / "there"))
    ours = Transformer.on(torch.device("cpu"), shape, torch.float64, 3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    written(ours, tmp_path / "ours", torch.float64, eos=9)
    theirs = exact(AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="sdpa"))
    assert theirs.dtype == torch.float64
    tokens, _ = batch(20)
    assert apart(ours.logits(tokens, packed(20)), theirs(tokens).logits) <= 1e-9
    assert (theirs.config.eos_token_id, theirs.generation_config.eos_token_id) == (9, 9)
    assert theirs.config.bos_token_id is None
    assert theirs.config.max_position_embeddings == 64


def test_what_a_directory_says_beyond_the_shape_is_kept(tmp_path):
    theirs = reference("llama", {"eos_token_id": [4, 5], "bos_token_id": 3}, torch.float32)
    there = saved(theirs, tmp_path / "there")
    ours = opened(there, torch.float32)
    for eos, kept in ((None, [4, 5]), (5, [4, 5]), (6, 6)):
        back = written(ours, tmp_path / f"back-{eos}", torch.float32, like=there, eos=eos, max_positions=4096)
        for name in ("config.json", "generation_config.json"):
            about = json.loads((back / name).read_text())
            assert (about["eos_token_id"], about["bos_token_id"]) == (kept, 3)
        assert json.loads((back / "config.json").read_text())["max_position_embeddings"] == 4096
    (there / "generation_config.json").unlink()
    assert not (written(ours, tmp_path / "none", torch.float32, like=there) / "generation_config.json").exists()


def rewritten(folder, change, metadata=None):
    """Change a directory's only weight file with the library's own writer."""
    path = folder / "model.safetensors"
    content = load_file(path)
    change(content)
    save_file(content, path, metadata or {"format": "pt"})
    return folder


def test_types_order_and_notes_of_the_files_are_kept(tmp_path):
    there = saved(reference("qwen3", dtype=torch.bfloat16), tmp_path / "there")

    def mixed(content):
        content |= {name: tensor.float() for name, tensor in content.items() if "norm" in name}

    rewritten(there, mixed)
    assert hf.tensor_dtype(there) == torch.bfloat16
    ours = opened(there, torch.float32)
    assert files(written(ours, tmp_path / "back", torch.bfloat16, like=there)) == files(there)
    finer = tensors(written(ours, tmp_path / "finer", torch.float32, like=there))
    assert {tensor.dtype for tensor in finer.values()} == {torch.float32}

    # A file of another writer: tensors in another order, a note of its own.
    path, content = there / "model.safetensors", tensors(there)
    header, data = {"__metadata__": {"made": "elsewhere"}}, b""
    for name in sorted(content, key=lambda name: name[::-1]):
        raw = content[name].view(torch.uint8).numpy().tobytes()
        about = {"dtype": "F32" if "norm" in name else "BF16", "shape": list(content[name].shape)}
        header[name] = about | {"data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    ours = opened(there, torch.float32)
    assert files(written(ours, tmp_path / "other", torch.bfloat16, like=there)) == files(there)


def test_tensors_without_a_place_of_their_own(tmp_path):
    """Old rotary frequencies are passed over, a second copy of tied weights must be the same."""
    there = saved(reference("llama", {"tie_word_embeddings": True}, torch.float32), tmp_path / "there")
    plain = files(there)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewritten(there, lambda content: content.update({frequencies: torch.ones(5)}))
    assert files(written(opened(there), tmp_path / "a", torch.float32, like=there)) == plain
    twice = {"lm_head.weight": tensors(there)["model.embed_tokens.weight"].clone()}
    rewritten(there, lambda content: (content.pop(frequencies), content.update(twice)))
    assert files(written(opened(there), tmp_path / "b", torch.float32, like=there)) == files(there)
    rewritten(there, lambda content: content["lm_head.weight"].add_(1))
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from the embedding, and tie_word_embeddings"):
        opened(there)


def test_another_shape_than_the_directory_it_came_from_gets_files_of_its_own(tmp_path):
    there = saved(reference("llama", {"tie_word_embeddings": True}, torch.float32), tmp_path / "there")
    ours = Transformer.on(torch.device("cpu"), opened(there).shape, torch.float32, 0)
    untied = Transformer(Model(**vars(ours.shape) | {"tie_embeddings": False}))
    back = written(untied, tmp_path / "back", torch.float32, like=there)
    assert not opened(back).shape.tie_embeddings


def test_a_model_is_loaded_a_tensor_at_a_time(tmp_path, monkeypatch):
    there = saved(reference("llama", dtype=torch.bfloat16), tmp_path, max_shard_size=9000)
    ours = Transformer(shape_of(there), torch.bfloat16)
    alive, most = [], 0

    class Watched:
        def __init__(self, *args, **how):
            self.file = safe_open(*args, **how)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def get_tensor(self, name):
            nonlocal most
            alive.append(name)
            most = max(most, len(alive))
            tensor = self.file.get_tensor(name)
            weakref.finalize(tensor, alive.remove, name)
            return tensor

    monkeypatch.setattr(hf, "safe_open", Watched)
    hf.load(ours, there)
    assert most <= 2  # the loop's name still holds one while the next is read
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())


# Refusals of weights


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def sharded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(folder)
    saved(model, folder, max_shard_size=9000)


def index(folder, change):
    sharded(folder)
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: rewritten(f, lambda c: c.pop(NORM)), "model.norm.weight is missing from the weights"),
        (lambda f: rewritten(f, lambda c: [c.pop(name) for name in list(c)[:3]]), r"\(and 2 more\) is missing from the"),
        (lambda f: rewritten(f, lambda c: c.update(score=torch.ones(2))), "score is in the weights, and the model has no such"),
        (lambda f: rewritten(f, lambda c: c.update({NORM: torch.ones(25)})), r"model.norm.weight is \(25,\) in the weights, and \(24,\) in the model"),
        (lambda f: rewritten(f, lambda c: c.update({NORM: torch.ones(24, dtype=torch.int8)})), "model.norm.weight is stored as I8\n  known: F64, F32, F16, BF16"),
        (cut, "model.safetensors is damaged: it ends before the end of model.layers.1.self_attn.v_proj.weight\n  download"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x99" * 40), "model.safetensors is damaged: it ends in its header"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "model.safetensors is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{]"), "model.safetensors is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "there are no weights: neither model.safetensors nor"),
        (pickled, "pytorch_model.bin is a pickle.*outlast reads safetensors alone.*save_pretrained"),
        (lambda f: (sharded(f), sorted(f.glob("model-*"))[1].unlink()), "model-00002-of-.*.safetensors is missing"),
        (lambda f: index(f, lambda m: m.update({NORM: "../x.safetensors"})), r"names '../x.safetensors', not a safetensors file beside"),
        (lambda f: index(f, lambda m: m.update({NORM: 7})), "names 7, not a safetensors file"),
        (lambda f: index(f, lambda m: m.update({NORM: m["model.embed_tokens.weight"]})), "lacks model.norm.weight, which model.safetensors.index.json promises"),
        (lambda f: index(f, dict.clear), "model.safetensors.index.json has no weight_map"),
        (lambda f: (sharded(f), (f / "model.safetensors.index.json").write_text("{")), "cannot read model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(harm, message, tmp_path):
    there = saved(reference("llama", dtype=torch.float32), tmp_path)
    ours = Transformer.on(torch.device("cpu"), shape_of(there), torch.float32, 0)
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    harm(there)
    with pytest.raises(WeightsError, match=f"(?s){message}") as caught:
        hf.load(ours, there)
    assert str(there) in caught.value.where
    same(dict(ours.named_parameters()), before)


def test_a_header_that_lies_is_told_with_the_file_and_the_tensor(tmp_path):
    there = saved(reference("llama", dtype=torch.float32), tmp_path)
    path = there / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'{"__metadata__":{"format":"pt"}', b'{"__metadata__":{"format":"pt"', 1))
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        opened(there)
    # Offsets of two tensors that overlap: only the library's own check sees it.
    path.write_bytes(content.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged at its header: "):
        opened(there)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"qk_norm": True, "mlp_bias": True}, "no family.*qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=True"),
        ({"qkv_bias": True, "mlp_bias": True}, "no family.*qkv_bias=True"),
        ({"out_bias": True}, "no family.*out_bias=True"),
        ({"qk_norm": True, "qkv_bias": True}, "no family"),
        ({"num_heads": 3, "num_kv_heads": 1}, "with hidden_size 16 and 3 heads"),
    ],
)
def test_a_shape_no_family_has_is_refused_before_anything_is_written(knobs, message, tmp_path):
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_layers": 1, "head_dim": 4}
    ours = Transformer(Model(**sizes | knobs))
    with pytest.raises(WeightsError, match=message):
        written(ours, tmp_path / "out", torch.float32)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    ours = opened(saved(reference("llama"), tmp_path / "there"))
    with pytest.raises(UsageError, match="there is not empty\n  name a new folder"):
        written(ours, tmp_path / "there", torch.float32)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file is a file"):
        written(ours, tmp_path / "file", torch.float32)
    (tmp_path / "empty").mkdir()
    opened(written(ours, tmp_path / "empty", torch.float32))
    opened(written(ours, tmp_path / "deep" / "down", torch.float32))
    assert {path.name for path in tmp_path.iterdir()} == {"there", "file", "empty", "deep"}


def test_a_full_disk_leaves_nothing_behind(small_disk):
    ours = Transformer(Model(vocab_size=9000, hidden_size=128, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8))
    with pytest.raises(StorageError, match="cannot write the model directory: No space left"):
        written(ours, small_disk / "out", torch.float32)
    assert not list(small_disk.iterdir())
