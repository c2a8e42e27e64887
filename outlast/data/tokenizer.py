"""Tokenisers: text to token ids and back, each also a tokenizer.json that others read.

`bytes` has the 256 bytes and an end token. `bpe` is trained on the corpus: byte-level byte-pair encoding, as GPT-2's.
Any other is a given tokenizer.json. Not covered: tokenisers that have none (a sentencepiece `tokenizer.model` alone, or
one that is Python code); transformers' `save_pretrained` makes a tokenizer.json of most.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from jaxtyping import UInt

from outlast import records
from outlast.config import Data
from outlast.data import sources
from outlast.data.sources import Document, SourceFile
from outlast.environment import cache_folder
from outlast.errors import DataError

TRAINING_TEXT: Final = 64 << 20
"""Characters, at most, that a `bpe` is trained on: the first of each source, an equal part from each. Held-out documents
are not left out: it is the text's statistics that count here, not what is said."""
_EOS: Final = "<eos>"
_USUAL_ENDS: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", _EOS, "<|eot_id|>")
_MARKERS: Final = ("<|im_start|>", "<|im_end|>")
_BPE_FORMAT: Final = 1


class Tokenizer:
    """Text to token ids and back.

    Args:
        name: what the user called it.
        text: its tokenizer.json.
        config: the tokenizer_config.json beside it; empty where there is none.
        eos: its end-of-document token; empty: the one `config` names, else one of the usual names.

    Attributes:
        name: as given.
        vocab_size: the largest id, and 1.
        eos: id of the end token.
        eos_token: the end token as text.
        prefix: ids it puts before every text of its own accord, such as Llama's begin-of-text.
        fingerprint: sha256 of tokenizer.json, however it is spaced and sorted.
        dtype: the type ids are kept in: two bytes where they fit, else four.

    Raises:
        DataError: it cannot be read, or what ends a document is not known.
    """

    def __init__(self, name: str, text: str, config: dict[str, Any], eos: str = "") -> None:
        self.name, self._text, self._config = name, text, config
        try:
            described = json.loads(text)
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises no narrower one
            raise DataError(f"this is no tokenizer.json: {' '.join(str(error).split())}", where=name) from None
        ids = self._inner.get_vocab(with_added_tokens=True)
        special = [token.content for token in self._inner.get_added_tokens_decoder().values()]
        self.vocab_size = max(ids.values()) + 1
        self.eos_token = _end_token(name, ids, special, config, eos)
        self.eos = ids[self.eos_token]
        self.fingerprint = hashlib.sha256(_canonical(described).encode()).hexdigest()
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self._inner.no_truncation()
        self._inner.no_padding()
        probe = self._inner.encode("a")
        before = takewhile(lambda pair: pair[1], zip(probe.ids, probe.special_tokens_mask, strict=True))
        self.prefix = tuple(token for token, _ in before if token != self.eos)
        # From here on special tokens found in a text are encoded as the letters they are.
        self._inner.add_special_tokens([token for token in (*_MARKERS, self.eos_token) if token in ids])
        self._inner.encode_special_tokens = True
        self._plain = described == _bytes()
        if self.eos in self.encode([self.eos_token])[0]:
            raise DataError(
                f"a text that says {self.eos_token} cannot be told from the end of a document",
                fix="name another token in data.eos; tokenisers of type Unigram are often so",
                where=name,
            )

    def encode(self, texts: Sequence[str]) -> list[UInt[np.ndarray, "T"]]:
        """Token ids of each text by itself, of `dtype`, without prefix and end. No text makes a special token."""
        if self._plain:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, special ones by their names. What is no UTF-8 becomes U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def special(self, token: str) -> int | None:
        """Id of a token that a template writes, or None where this tokeniser has no such token."""
        return self._inner.token_to_id(token)

    def files(self) -> dict[str, str]:
        """The texts of tokenizer.json and tokenizer_config.json, as transformers reads them."""
        config = self._config or {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        told = json.dumps(config | {"eos_token": self.eos_token}, indent=1) + "\n"
        return {"tokenizer.json": self._text, "tokenizer_config.json": told}

    def save(self, folder: Path) -> None:
        """Write them to a folder. Raises StorageError."""
        for name, text in self.files().items():
            records.write_text(folder / name, text)


def open_tokenizer(data: Data, weights: str) -> Tokenizer:
    """The tokeniser that the [data] knobs ask for; a `bpe` is trained where that is still to be done.

    Args:
        data: the knobs.
        weights: `model.weights`: `auto` takes the tokenizer.json in there.

    Raises:
        DataError: there is none, or it cannot be used.
        StorageError: a trained one cannot be kept.
    """
    wanted = data.tokenizer
    if wanted in ("bytes", "bpe") or (wanted == "auto" and not weights):
        if data.eos not in ("", _EOS):
            raise DataError(
                f"data.eos is {data.eos!r}, and the tokeniser {wanted.replace('auto', 'bytes')} has {_EOS} alone",
                fix="leave it empty",
                key="data.eos",
            )
        text = _trained(data) if wanted == "bpe" else _canonical(_bytes())
        return Tokenizer("bpe" if wanted == "bpe" else "bytes", text, {})
    path = Path(weights) if wanted == "auto" else Path(wanted).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        fix = "set data.tokenizer to the tokenizer.json the weights were trained with"
        raise DataError(
            f"there is no tokeniser {path}",
            fix=fix if wanted == "auto" else sources.meant(path, "auto", "bytes", "bpe"),
            key="data.tokenizer",
        )
    beside = path.with_name("tokenizer_config.json")
    try:
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        if not isinstance(config, dict):
            raise ValueError(f"{beside.name} is not an object")
        return Tokenizer(str(path), path.read_text(encoding="utf-8"), config, data.eos)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the tokeniser: {error}", where=str(path.parent)) from None


def _end_token(name: str, ids: dict[str, int], special: list[str], config: dict[str, Any], wanted: str) -> str:
    """The token that ends a document, the first of: the one asked for, the one its configuration names, a usual one."""
    if wanted and wanted not in ids:
        close = difflib.get_close_matches(wanted, special, n=1) or special[:8]
        raise DataError(
            f"data.eos is {wanted!r}, and the tokeniser has no such token",
            fix=f"perhaps you meant {' or '.join(close)}" if close else "it has no special tokens at all",
            key="data.eos",
        )
    named = config.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    found = next((token for token in (wanted, named, *_USUAL_ENDS) if token and token in ids), None)
    if found is None:
        raise DataError(
            "cannot tell which token ends a document",
            fix=f"set data.eos; the special tokens are {', '.join(special[:8]) or 'none'}",
            where=name,
        )
    return found


def _canonical(described: dict[str, Any]) -> str:
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def _bytes() -> dict[str, Any]:
    """The tokenizer.json of `bytes`: each byte its own id, in the spelling of byte-level tokenisers, and no merges.

    Source: GPT-2's `bytes_to_unicode`: printable bytes are themselves, the others, in order, the letters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    letters = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    return _byte_level(letters, [], split=False)


def _byte_level(vocab: dict[str, int], merges: list[list[str]], *, split: bool) -> dict[str, Any]:
    """A byte-level tokenizer.json with the end token last; `split` keeps merges within words, as GPT-2 does.

    Written out here, so that another release of the tokenizers library makes no other tokeniser of it.
    """
    end = {"id": len(vocab), "content": _EOS, "single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model | {"vocab": vocab | {_EOS: len(vocab)}, "merges": merges},
    }


def _trained(data: Data) -> str:
    """The tokenizer.json of a `bpe`: from the cache, else trained and put there. The same texts make the same one."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if data.bpe_vocab <= len(alphabet):
        raise DataError(
            f"data.bpe_vocab is {data.bpe_vocab}",
            fix=f"it must be at least {len(alphabet) + 1}: the bytes and the end token",
            key="data.bpe_vocab",
        )
    listings = [sources.listing(source) for source in data.sources]
    about = [
        _BPE_FORMAT,
        TRAINING_TEXT,
        data.bpe_vocab,
        data.text_field,
        [sources.identity(files) for files in listings],
    ]
    path = cache_folder(data) / f"bpe-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"
    if path.exists():
        return path.read_text(encoding="utf-8")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=data.bpe_vocab - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(_texts(listings, data.text_field), trainer)
    model = json.loads(learner.to_str())["model"]
    text = _canonical(_byte_level(model["vocab"], model["merges"], split=True))
    records.write_text(path, text)
    return text


def _texts(listings: list[list[SourceFile]], text_field: str) -> Iterator[str]:
    """The first texts of each source, TRAINING_TEXT characters in all; what is damaged is passed over."""
    for files in listings:
        read = (item for file in files for item in sources.documents(file, text_field) if isinstance(item, Document))
        left = TRAINING_TEXT // len(listings)
        for piece in (piece for document in read for piece in document.pieces if not piece.marker):
            yield piece.text
            left -= len(piece.text)
            if left <= 0:
                break
