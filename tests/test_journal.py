"""The journal: whole lines, one writer, and the history that survives."""

import json
import subprocess
import sys

import pytest

from outlast import journal
from outlast.errors import ResumeError, StorageError
from outlast.journal import Journal


def test_a_torn_line_is_dropped_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    first = Journal(path)
    first.write("start", 0)
    first.write("step", 1, samples=[0, 8])
    first.close()
    path.write_bytes(path.read_bytes() + b'{"event": "step", "st')
    assert [line["event"] for line in journal.read(path)] == ["start", "step"]
    second = Journal(path)
    second.write("start", 1)
    second.close()
    lines = journal.read(path)
    assert [(line["event"], line["attempt"], line["step"]) for line in lines] == [
        ("start", 1, 0),
        ("step", 1, 1),
        ("start", 2, 1),
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_two_writers_are_refused(tmp_path):
    held = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ResumeError, match="another process"):
        Journal(tmp_path / "journal.jsonl")
    held.close()
    Journal(tmp_path / "journal.jsonl").close()


def test_a_killed_writer_lets_go(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from outlast.journal import Journal
Journal(Path({str(tmp_path / "journal.jsonl")!r})).write("start", 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    again = Journal(tmp_path / "journal.jsonl")
    assert again.attempt == 2
    again.close()


def line(event, attempt, step):
    return {"event": event, "attempt": attempt, "step": step}


def test_every_start_takes_back_what_came_after_it():
    lines = [line("start", 1, 0), *(line("step", 1, s) for s in range(1, 8))]
    lines += [line("start", 2, 4), line("step", 2, 5)]
    lines += [line("start", 3, 4), *(line("step", 3, s) for s in (5, 6))]
    assert [(kept["attempt"], kept["step"]) for kept in journal.surviving(lines)] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (3, 5),
        (3, 6),
    ]
    assert journal.surviving([]) == []


@pytest.mark.parametrize("bad", [b"\0\0\0", b"{}", b"[1]", b"not json"])
def test_a_damaged_line_is_named(tmp_path, bad):
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.write("start", 0)
    first.close()
    path.write_bytes(path.read_bytes() + bad + b"\n" + path.read_bytes())
    with pytest.raises(StorageError, match="line 2 of the journal is damaged"):
        Journal(path)
    path.write_bytes(path.read_bytes().replace(bad + b"\n", b""))
    Journal(path).close()


def test_no_file_is_no_lines(tmp_path):
    assert journal.read(tmp_path / "none.jsonl") == []
