"""outlast's tokenising against datasets' `map(batched=True)`, from the same files to token ids on disk.

Both take files of the running Python's own library and make the same ids with the same tokenizer.json, a BPE of 8,192
tokens trained on them or the bytes, opened once by each. Ours reads, tokenises, divides, hashes and makes durable in
one process, in which the tokenizers library has a thread a core. Theirs, for each row:

- *generator and map*: `Dataset.from_generator` over the files, then `map`, in one process with the same threads;
- *map alone*: the texts already stand in Arrow; ours still starts from the files;
- *map, a process a core*: `map(num_proc=cores)` over those, a thread each, their start included.

Goals: on every row ours takes no longer, as the median ratio of the times, or the difference lies within the spread
between two runs of ours.

    python -m benchmarks.tokenizing            measure, print the table, write benchmarks/results/tokenizing.json
    python -m benchmarks.tokenizing --check    the same, and exit 1 where a goal is missed
"""

import argparse
import codecs
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import datasets
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks import measure
from outlast.config import Data
from outlast.data.sources import STRETCH, Damaged, SourceFile, documents, listing
from outlast.data.tokens import Corpus, Tokenizer, open_tokenizer, prepare
from outlast.environment import usable_cores

GOALS: Final = ("ratio of ours to theirs at most 1.0, or within the spread between two runs of ours",)


@dataclass(frozen=True)
class Bench:
    """One tokeniser and what is needed to use it both ways."""

    folder: Path
    data: Data
    tokenizer: Tokenizer
    theirs: PreTrainedTokenizerFast

    def fresh(self) -> Path:
        """An empty folder, so that nothing is found done."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def ours(self) -> Corpus:
        """From files to tokens on disk."""
        return prepare(replace(self.data, cache=str(self.fresh())), self.tokenizer)

    def texts(self) -> datasets.Dataset:
        """The files' texts in Arrow."""
        return datasets.Dataset.from_generator(
            _texts, gen_kwargs={"folder": self.data.sources[0]}, cache_dir=str(self.fresh())
        )  # type: ignore[return-value]

    def mapped(self, texts: datasets.Dataset, processes: int | None = None) -> datasets.Dataset:
        """Token ids of texts, in a new Arrow file."""
        file = str(self.fresh() / "ids.arrow")
        return texts.map(
            _ids, batched=True, remove_columns=["text"], fn_kwargs={"tokenizer": self.theirs}, num_proc=processes,
            cache_file_name=file, load_from_cache_file=False,
        )  # fmt: skip


def _texts(folder: str) -> Iterator[dict[str, str]]:
    for path in sorted(Path(folder).iterdir()):
        with open(path, encoding="utf-8", newline="") as file:
            yield {"text": file.read()}


def _ids(batch: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    told = tokenizer(batch["text"], return_attention_mask=False, return_token_type_ids=False)
    return {"input_ids": told["input_ids"]}


def chosen(folder: Path, megabytes: float) -> int:
    """Copy so much of the library into a folder. Returns the bytes.

    Whole, short texts only: ours leaves out damaged files, drops byte order marks and cuts long texts, theirs do not.
    """
    folder.mkdir()
    total = 0
    for number, file in enumerate(_spread(listing("stdlib"))):
        content = Path(file.path).read_bytes()
        whole = not any(isinstance(item, Damaged) for item in documents(file, "text"))
        if whole and 0 < len(content) < STRETCH and not content.startswith(codecs.BOM_UTF8):
            (folder / f"{number:05d}.py").write_bytes(content)
            total += len(content)
        if total >= megabytes * 1e6:
            break
    return total


def _spread(files: list[SourceFile]) -> Iterator[SourceFile]:
    """Files in an order in which the first so many are from everywhere."""
    return itertools.chain.from_iterable(files[start::16] for start in range(16))


def check_equal(bench: Bench) -> None:
    """Leave, with a message, where the two ways do not make the same ids."""
    group = bench.ours().groups[0]
    theirs = [i for row in bench.mapped(bench.texts())["input_ids"] for i in (*row, bench.tokenizer.eos)]
    if group.train.read(0, len(group.train)).tolist() != theirs:
        sys.exit("the two make different ids: nothing to compare")


def rows(bench: Bench, name: str, size: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure one tokeniser."""
    check_equal(bench)
    ready = bench.texts()
    ways: dict[str, Callable[[], object]] = {
        "generator and map": lambda: bench.mapped(bench.texts()),
        "map alone": lambda: bench.mapped(ready),
        "map, a process a core": lambda: bench.mapped(ready, usable_cores()),
    }
    for way, theirs in ways.items():
        pair = measure.paired(bench.ours, theirs, rounds)
        yield {
            "tokeniser": name,
            "against": way,
            "ours MB/s": round(size / 1e6 / pair.a_seconds, 2),
            "theirs MB/s": round(size / 1e6 / pair.b_seconds, 2),
            "ratio": round(pair.ratio, 3),
            "A/A spread": "{:.3f}-{:.3f}".format(*pair.spread),
            "met": pair.meets(1.0),
        }


def main() -> None:
    """Measure, print and write; with --check exit 1 where a goal is missed, the figures on the last line."""
    parser = argparse.ArgumentParser(description="outlast's tokenising against datasets' map")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of ours, theirs, ours (default: 15)")
    parser.add_argument("--megabytes", type=float, default=2.5, help="text to tokenise (default: 2.5)")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.set_verbosity_error()
    found = []
    with tempfile.TemporaryDirectory() as place:
        size = chosen(Path(place) / "texts", options.megabytes)
        for name in ("bpe", "bytes"):
            folder = Path(place) / name
            data = Data(sources=(f"{place}/texts",), tokenizer=name, bpe_vocab=8192, held_out=0.0, cache=str(folder))
            tokenizer = open_tokenizer(data, "")
            tokenizer.save(folder / "tokenizer")
            theirs = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
            bench = Bench(folder, data, tokenizer, theirs)
            found += rows(bench, name, size, options.rounds)
    measure.show("outlast and datasets, MB of text a second; ratio of times; A/A: ours over ours", found)
    measure.save("tokenizing", GOALS, found, threads=usable_cores())
    missed = [row for row in found if not row["met"]]
    worst = max(missed or found, key=lambda row: row["ratio"])
    verdict = f"{len(missed)} of {len(found)} goals missed" if missed else f"all {len(found)} goals met"
    print(f"{verdict}; worst ratio {worst['ratio']} ({worst['tokeniser']} against {worst['against']})")
    sys.exit(1 if options.check and missed else 0)


if __name__ == "__main__":
    main()
