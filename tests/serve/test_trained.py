"""What a run has come to: generated with a cache as without, exported as transformers reads it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from outlast import cli
from outlast.model.transformer import Packing
from outlast.serve import generate
from outlast.serve.trained import open_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert runs.train(folder, "--train.steps", "60", "--data.tokenizer", "bpe", "--data.bpe-vocab", "300") == 0
    return folder / "run"


def greedy(trained, prompt, count):
    """The likeliest tokens, each from a fresh pass over all before it."""
    ids = list(prompt)
    for _ in range(count):
        packing = Packing.of(torch.zeros(1, dtype=torch.int64), torch.arange(len(ids))[None], ((len(ids),),))
        with torch.no_grad():
            ids.append(int(trained.model.logits(torch.tensor([ids]), packing)[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_cache_changes_nothing(run):
    trained = open_trained(run)
    for prompt in ([5], [70, 71, 72], list(range(40, 60))):
        made = list(generate.tokens(trained.model, prompt, 20, 0.0, 1.0, 0, eos=-1))
        assert made == greedy(trained, prompt, 20)
    # and the model's own attention is back in its place
    assert trained.model.seams.attend.__name__ == "attend"


def test_drawing(run, capsys):
    trained = open_trained(run)
    drawn = [list(generate.tokens(trained.model, [5], 20, 1.0, 1.0, seed, eos=-1)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    # top_p so small that the likeliest alone is left
    assert list(generate.tokens(trained.model, [5], 20, 1.0, 1e-9, 3, eos=-1)) == greedy(trained, [5], 20)
    # an end token ends, and is not given out
    first = greedy(trained, [5], 3)
    assert list(generate.tokens(trained.model, [5], 20, 0.0, 1.0, 0, eos=first[2])) == first[: first.index(first[2])]
    assert cli.main(["generate", str(run), ""]) == 0  # an empty prompt begins a document
    assert cli.main(["generate", str(run), "alpha", "--top-p", "0"]) == 2
    assert "top-p above 0" in capsys.readouterr().err


def test_a_draw_follows_the_probabilities():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[generate._chosen(logits, 1.0, 0.9, generator)] += 1
    # The first three reach 0.9; the fourth is never drawn.
    assert counts[3] == 0
    expected = torch.tensor([0.5, 0.3, 0.15]) / 0.95
    assert (counts[:3] / 4000 - expected).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_exported_and_asked_by_transformers(run, tmp_path):
    assert cli.main(["export", str(run), str(tmp_path / "hf")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    trained = open_trained(run)
    text = "alpha beta gamma"
    ids = tokenizer(text)["input_ids"]
    assert ids == [int(i) for i in trained.tokenizer.encode([text])[0]]
    packing = Packing.of(torch.zeros(1, dtype=torch.int64), torch.arange(len(ids))[None], ((len(ids),),))
    with torch.no_grad():
        ours, theirs = trained.model.logits(torch.tensor([ids]), packing), model(torch.tensor([ids])).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == trained.tokenizer.eos
    assert tokenizer.eos_token_id == trained.tokenizer.eos


def test_nothing_is_exported_over_what_is_there(run, tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert cli.main(["export", str(run), str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "x"


def test_from_weights_to_weights(run, tmp_path, capsys):
    """Export, go on from the exported directory with its tokeniser, export again; shape and type come from there."""
    assert cli.main(["export", str(run), str(tmp_path / "hf")]) == 0
    words = [
        *runs.arguments(tmp_path, shape=()),
        "--model.weights",
        str(tmp_path / "hf"),
        "--train.steps",
        "3",
        "--eval.samples",
        "100",
    ]
    assert cli.main(words) == 0
    first, again = runs.journal(run), runs.journal(tmp_path / "run")
    last = [line["loss"] for line in first if line["event"] == "evaluation"][-1]
    begun = next(line["loss"] for line in again if line["event"] == "evaluation")
    assert begun == pytest.approx(last, rel=0.2)  # it begins where the other ended, not at ln 300 = 5.7
    assert begun < 4
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "hf2")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "hf2")("beta")["input_ids"]
    capsys.readouterr()

    assert cli.main([*words, "--folder", str(tmp_path / "b"), "--model.num-layers", "3"]) == 2
    assert "model.num_layers is 3, and the weights in" in capsys.readouterr().err
    assert cli.main([*words, "--folder", str(tmp_path / "c"), "--data.tokenizer", "bytes"]) == 2
    assert "the weights are for another tokeniser: theirs has" in capsys.readouterr().err
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert cli.main([*words, "--folder", str(tmp_path / "d")]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    # a stretched context is no other shape
    stretched = [
        "--data.tokenizer",
        "bytes",
        "--model.rope-scaling",
        "linear",
        "--model.rope-factor",
        "2.0",
        "--train.steps",
        "1",
    ]
    assert cli.main([*words, "--folder", str(tmp_path / "e"), *stretched]) == 0
