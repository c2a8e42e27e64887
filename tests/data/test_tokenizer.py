"""Tokenisers: ids worked out by hand, round trips, what ends a document, and what others read of what is saved."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outlast.config import Data
from outlast.data import tokenizer as module
from outlast.data.tokenizer import Tokenizer, open_tokenizer
from outlast.errors import DataError, StorageError

BYTES = open_tokenizer(Data(tokenizer="bytes"), "")
WORDS = "the cat sat on the mat; the dog did not. \u00e9t\u00e9 \U0001f600\n"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "a.txt").write_text(WORDS * 50)
    return open_tokenizer(
        Data(sources=(str(folder / "a.txt"),), tokenizer="bpe", bpe_vocab=280, cache=str(folder / "cache")), ""
    )


def given_file(folder, tokens=("<|endoftext|>",), special=True, config=None, **parts):
    """A tokenizer.json: the bytes, and more tokens behind the 257."""
    described = module._bytes() | parts
    described["added_tokens"] = described["added_tokens"][:0] + [
        {"id": 257 + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        for i, token in enumerate(tokens)
    ]  # fmt: skip
    del described["model"]["vocab"]["<eos>"]
    described["model"]["vocab"]["unused"] = 256
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(described, indent=2))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def opened(folder, **data):
    return open_tokenizer(replace(Data(tokenizer=str(folder)), **data), "")


# --- bytes


def test_bytes_by_hand():
    ids = BYTES.encode(["A\n<eos>é", "", "\x00\x7f"])
    assert [part.tolist() for part in ids] == [[65, 10, 60, 101, 111, 115, 62, 195, 169], [], [0, 127]]
    assert {part.dtype for part in ids} == {np.dtype("<u2")}
    assert (BYTES.name, BYTES.vocab_size, BYTES.eos, BYTES.eos_token, BYTES.prefix) == ("bytes", 257, 256, "<eos>", ())
    assert BYTES.decode([72, 105, 256]) == "Hi<eos>"
    assert BYTES.decode(np.array([0xE2, 0x82], dtype=np.uint16)) == "\ufffd"


@given(st.text())
def test_bytes_are_lossless_and_what_the_tokenizers_library_makes_of_them(text):
    ids = BYTES.encode([text])[0]
    assert ids.tolist() == list(text.encode()) == BYTES._inner.encode(text).ids
    assert BYTES.decode(ids) == text


def test_bytes_stay_the_same_from_release_to_release():
    # A run is refused to go on with another tokeniser, so this may only change with a good reason.
    assert BYTES.fingerprint == "8eac43628a827b1f08a3efa0f87e52e26a12a869514794a1423cb7607b7564c4"


# --- bpe


@given(st.text())
def test_bpe_is_lossless(bpe, text):
    assert bpe.decode(bpe.encode([text])[0]) == text


def test_bpe_merges_what_comes_most_often(tmp_path):
    # " ab" twice and "ab" once: (a, b) comes three times, (space, a) twice; then (space, ab) twice; then nothing.
    (tmp_path / "a.txt").write_text("ab ab ab")
    data = Data(sources=(str(tmp_path),), tokenizer="bpe", cache=str(tmp_path / ".cache"))
    small = open_tokenizer(replace(data, bpe_vocab=258), "")
    assert (small.vocab_size, small.eos) == (258, 257)
    assert [len(ids) for ids in small.encode(["ab", " ab", "ba", "<eos>"])] == [1, 2, 2, 5]
    larger = open_tokenizer(replace(data, bpe_vocab=1000), "")
    assert (larger.vocab_size, larger.eos) == (259, 258)
    assert [len(ids) for ids in larger.encode(["ab", " ab", "ab ab"])] == [1, 1, 2]


def test_bpe_has_as_many_tokens_as_asked_for(bpe):
    assert (bpe.vocab_size, bpe.eos, bpe.name) == (280, 279, "bpe")
    assert sorted(bpe._inner.get_vocab().values()) == list(range(280))
    assert len(bpe.encode([WORDS])[0]) < len(WORDS)


def test_bpe_is_the_same_in_every_process(tmp_path):
    code = (
        "import sys; from outlast.config import Data; from outlast.data.tokenizer import open_tokenizer; "
        "print(open_tokenizer(Data(sources=('stdlib',), tokenizer='bpe', bpe_vocab=600, cache=sys.argv[1]), '').fingerprint)"
    )
    code = "import outlast.data.tokenizer as t; t.TRAINING_TEXT = 1 << 20; " + code
    prints = set()
    for threads in ("1", "2", "3"):
        command = [sys.executable, "-c", code, str(tmp_path / threads)]
        done = subprocess.run(
            command, env=os.environ | {"RAYON_NUM_THREADS": threads}, capture_output=True, text=True, check=True
        )
        prints.add(done.stdout)
    assert len(prints) == 1


def test_bpe_is_trained_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(WORDS)
    data = Data(sources=(str(tmp_path / "a.txt"),), tokenizer="bpe", bpe_vocab=280, cache=str(tmp_path / "cache"))
    first = open_tokenizer(data, "")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_texts", lambda *_: pytest.fail("trained again"))
        assert open_tokenizer(data, "").fingerprint == first.fingerprint
    (tmp_path / "a.txt").write_text(WORDS + "more more more")
    assert open_tokenizer(data, "").fingerprint != first.fingerprint


def test_bpe_takes_a_part_of_each_source_and_no_markup(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_TEXT", 8)
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 100)
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\nbad\n{"text": "unread"}')
    listings = [module.sources.listing(str(tmp_path / name)) for name in ("a.txt", "b.txt", "c.jsonl")]
    assert "".join(module._texts(listings, "text")) == "a" * 100 + "b" * 100 + "user\nhi"


def test_bpe_of_too_few_tokens(tmp_path):
    with pytest.raises(DataError) as caught:
        open_tokenizer(Data(tokenizer="bpe", bpe_vocab=256, cache=str(tmp_path)), "")
    assert str(caught.value) == "data.bpe_vocab is 256\n  it must be at least 257: the bytes and the end token"


def test_bpe_that_cannot_be_kept(tmp_path):
    (tmp_path / "file").write_text(WORDS)
    with pytest.raises(StorageError, match="cannot write bpe-"):
        open_tokenizer(
            Data(sources=(str(tmp_path / "file"),), tokenizer="bpe", bpe_vocab=257, cache=str(tmp_path / "file")), ""
        )


# --- what others read


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_saved_and_read_by_transformers_and_by_us(name, bpe, tmp_path):
    tokenizer = {"bytes": BYTES, "bpe": bpe}[name]
    tokenizer.save(tmp_path / "saved")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    texts = [WORDS, "  two  spaces\t\n\n", "naïve 你好 \U0001f468\u200d\U0001f469", ""]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert theirs.encode(text) == ids.tolist()
        assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == ("<eos>", tokenizer.eos, tokenizer.vocab_size)
    ours = opened(tmp_path / "saved")
    assert (ours.fingerprint, ours.eos, ours._plain) == (tokenizer.fingerprint, tokenizer.eos, name == "bytes")


def test_a_given_one_is_saved_with_what_was_beside_it(tmp_path):
    given_file(tmp_path / "a", ("</s>", "<|im_end|>"), config={"chat_template": "x", "eos_token": "</s>"})
    opened(tmp_path / "a", eos="<|im_end|>").save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text()) == {
        "chat_template": "x",
        "eos_token": "<|im_end|>",
    }
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (tmp_path / "a" / "tokenizer.json").read_bytes()
    assert opened(tmp_path / "b").eos == 258


# --- a given tokenizer.json


def test_spacing_and_sorting_do_not_change_the_fingerprint(tmp_path):
    one = given_file(tmp_path / "one")
    other = given_file(tmp_path / "other") / "tokenizer.json"
    other.write_text(json.dumps(json.loads(other.read_text()), sort_keys=True))
    third = given_file(tmp_path / "third", ("</s>",))
    assert opened(one).fingerprint == opened(other).fingerprint != opened(third).fingerprint


@pytest.mark.parametrize(
    ("tokens", "config", "wanted", "found"),
    [
        (("<|endoftext|>",), None, "", "<|endoftext|>"),
        (("<|im_end|>", "</s>"), None, "", "</s>"),
        (("<|eot_id|>", "<|end_of_text|>"), {"eos_token": "<|eot_id|>"}, "", "<|eot_id|>"),
        (("</s>", "<stop>"), {"eos_token": {"content": "<stop>", "lstrip": False}}, "", "<stop>"),
        (("</s>", "<stop>"), {"eos_token": "</s>"}, "<stop>", "<stop>"),
        (("</s>",), {"eos_token": None}, "", "</s>"),
    ],
)
def test_what_ends_a_document(tmp_path, tokens, config, wanted, found):
    tokenizer = opened(given_file(tmp_path, tokens, config=config), eos=wanted)
    assert tokenizer.eos_token == found
    assert tokenizer.eos == 257 + tokens.index(found)
    assert tokenizer.vocab_size == 257 + len(tokens)


def test_an_end_token_there_is_not(tmp_path):
    folder = given_file(tmp_path, ("<|endoftext|>", "<stop>"))
    with pytest.raises(DataError) as caught:
        opened(folder, eos="<|endofext|>")
    assert (
        str(caught.value)
        == "data.eos is '<|endofext|>', and the tokeniser has no such token\n  perhaps you meant <|endoftext|>"
    )
    assert caught.value.key == "data.eos"
    with pytest.raises(DataError, match=r"perhaps you meant <\|endoftext\|> or <stop>"):
        opened(folder, eos="zzz")


def test_an_end_token_that_cannot_be_told(tmp_path):
    with pytest.raises(
        DataError, match=r"cannot tell which token ends a document\n  set data.eos; the special tokens are <stop>"
    ):
        opened(given_file(tmp_path, ("<stop>",)))


@pytest.mark.parametrize("name", ["bytes", "bpe", "auto"])
def test_an_end_token_for_those_that_have_their_own(name, tmp_path):
    with pytest.raises(DataError, match=r"data.eos is '</s>', and the tokeniser (bytes|bpe) has <eos> alone"):
        open_tokenizer(Data(tokenizer=name, eos="</s>", cache=str(tmp_path)), "")
    assert open_tokenizer(Data(tokenizer="bytes", eos="<eos>"), "").eos == 256


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 1}', "\udcff"])
def test_what_is_no_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert re.match("this is no tokenizer.json: |cannot read the tokeniser: ", caught.value.what)
    assert "\n" not in caught.value.what
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize("config", ["{", "[]"])
def test_a_configuration_that_is_none(tmp_path, config):
    (given_file(tmp_path) / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match="cannot read the tokeniser: "):
        opened(tmp_path)


def test_a_tokenizer_that_is_not_there(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "mien")
    assert str(caught.value) == f"there is no tokeniser {tmp_path}/mien\n  perhaps you meant {tmp_path}/mine"
    with pytest.raises(DataError, match="perhaps you meant bytes"):
        opened("byte")


def test_auto_takes_the_one_beside_the_weights(tmp_path):
    assert open_tokenizer(Data(), str(given_file(tmp_path))).eos_token == "<|endoftext|>"
    assert open_tokenizer(Data(), "").name == "bytes"
    assert open_tokenizer(Data(tokenizer="bytes"), str(tmp_path)).name == "bytes"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        DataError, match=r"there is no tokeniser .*\n  set data.tokenizer to the tokenizer.json the weights"
    ):
        open_tokenizer(Data(), str(tmp_path))


def template(single, *tokens):
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in tokens}}  # fmt: skip


def sequence():
    return {"Sequence": {"id": "A", "type_id": 0}}


def word(token):
    return {"SpecialToken": {"id": token, "type_id": 0}}


def test_what_a_tokenizer_puts_before_a_text_is_kept_and_its_end_is_not_doubled(tmp_path):
    both = (("<s>", 257), ("</s>", 258))
    around = template([word("<s>"), sequence(), word("</s>")], *both)
    tokenizer = opened(given_file(tmp_path / "a", ("<s>", "</s>"), post_processor=around))
    assert tokenizer.prefix == (257,)
    assert tokenizer.encode(["a"])[0].tolist() == [97]
    after = template([sequence(), word("</s>")], *both)
    assert opened(given_file(tmp_path / "b", ("<s>", "</s>"), post_processor=after)).prefix == ()
    # OPT begins a text with the token that ends one: the end before it is enough.
    before = template([word("</s>"), sequence()], *both)
    assert opened(given_file(tmp_path / "c", ("<s>", "</s>"), post_processor=before)).prefix == ()


def test_a_tokenizers_own_truncation_and_padding_are_off(tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    tokenizer = opened(given_file(tmp_path, truncation=truncation, padding=padding))
    assert [len(ids) for ids in tokenizer.encode(["a", "abcdefghij"])] == [1, 10]


@pytest.mark.parametrize("special", [True, False])
def test_no_text_makes_a_special_token(tmp_path, special):
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = opened(given_file(tmp_path, tokens, special))
    for token in tokens:
        text = f"a{token}b"
        assert tokenizer.encode([text])[0].tolist() == list(text.encode())
    assert [tokenizer.special(token) for token in (*tokens, "<none>")] == [257, 258, 259, None]


def test_a_tokenizer_that_must_take_text_for_its_end_token_is_refused():
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    inner.add_special_tokens(["</s>"])
    with pytest.raises(DataError, match="a text that says </s> cannot be told from the end of a document"):
        Tokenizer("unigram", inner.to_str(), {})


def test_ids_take_four_bytes_where_two_do_not_hold_them(tmp_path):
    given_file(tmp_path, ("</s>",))
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["vocab"]["</s>"] = 257
    for count, dtype in ((65536, "<u2"), (65537, "<u4")):
        described["model"]["vocab"] |= {chr(0x20000 + i): i for i in range(258, count)}
        tokenizer = Tokenizer("many", json.dumps(described), {})
        assert (tokenizer.vocab_size, tokenizer.dtype) == (count, np.dtype(dtype))
        assert tokenizer.encode(["a"])[0].dtype == np.dtype(dtype)
