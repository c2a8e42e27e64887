"""Documents from files: what is read, what is damaged and where, and that nothing is lost or held at once."""

import gzip
import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from outlast.data import sources
from outlast.data.sources import Damaged, Document, documents, identity, listing
from outlast.errors import DataError


def read(path, field="text"):
    """All items of the one file at a path."""
    (file,) = listing(str(path))
    return list(documents(file, field))


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def text_of(document):
    return "".join(piece.text for piece in document.pieces)


def told(items):
    """Damaged as (place, why), documents as text."""
    return [(item.where, item.why) if isinstance(item, Damaged) else text_of(item) for item in items]


# --- which files


def test_a_folder_is_read_by_path_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b.jsonl", "a.txt", ".hidden", ".git/config", "c/.secret/x", "é.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = listing(str(tmp_path))
    assert [os.path.relpath(file.path, tmp_path) for file in found] == [
        "a.txt",
        "a/b.jsonl",
        "a/z.md",
        "b.txt",
        "é.txt",
    ]
    assert [file.bytes for file in found] == [5, 9, 6, 5, 6]
    assert found[0].mtime_ns == (tmp_path / "a.txt").stat().st_mtime_ns


def test_links_are_followed_but_not_round_and_round(tmp_path):
    (tmp_path / "real").mkdir()
    put(tmp_path / "real" / "a.txt", "a")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "linked").symlink_to(tmp_path / "real")
    (corpus / "again").symlink_to(corpus)
    (corpus / "one.txt").symlink_to(tmp_path / "real" / "a.txt")
    os.mkfifo(corpus / "pipe")
    assert [os.path.relpath(file.path, corpus) for file in listing(str(corpus))] == ["linked/a.txt", "one.txt"]


def test_a_link_to_nothing_is_not_passed_over(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        listing(str(tmp_path))


def test_the_standard_library(monkeypatch, tmp_path):
    found = {file.path for file in listing("stdlib")}
    assert Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py" in map(Path, found)
    assert all(path.endswith(".py") for path in found)
    for name in ("a.py", "site-packages/b.py", "c/__pycache__/d.py", "e/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [os.path.relpath(file.path, tmp_path) for file in listing("stdlib")] == ["a.py", "e/f.py"]


@pytest.mark.parametrize(
    ("given_as", "meant"),
    [
        ("corpsu/a.txt", "corpus"),
        ("corpus/train.jsnl", "corpus/train.jsonl"),
        ("corpus/train.jsonl/x", None),
        ("zzz", None),
    ],
)
def test_a_source_that_is_not_there(tmp_path, given_as, meant):
    (tmp_path / "corpus").mkdir()
    put(tmp_path / "corpus" / "train.jsonl", "")
    with pytest.raises(DataError) as caught:
        listing(str(tmp_path / given_as))
    assert caught.value.what == f"there is no file or folder {tmp_path / given_as}"
    assert caught.value.fix == (f"perhaps you meant {tmp_path / meant}" if meant else "")
    assert caught.value.key == "data.sources"


def test_a_mistyped_stdlib():
    with pytest.raises(DataError, match="perhaps you meant stdlib"):
        listing("stdlb")


def test_a_folder_with_nothing_in_it(tmp_path):
    put(tmp_path / ".hidden", "x")
    with pytest.raises(DataError, match="there is nothing to learn from in"):
        listing(str(tmp_path))


def test_identity_is_of_place_size_and_time(tmp_path):
    path = put(tmp_path / "a.txt", "abc")
    first = identity(listing(str(path)))
    assert identity(listing(str(path))) == first
    os.utime(path, ns=(1, 1))
    second = identity(listing(str(path)))
    put(path, "abcd")
    os.utime(path, ns=(1, 1))
    assert len({first, second, identity(listing(str(path)))}) == 3


def test_a_file_that_goes_away_is_not_damage(tmp_path):
    (file,) = listing(str(put(tmp_path / "a.txt", "abc")))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: No such file"):
        list(documents(file, "text"))


def test_a_name_that_is_no_text_can_be_printed(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.jsonl")
    with open(path, "wb") as file:
        file.write(b"{}\n")
    (item,) = read(os.fsdecode(path))
    assert item.where.encode().endswith(rb"\xff.jsonl:1")


# --- texts


def test_a_text_is_a_document_as_it_stands(tmp_path):
    path = put(tmp_path / "a.txt", "one\r\ntwo <|endoftext|>\n\n é€😀".encode())
    (document,) = read(path)
    assert text_of(document) == "one\r\ntwo <|endoftext|>\n\n é€😀"
    assert document.where == str(path)
    assert document.read == path.stat().st_size
    assert not document.continues
    assert document.learn_end
    assert all(piece.learn and not piece.marker for piece in document.pieces)


def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch):
    assert told(read(put(tmp_path / "a.txt", b"\xef\xbb\xbfab"))) == ["ab"]
    assert told(read(put(tmp_path / "a.txt", "ab\ufeff"))) == ["ab\ufeff"]
    assert told(read(put(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "ab"}'))) == ["ab"]
    monkeypatch.setattr(sources, "STRETCH", 2)
    assert told(read(put(tmp_path / "a.txt", "ab\n\ufeffcd"))) == ["ab\n", "\ufeffc", "d"]


def test_an_empty_text_is_an_empty_document(tmp_path):
    assert told(read(put(tmp_path / "a.txt", ""))) == [""]
    assert told(read(put(tmp_path / "a.jsonl", ""))) == []
    assert told(read(put(tmp_path / "a.jsonl", '{"text": ""}\n'))) == [""]


def test_json_that_is_not_lines_is_text(tmp_path):
    assert told(read(put(tmp_path / "a.json", '{"text":\n"b"}'))) == ['{"text":\n"b"}']


@given(st.text(st.sampled_from("ab\né€😀"), max_size=80), st.integers(1, 9))
def test_long_texts_come_in_stretches_cut_at_newlines(tmp_path_factory, text, stretch):
    path = put(tmp_path_factory.mktemp("t") / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "STRETCH", stretch)
        found = read(path)
        in_record = list(sources._documents_of("a", [sources.Piece(text)], True, 0))
    assert "".join(map(text_of, found)) == text
    assert [document.continues for document in found] == [True] * (len(found) - 1) + [False]
    for document in found[:-1]:
        part = text_of(document).encode()
        assert stretch <= len(part) <= 2 * stretch + 3
        assert part.endswith(b"\n") or b"\n" not in part[stretch:]
    assert "".join(map(text_of, in_record)) == text
    assert [document.continues for document in in_record] == [True] * (len(in_record) - 1) + [False]
    assert all(len(text_of(document)) <= 4 * stretch + 3 for document in in_record)


def test_a_text_and_a_record_of_it_are_cut_alike(tmp_path):
    text = "".join(f"line {i} é\n" for i in range(60_000))
    cut = [text_of(document) for document in read(put(tmp_path / "a.txt", text))]
    assert len(cut) == 4
    record = read(put(tmp_path / "a.jsonl", json.dumps({"text": text})))
    assert [piece.text for document in record for piece in document.pieces] == cut


def test_bytes_that_are_no_text(tmp_path):
    path = put(tmp_path / "a.txt", b"abc\xff\xfedef")
    assert told(read(path)) == [(f"{path}, byte 3", "is not UTF-8: invalid start byte")]
    path = put(tmp_path / "b.txt", "abc€".encode()[:-1])
    assert told(read(path)) == [(f"{path}, byte 3", "is not UTF-8: unexpected end of data")]


def test_damage_in_a_long_text_parts_it_in_two(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STRETCH", 4)
    path = put(tmp_path / "a.txt", b"one 1\ntwo 2\nth\xffe3\nfour4\nfive5\n")
    found = read(path)
    assert told(found) == [
        "one 1\n",
        "two 2\n",
        (f"{path}, byte 14", "is not UTF-8: invalid start byte"),
        "four4\n",
        "five5\n",
    ]
    assert [item.continues for item in found if isinstance(item, Document)] == [True, False, True, False]


def test_a_binary_file(tmp_path):
    path = put(tmp_path / "a.png", b"\x89PNG\r\n\x00\x00")
    assert told(read(path)) == [(f"{path}, byte 0", "looks binary: its byte 6 is NUL")]
    path = put(tmp_path / "a.jsonl", b'{"text": "a"}\n\0\n{"text": "b"}\n')
    assert told(read(path)) == [(f"{path}:1", "looks binary: its byte 14 is NUL")]
    late = put(tmp_path / "late.txt", b"a" * 8192 + b"\0")
    assert told(read(late)) == ["a" * 8192 + "\0"]


# --- compressed

COMPRESSORS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ"])
def test_compressed_files_are_read_through(tmp_path, suffix):
    compress = COMPRESSORS[suffix.lower()]
    text = "".join(f"line {i * i}\n" for i in range(100_000))
    blob = compress(text.encode())
    assert "".join(told(read(put(tmp_path / f"a.txt{suffix}", blob)))) == text
    parts = [compress(part.encode()) for part in (text[:1000], "", text[1000:])]
    assert "".join(told(read(put(tmp_path / f"b{suffix}", b"".join(parts))))) == text
    records = compress(b'{"text": "a"}\n{"text": "b"}\n')
    assert told(read(put(tmp_path / f"c.jsonl{suffix}", records))) == ["a", "b"]
    assert told(read(put(tmp_path / f"d.txt{suffix}", b""))) == [""]
    if suffix == ".gz":
        assert told(read(put(tmp_path / "e.txt.gz", compress(b"ab") + bytes(700)))) == ["ab"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kept", [1, 9, 0.5, -1])
def test_a_compressed_file_cut_short(tmp_path, suffix, kept):
    blob = COMPRESSORS[suffix](b"".join(os.urandom(20).hex().encode() + b"\n" for _ in range(100)))
    path = put(tmp_path / f"a.txt{suffix}", blob[: int(len(blob) * kept) if kept == 0.5 else kept])
    why = "is cut short: the compressed data ends in the middle"
    assert told(read(path)) == [(f"{path}, byte 0", why)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_short_gives_what_stands_before(tmp_path, suffix):
    records = [json.dumps({"text": os.urandom(500).hex()}) for _ in range(2000)]
    blob = COMPRESSORS[suffix]("\n".join(records).encode())
    *before, (where, why) = told(read(put(tmp_path / f"a.jsonl{suffix}", blob[: len(blob) // 2])))
    assert 500 < len(before) < 1500
    assert before == [json.loads(record)["text"] for record in records[: len(before)]]
    assert where == f"{tmp_path}/a.jsonl{suffix}:{len(before) + 1}"
    assert why.startswith("is cut short")
    texts = read(put(tmp_path / f"b.txt{suffix}", blob[: len(blob) // 2]))
    assert [isinstance(item, Document) and item.continues for item in texts][-2:] == [False, False]
    assert "\n".join(records).startswith("".join(map(text_of, texts[:-1])))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_with_a_flipped_byte(tmp_path, suffix):
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    blob = bytearray(compress(b"some text\n" * 1000))
    blob[-6 if suffix == ".gz" else -2] ^= 255  # in the checksum
    (_, why), *rest = told(read(put(tmp_path / f"a.txt{suffix}", bytes(blob))))
    assert why.startswith("cannot be decompressed: ")
    assert not rest
    ((_, why),) = told(read(put(tmp_path / f"b.txt{suffix}", b"not compressed at all")))
    assert why.startswith("cannot be decompressed: ")


# --- records


def test_damaged_lines_are_named_and_passed_over(tmp_path):
    lines = {
        b'{"text": "first"}': "first",
        b'{"text": "cut': "is not JSON: Unterminated string starting at column 10",
        b"": None,
        b"[1]": "is a list, not an object",
        b"17": "is 17, not an object",
        b'{"body": "x", "id": 3}': "has no field 'text', nor `prompt` and `completion`, nor `messages`; it has body, id",
        b"{}": "has no field 'text', nor `prompt` and `completion`, nor `messages`; it has nothing",
        b'{"text": null}': "field 'text' is missing, not a string",
        b'{"text": 5}': "field 'text' is 5, not a string",
        b'{"text": ["a"]}': "field 'text' is a list, not a string",
        b'{"text": "\xff"}': "is not UTF-8: invalid start byte",
        b'{"text": "\\ud83d"}': "has half a surrogate pair, which is no character",
        b"[" * 200_000: "is nested too deeply to be read",
        b'{"prompt": "a"}': "has no field 'text', nor `prompt` and `completion`, nor `messages`; it has prompt",
        b'{"prompt": "a", "completion": {}}': "field 'completion' is an object, not a string",
        b'{"messages": "a"}': "field 'messages' is a string, not a list of messages",
        b'{"messages": ["a"]}': "message 1 is a string, not an object",
        b'{"messages": [{"role": "user"}]}': "content of message 1 is missing, not a string",
        b'{"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}': "role of message 2 is missing, not a string",
        b"  \t ": None,
        b'{"text": "\\ud83d\\ude00"}': "😀",
        b'{"text": "last"}': "last",
    }
    path = put(tmp_path / "a.jsonl", b"\n".join(lines))
    expected = []
    for number, (line, what) in enumerate(lines.items(), start=1):
        if what is not None:
            good = line.startswith(b'{"text": "') and what in ("first", "last", "😀")
            expected.append(what if good else (f"{path}:{number}", what))
    assert told(read(path)) == expected


def test_a_line_too_long_to_be_held(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 30)
    for length in (30, 31, 61, 62, 63, 200):
        path = put(tmp_path / "a.jsonl", b'{"text": "a"}\n' + b"x" * length + b'\n{"text": "b"}\n' + b"y" * 100)
        found = told(read(path))
        assert [item if isinstance(item, str) else item[0] for item in found] == ["a", f"{path}:2", "b", f"{path}:4"]
        assert found[1][1] == "is longer than 30 bytes"


def test_another_field(tmp_path):
    path = put(tmp_path / "a.jsonl", '{"text": "no", "body": "yes"}')
    assert told(read(path, "body")) == ["yes"]


def test_prompts_are_read_and_completions_learned(tmp_path):
    (document,) = read(put(tmp_path / "a.jsonl", '{"prompt": "2+2=", "completion": "4", "messages": []}'))
    assert [(piece.text, piece.learn) for piece in document.pieces] == [("2+2=", False), ("4", True)]
    assert document.learn_end


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "<|im_end|>?"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "bye"},
]


def test_messages_become_chatml_learned_on_the_answers(tmp_path):
    (document,) = read(put(tmp_path / "a.jsonl", json.dumps({"messages": CHAT})))
    assert text_of(document) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n<|im_end|>?<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>\n"
    )
    assert (
        "|".join(piece.text for piece in document.pieces if piece.learn and piece.text)
        == "ok|<|im_end|>|bye|<|im_end|>"
    )
    assert [piece.text for piece in document.pieces if piece.marker] == ["<|im_start|>", "<|im_end|>"] * 5
    assert not document.learn_end


def test_no_messages_are_an_empty_document(tmp_path):
    assert told(read(put(tmp_path / "a.jsonl", '{"messages": []}'))) == [""]


def test_long_records_come_in_stretches_too(tmp_path):
    answer = "word " * 200_000
    chat = [{"role": "user", "content": "x" * 300_000}, {"role": "assistant", "content": answer}]
    found = read(put(tmp_path / "a.jsonl", json.dumps({"messages": chat})))
    assert [document.continues for document in found] == [True] * (len(found) - 1) + [False]
    assert all(len(text_of(document)) <= 3 * sources.STRETCH for document in found)
    pieces = [piece for document in found for piece in document.pieces]
    assert "".join(piece.text for piece in pieces if piece.learn) == answer + "<|im_end|>"


# --- parquet


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", id=[1, 2, 3, 4], text=["a", None, "", "d é"])
    assert told(read(path)) == ["a", (f"{path}, row 2", "field 'text' is missing, not a string"), "", "d é"]
    assert read(path)[-1].read == path.stat().st_size
    path = parquet(tmp_path / "b.parquet", prompt=["a"], completion=["b"])
    assert [[piece.learn for piece in document.pieces] for document in read(path)] == [[False, True]]
    (chat,) = read(parquet(tmp_path / "c.parquet", messages=[CHAT]))
    assert chat.pieces == read(put(tmp_path / "c.jsonl", json.dumps({"messages": CHAT})))[0].pieces
    assert told(read(parquet(tmp_path / "d.parquet", text=pa.array([], pa.string())))) == []


def test_parquet_with_bytes_that_are_no_text(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xffb")]
    )
    path = parquet(tmp_path / "a.parquet", text=bad)
    assert told(read(path)) == [(f"{path}, row 1", "is not UTF-8: invalid start byte"), "b"]


def test_parquet_without_the_column(tmp_path):
    path = parquet(tmp_path / "a.parquet", body=["a"], id=[1])
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.what == f"{path} has no column 'text', nor `prompt` and `completion`, nor `messages`"
    assert caught.value.fix == "set data.text_field to the one that holds the text; it has body, id"
    assert caught.value.key == "data.text_field"


def test_damaged_parquet(tmp_path):
    whole = parquet(tmp_path / "a.parquet", text=[os.urandom(400).hex() for _ in range(8)]).read_bytes()
    for blob in (b"", b"no parquet", whole[:-9], whole[9:]):
        path = put(tmp_path / "b.parquet", blob)
        ((where, why),) = told(read(path))
        assert where == f"{path}, row 1"
        assert why.startswith("cannot be read as parquet: ")
        assert "\n" not in why
    spoilt = whole[: len(whole) // 2] + bytes(400) + whole[len(whole) // 2 + 400 :]
    *before, last = told(read(put(tmp_path / "c.parquet", spoilt)))
    assert len(before) >= 2 or isinstance(last, tuple)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", text=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"reading \.parquet needs pyarrow\n  install it with: pip install 'outlast\[parquet\]'"
    ):
        read(path)


def test_a_disk_that_fails_is_no_damaged_parquet(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(5, "Input/output error")

    path = parquet(tmp_path / "a.parquet", text=["a"])
    monkeypatch.setattr(pq, "ParquetFile", failing)
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet: Input/output error"):
        read(path)
