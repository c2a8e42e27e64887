"""The tokenised corpus: tokens, ends and masks by hand, what the fingerprint knows, and a cache that is whole or not there."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outlast.config import Data
from outlast.data import sources, tokens
from outlast.data.tokenizer import Tokenizer, _bytes, open_tokenizer
from outlast.data.tokens import prepare
from outlast.errors import DataError, StorageError

BYTES = open_tokenizer(Data(tokenizer="bytes"), "")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
)


def put(folder, **files):
    """A folder of files; `a_txt` is a.txt. Records are given as objects."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        content = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def knobs(tmp_path, *given_sources, **given_knobs):
    given_sources = tuple(map(str, given_sources or (tmp_path / "corpus",)))
    return replace(Data(sources=given_sources, cache=str(tmp_path / "cache"), held_out=0.0), **given_knobs)


def everything(corpus):
    """All of a corpus, as lists."""
    return [
        (stream.read(0, len(stream)).tolist(), stream.ends.tolist(), None if (m := stream.learn(0, len(stream))) is None else m.tolist())
        for group in corpus.groups
        for stream in (group.train, group.held_out)
    ]  # fmt: skip


def texts(stream):
    """The documents of a stream of bytes."""
    return [BYTES.decode(part[:-1]) for part in np.split(stream.read(0, len(stream)), stream.ends)[:-1]]


def left_in(cache):
    """What is in a cache but finished corpora."""
    return sorted(path.name for path in Path(cache).iterdir() if not (path / "manifest.json").exists())


# --- what is stored


def test_by_hand(tmp_path):
    put(tmp_path / "corpus", a_txt="hi", b_jsonl=[{"text": "é"}, {"text": ""}, {"text": "x"}], c_txt="", d_txt="y")
    corpus = prepare(knobs(tmp_path), BYTES)
    (group,) = corpus.groups
    stream = group.train
    assert everything(corpus)[0] == ([104, 105, 256, 195, 169, 256, 120, 256, 121, 256], [3, 6, 8, 10], None)
    assert (group.name, len(stream), stream.documents, len(group.held_out), group.held_out.documents) == (
        "corpus",
        10,
        4,
        0,
        0,
    )
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert [count for _, count in manifest["groups"][0]["train"]["files"]] == [1, 2, 1]
    assert [Path(stream.file_of(i)).name for i in range(4)] == ["a.txt", "b.jsonl", "b.jsonl", "d.txt"]
    assert (corpus.damaged, corpus.first_damaged, corpus.empty) == (0, [], 2)
    assert corpus.bytes == sum(path.stat().st_size for path in (tmp_path / "corpus").iterdir())
    assert stream.ends.dtype == np.int64
    assert stream.read(3, 3).tolist() == group.held_out.read(0, 0).tolist() == []


@pytest.mark.parametrize("shard", [1, 7, 1 << 28])
def test_what_is_learned_by_hand(tmp_path, shard):
    put(
        tmp_path / "corpus",
        a_txt="ab",
        b_jsonl=[{"prompt": "q", "completion": "r"}, {"text": "c"}],
        c_jsonl=[{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]}],
        d_txt="d",
    )
    (train, held_out) = everything(prepare(knobs(tmp_path), BYTES, shard=shard))
    start, end = "<|im_start|>", "<|im_end|>"
    expected = [("ab", 1), (None, 1), ("q", 0), ("r", 1), (None, 1), ("c", 1), (None, 1)]
    expected += [
        (f"{start}user\nu{end}\n{start}assistant\n", 0),
        (f"v{end}", 1),
        ("\n", 0),
        (None, 0),
        ("d", 1),
        (None, 1),
    ]
    assert train[0] == [token for text, _ in expected for token in ([256] if text is None else text.encode())]
    assert train[2] == [bool(learn) for text, learn in expected for _ in (text or "$")]
    assert held_out == ([], [], None)


def test_chat_markup_is_what_transformers_makes_of_the_template(tmp_path):
    described = _bytes()
    for i, token in enumerate(("<|im_start|>", "<|im_end|>"), start=257):
        described["added_tokens"].append(described["added_tokens"][0] | {"content": token, "id": i})
    tokenizer = Tokenizer("chat", json.dumps(described), {}, "<eos>")
    tokenizer.save(tmp_path / "tokenizer")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " 1+1?\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": " bye "},
    ]
    put(tmp_path / "corpus", a_jsonl=[{"messages": chat}])
    ids, _, learn = everything(prepare(knobs(tmp_path), tokenizer))[0]
    rendered = theirs.apply_chat_template(chat, chat_template=CHATML, tokenize=True, return_dict=False)
    assert ids == [*rendered, 256]
    assert ids.count(257) == ids.count(258) == 5
    assert [i for i, learned in zip(ids, learn, strict=True) if learned] == [*b"2", 258, *b" bye ", 258]


def test_special_tokens_written_in_a_text_are_text(tmp_path):
    described = _bytes()
    described["added_tokens"].append(described["added_tokens"][0] | {"content": "<|im_start|>", "id": 257})
    tokenizer = Tokenizer("chat", json.dumps(described), {}, "<eos>")
    said = "<eos><|im_start|>"
    put(tmp_path / "corpus", a_txt=said, b_jsonl=[{"messages": [{"role": said, "content": said}]}])
    ids, ends, _ = everything(prepare(knobs(tmp_path), tokenizer))[0]
    assert ids == [*said.encode(), 256, 257, *f"{said}\n{said}<|im_end|>\n".encode(), 256]
    assert ends == [len(said) + 1, len(ids)]


def test_what_the_tokenizer_puts_first_begins_each_document_and_only_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STRETCH", 4)
    described = _bytes()
    described["added_tokens"].append(described["added_tokens"][0] | {"content": "<s>", "id": 257})
    begin = {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": begin,
    }
    tokenizer = Tokenizer("begins", json.dumps(described), {})
    put(tmp_path / "corpus", a_txt="one\ntwo\nthree\n", b_jsonl=[{"prompt": "p", "completion": "c"}])
    ids, ends, learn = everything(prepare(knobs(tmp_path), tokenizer))[0]
    assert ids == [257, *b"one\ntwo\nthree\n", 256, 257, *b"pc", 256]
    assert ends == [16, 20]
    assert learn == [True] * 16 + [False, False, True, True]


@settings(max_examples=40)
@given(st.lists(st.text(st.sampled_from("ab\né"), min_size=1, max_size=30), min_size=1, max_size=6), st.integers(1, 9))
def test_streams_are_read_across_files_as_written(tmp_path_factory, documents, shard):
    tmp_path = tmp_path_factory.mktemp("t")
    put(tmp_path / "corpus", a_jsonl=[{"text": text} for text in documents])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "STRETCH", 5)
        stream = prepare(knobs(tmp_path), BYTES, shard=shard).groups[0].train
    whole = [token for text in documents for token in (*text.encode(), 256)]
    assert len(stream) == len(whole)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert stream.read(start, stop).tolist() == whole[start:stop]
    assert stream.ends.tolist() == np.cumsum([len(text.encode()) + 1 for text in documents]).tolist()
    assert texts(stream) == documents


# --- the fingerprint


def test_the_fingerprint_is_of_content_alone(tmp_path, monkeypatch):
    files = {"a_txt": "one\ntwo\n" * 50, "b_jsonl": [{"prompt": "p", "completion": "c"}, {"text": "x"}] * 20}
    data = knobs(tmp_path, put(tmp_path / "corpus", **files), held_out=0.3)
    first = prepare(data, BYTES).fingerprint
    moved = put(tmp_path / "elsewhere" / "deep", **files)
    os.utime(moved / "a.txt", ns=(5, 5))
    assert prepare(replace(data, sources=(str(moved),)), BYTES).fingerprint == first
    assert prepare(replace(data, cache=str(tmp_path / "small")), BYTES, shard=3).fingerprint == first
    monkeypatch.setattr(tokens, "usable_cores", lambda: 0)  # every stretch its own batch
    assert prepare(replace(data, cache=str(tmp_path / "one")), BYTES).fingerprint == first


def test_the_fingerprint_knows_tokens_ends_masks_order_and_groups(tmp_path):
    corpora = [
        dict(a_jsonl=[{"text": "ab"}, {"text": "c"}]),
        dict(a_jsonl=[{"text": "a"}, {"text": "bc"}]),
        dict(a_jsonl=[{"text": "c"}, {"text": "ab"}]),
        dict(a_jsonl=[{"text": "ab"}, {"text": "d"}]),
        dict(a_jsonl=[{"prompt": "a", "completion": "b"}, {"text": "c"}]),
        dict(a_jsonl=[{"prompt": "ab", "completion": ""}, {"text": "c"}]),
    ]
    prints = set()
    for i, files in enumerate(corpora):
        data = knobs(tmp_path, put(tmp_path / str(i), **files))
        prints.add(prepare(data, BYTES).fingerprint)
    one, two = put(tmp_path / "x", a_txt="ab"), put(tmp_path / "y", a_txt="c")
    prints.add(prepare(knobs(tmp_path, one, two, weights=(1.0, 2.0)), BYTES).fingerprint)
    assert len(prints) == len(corpora) + 1
    assert prepare(knobs(tmp_path, one, two), BYTES).fingerprint in prints  # the same documents as the first
    assert prepare(knobs(tmp_path, two, one, weights=(2.0, 1.0)), BYTES).fingerprint not in prints


# --- groups and splits


def test_sources_with_weights_are_groups(tmp_path):
    one, two = put(tmp_path / "one", a_txt="a", b_txt="b"), put(tmp_path / "two", c_txt="c")
    apart = prepare(knobs(tmp_path, one, two, weights=(0.5, 0.5)), BYTES)
    assert [(group.name, texts(group.train)) for group in apart.groups] == [(str(one), ["a", "b"]), (str(two), ["c"])]
    together = prepare(knobs(tmp_path, one, two), BYTES)
    assert [(group.name, texts(group.train)) for group in together.groups] == [("corpus", ["a", "b", "c"])]


def test_equal_texts_are_on_one_side_whatever_file_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STRETCH", 1 << 15)
    said = [f"document {i}\n" * (1 + i % 5) for i in range(200)]
    said += ["".join(f"{letter} {i}\n" for i in range(20_000)) for letter in "abcdefgh"]
    files = {f"{i}_txt": text for i, text in enumerate(said)}
    parted = [{"prompt": text[:20_000], "completion": text[20_000:]} for text in said]
    put(tmp_path / "corpus", **files, records_jsonl=[{"text": text} for text in reversed(said)], parted_jsonl=parted)
    (group,) = prepare(knobs(tmp_path, held_out=0.3), BYTES).groups
    train, held_out = texts(group.train), texts(group.held_out)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(said * 3)
    # 208 different documents, 0.3 of them give or take four deviations of sqrt(208 * 0.3 * 0.7)
    assert abs(len(set(held_out)) - 62.4) < 4 * 6.6


def test_a_document_stays_on_its_side_as_the_corpus_grows(tmp_path):
    data = knobs(tmp_path, put(tmp_path / "corpus", a_jsonl=[{"text": f"{i}"} for i in range(100)]), held_out=0.2)
    before = set(texts(prepare(data, BYTES).groups[0].held_out))
    put(tmp_path / "corpus", b_jsonl=[{"text": f"{i}"} for i in range(100, 200)])
    after = set(texts(prepare(data, BYTES).groups[0].held_out))
    assert before == {text for text in after if int(text) < 100}
    larger = set(texts(prepare(replace(data, held_out=0.4), BYTES).groups[0].held_out))
    assert after < larger


def test_where_all_would_be_held_out_all_is_learned(tmp_path):
    put(tmp_path / "corpus", a_txt="only", b_txt="these")
    data = knobs(tmp_path, held_out=1 - 1e-12)
    (group,) = prepare(data, BYTES).groups
    assert (texts(group.train), group.held_out.documents) == (["only", "these"], 0)
    assert Path(group.train.file_of(1)).name == "b.txt"
    assert prepare(data, BYTES).groups[0].train.read(0, 5).tolist() == [*b"only", 256]


# --- damage


def test_damaged_records_are_counted_and_the_first_ten_named(tmp_path):
    put(tmp_path / "corpus", a_jsonl=b'{"text": "good"}\n' + b"bad\n" * 12, b_txt=b"\xff", c_txt="good too")
    corpus = prepare(knobs(tmp_path), BYTES)
    assert texts(corpus.groups[0].train) == ["good", "good too"]
    assert corpus.damaged == 13
    assert [where for where, _ in corpus.first_damaged] == [
        f"{tmp_path}/corpus/a.jsonl:{line}" for line in range(2, 12)
    ]
    assert corpus.first_damaged[0][1] == "is not JSON: Expecting value at column 1"
    assert prepare(knobs(tmp_path), BYTES).first_damaged == corpus.first_damaged


def test_a_damaged_record_stops_where_asked(tmp_path):
    put(tmp_path / "corpus", a_jsonl=b'{"text": "good"}\nbad\n')
    with pytest.raises(DataError) as caught:
        prepare(knobs(tmp_path, bad_records="stop"), BYTES)
    assert str(caught.value) == (
        "a record cannot be used: is not JSON: Expecting value at column 1\n"
        '  mend it, or pass over such records: data.bad_records = "skip"\n'
        f"  {tmp_path}/corpus/a.jsonl:2"
    )
    assert left_in(tmp_path / "cache") == []


def test_a_corpus_without_text(tmp_path):
    put(tmp_path / "corpus", a_txt="", b_jsonl=b"bad\n")
    with pytest.raises(DataError) as caught:
        prepare(knobs(tmp_path), BYTES)
    assert caught.value.what == f"there is no text in {tmp_path}/corpus"
    assert caught.value.fix.startswith(
        f"documents without text: 1; damaged: 1, the first {tmp_path}/corpus/b.jsonl:1: is not"
    )
    assert left_in(tmp_path / "cache") == []


# --- the cache


def test_a_corpus_is_tokenised_once(tmp_path):
    put(tmp_path / "corpus", a_txt="a" * 100, b_txt="b" * 50)
    reports = []
    first = prepare(knobs(tmp_path), BYTES, lambda *report: reports.append(report))
    assert reports[-1] == (150, 150)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    again = prepare(knobs(tmp_path), BYTES, lambda *_: pytest.fail("tokenised again"))
    assert (again.fingerprint, everything(again)) == (first.fingerprint, everything(first))
    assert left_in(tmp_path / "cache") == []
    (tmp_path / "corpus" / "b.txt").write_text("c" * 50)
    assert prepare(knobs(tmp_path), BYTES).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "change", [dict(held_out=0.5), dict(text_field="body"), dict(bad_records="stop"), dict(weights=(1.0,))]
)
def test_another_knob_is_another_corpus(tmp_path, change):
    put(tmp_path / "corpus", a_jsonl=[{"text": f"{i}", "body": "b"} for i in range(20)])
    one = prepare(knobs(tmp_path), BYTES)
    assert prepare(replace(knobs(tmp_path), **change), BYTES).folder != one.folder


@pytest.mark.parametrize("harm", ["cut", "longer", "gone", "manifest", "garbled"])
def test_a_damaged_cache_is_made_anew(tmp_path, harm):
    put(tmp_path / "corpus", a_txt="some text")
    corpus = prepare(knobs(tmp_path), BYTES)
    path = corpus.folder / "0-train" / "tokens-00000.bin"
    match harm:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "longer":
            path.write_bytes(path.read_bytes() + b"x")
        case "gone":
            path.unlink()
        case "manifest":
            (corpus.folder / "manifest.json").unlink()
        case "garbled":
            (corpus.folder / "manifest.json").write_text('{"record": "corp')
    again = prepare(knobs(tmp_path), BYTES)
    assert again.fingerprint == corpus.fingerprint
    assert texts(again.groups[0].train) == ["some text"]
    assert left_in(tmp_path / "cache") == []


def test_a_file_changed_while_it_is_tokenised(tmp_path):
    put(tmp_path / "corpus", a_txt="some text")

    def meddle(done, total):
        (tmp_path / "corpus" / "a.txt").write_text("other")

    with pytest.raises(DataError, match="a file was changed while it was tokenised"):
        prepare(knobs(tmp_path), BYTES, meddle)
    assert left_in(tmp_path / "cache") == []


def test_another_process_that_comes_first(tmp_path):
    put(tmp_path / "corpus", a_txt="some text")
    nested = []
    corpus = prepare(knobs(tmp_path), BYTES, lambda *_: nested.append(prepare(knobs(tmp_path), BYTES)))
    assert [other.fingerprint for other in nested] == [corpus.fingerprint]
    assert left_in(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made(tmp_path):
    put(tmp_path / "corpus", a_txt="some text")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="cannot write the tokenised corpus: "):
        prepare(knobs(tmp_path), BYTES)


def test_a_full_disk(tmp_path, small_disk):
    put(tmp_path / "corpus", a_txt="a text\n" * 500_000)  # 7 MB of tokens, on a disk of 4 MiB
    with pytest.raises(StorageError) as caught:
        prepare(knobs(tmp_path, cache=str(small_disk / "cache")), BYTES)
    assert caught.value.what == "cannot write the tokenised corpus: No space left on device"
    assert list((small_disk / "cache").iterdir()) == []


# --- other processes

WORKER = """
import sys, time
from outlast.config import Data
from outlast.data import tokens
tokens.usable_cores = lambda: 0  # every stretch its own batch
source, cache, pause = sys.argv[1:]
data = Data(sources=(source,), cache=cache, held_out=0.0)
corpus = tokens.prepare(data, tokens.open_tokenizer(data, ""), lambda *_: time.sleep(float(pause)))
print(corpus.fingerprint)
"""


def worker(source, cache, pause):
    command = [sys.executable, "-c", WORKER, str(source), str(cache), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(cache):
    return sum(path.stat().st_size for path in Path(cache).glob(".*.half/*/tokens-*"))


def test_killed_at_work_leaves_nothing_that_matters(tmp_path):
    put(tmp_path / "corpus", **{f"{i}_txt": f"text {i}\n" * 100 for i in range(40)})
    with worker(tmp_path / "corpus", tmp_path / "cache", 0.1) as process:
        wait_for(lambda: written(tmp_path / "cache") > 5000)
        process.send_signal(signal.SIGKILL)
    assert len(left_in(tmp_path / "cache")) == 2  # the half-written folder and its lock
    corpus = prepare(knobs(tmp_path), BYTES)
    assert corpus.groups[0].train.documents == 40
    assert left_in(tmp_path / "cache") == []


def test_a_living_process_is_left_alone(tmp_path):
    put(tmp_path / "slow", **{f"{i}_txt": f"text {i}\n" * 100 for i in range(10)})
    put(tmp_path / "corpus", a_txt="some text")
    with worker(tmp_path / "slow", tmp_path / "cache", 0.1) as process:
        wait_for(lambda: written(tmp_path / "cache") > 0)
        prepare(knobs(tmp_path), BYTES)
        assert written(tmp_path / "cache") > 0
        assert process.wait() == 0
    prepare(knobs(tmp_path, tmp_path / "slow"), BYTES, lambda *_: pytest.fail("tokenised again"))
    assert left_in(tmp_path / "cache") == []


def test_two_processes_at_once(tmp_path):
    put(tmp_path / "corpus", **{f"{i}_txt": f"text {i}\n" * 100 for i in range(20)})
    workers = [worker(tmp_path / "corpus", tmp_path / "cache", 0.02) for _ in range(2)]
    prints = {process.communicate()[0].strip() for process in workers}
    assert [process.returncode for process in workers] == [0, 0]
    assert prints == {prepare(knobs(tmp_path), BYTES, lambda *_: pytest.fail("tokenised again")).fingerprint}
    assert left_in(tmp_path / "cache") == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "megabytes", "most"), [("txt", 200, 40), ("jsonl.gz", 200, 40)])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind, megabytes, most):
    line = "a line of a text that goes on and on, some hundred characters of it, until there is enough of it all.\n"
    (tmp_path / "corpus").mkdir()
    if kind == "txt":
        with open(tmp_path / "corpus" / "a.txt", "w") as file:
            for _ in range(megabytes):
                file.write(line * (1_000_000 // len(line)))
    else:
        import gzip

        record = json.dumps({"text": line * 100}) + "\n"
        with gzip.open(tmp_path / "corpus" / "a.jsonl.gz", "wt", compresslevel=1) as file:
            for _ in range(megabytes):
                file.write(record * (1_000_000 // len(record)))
    with worker(tmp_path / "corpus", tmp_path / "cache", 0) as process:
        watched, start, peak = psutil.Process(process.pid), None, 0
        while process.poll() is None:
            now = watched.memory_info()
            private = now.rss - getattr(now, "shared", 0)
            if start is None and written(tmp_path / "cache") > 10_000_000:
                start = private
            peak = max(peak, private)
            time.sleep(0.01)
        assert process.returncode == 0
    assert start is not None
    assert (peak - start) / 1e6 < most
