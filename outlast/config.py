"""Every knob of a run, defined once.

A knob is a field of one of the frozen dataclasses below. The run file, the command line, ``--help``, the reference page
and the run's own record all come from these fields. A knob made by :func:`result` bears on what the run computes; one
made by :func:`free` may not. The run's identity is made of the former.

None reads the environment: :mod:`outlast.environment` does. :mod:`outlast.settings` reads and checks what users write.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Range = Literal["", "> 0", ">= 0", "[0, 1)", "(0, 1]", "[0, 1]"]
"""The numbers that a knob takes; all where it is empty."""


def result(default: Any, within: Range = "", most: int = 1 << 31) -> Any:
    """A knob that bears on the result: part of the run's identity; `within` and `most` say which numbers it takes."""
    return dataclasses.field(default=default, metadata={"result": True, "within": within, "most": most})


def free(default: Any, within: Range = "", most: int = 1 << 31) -> Any:
    """A knob that may change from one start to the next without changing the result."""
    return dataclasses.field(default=default, metadata={"result": False, "within": within, "most": most})


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    sources: tuple[str, ...] = free(("stdlib",))
    """Files and folders: text, .jsonl, .parquet, each also .gz or .zst. `stdlib` is the running Python's own library source. The run knows them by content: they may move."""
    weights: tuple[float, ...] = result(())
    """Share of the samples drawn from each source, in the order of `sources`. Empty: the sources are one corpus, each sample once an epoch."""
    text_field: str = result("text")
    """Field of a .jsonl or .parquet record that holds the text. Records with `prompt` and `completion`, or `messages`, learn on the answers only."""
    tokenizer: str = free("auto")
    """`bytes`, `bpe` (trained on this corpus), or a tokenizer.json. `auto` takes the one beside `model.weights`, else `bytes`. Known by content too."""
    bpe_vocab: int = result(4096, "> 0", most=1 << 24)
    """Number of tokens of a `bpe` tokeniser."""
    eos: str = result("")
    """End-of-document token of a given tokenizer.json. Empty: found by its usual names."""
    sequence_length: int = result(512, "> 0")
    """Tokens in a sample."""
    packing: Literal["stream", "whole"] = result("stream")
    """`stream` cuts the running text every `sequence_length` tokens. `whole` begins a new sample rather than cut a document that fits in one."""
    attend_across: bool = result(False)
    """Let attention and positions run on from one document of a sample into the next."""
    held_out: float = result(0.01, "[0, 1)")
    """Share of the documents kept out of training, for evaluation."""
    bad_records: Literal["skip", "stop"] = result("skip")
    """What to do at a damaged record. Either way it is named by file and line, and counted."""
    cache: str = free("~/.cache/outlast")
    """Folder for tokenised corpora, shared by runs."""
    allow_change: bool = free(False)
    """Go on with a run although its corpus, tokeniser or seed is not the one it began with. Written to the journal."""


@dataclass(frozen=True)
class Model:
    """The model's shape. With `weights` it is read from there."""

    weights: str = free("")
    """Hugging Face directory (Llama, Qwen2, Qwen3) to begin from. Empty: random weights. Known by content too."""
    vocab_size: int = result(0, ">= 0")
    """Rows of the embedding. 0: as many as the tokeniser has tokens."""
    hidden_size: int = result(256, "> 0")
    """Width of the residual stream."""
    intermediate_size: int = result(704, "> 0")
    """Width of the feed-forward layer."""
    num_layers: int = result(4, "> 0", most=10_000)
    """Transformer blocks."""
    num_heads: int = result(4, "> 0")
    """Query heads."""
    num_kv_heads: int = result(2, "> 0")
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = result(64, "> 0")
    """Channels of a head."""
    tie_embeddings: bool = result(True)
    """Use the embedding as the output projection too."""
    qk_norm: bool = result(False)
    """RMS-normalise queries and keys per head (Qwen3)."""
    qkv_bias: bool = result(False)
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = result(False)
    """Bias on the attention's output projection."""
    mlp_bias: bool = result(False)
    """Biases on the feed-forward projections."""
    norm_eps: float = result(1e-5, "> 0")
    """Added to the mean square before its root is taken."""
    rope_theta: float = result(10000.0, "> 0")
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = result("none")
    """How the rotary frequencies are stretched for contexts longer than the original."""
    rope_factor: float = result(1.0, "> 0")
    """Stretch of the context: new length over original."""
    rope_original: int = result(8192, "> 0")
    """Context the frequencies were made for, in tokens (llama3, yarn)."""
    rope_low: float = result(1.0, "> 0")
    """llama3: low_freq_factor. yarn: beta_slow. Turns over the original context below which a frequency is fully stretched."""
    rope_high: float = result(0.0, ">= 0")
    """llama3: high_freq_factor. yarn: beta_fast. Turns over the original context above which a frequency is left alone. 0: 4 for llama3, 32 for yarn."""
    rope_attention: float = result(0.0, ">= 0")
    """yarn: factor on cosines and sines. 0: 0.1 ln(rope_factor) + 1."""
    init_std: float = result(0.02, ">= 0")
    """Standard deviation of random weights. Projections back into the residual stream get it over sqrt(2 num_layers)."""
    dropout: float = result(0.0, "[0, 1)")
    """Probability of zeroing a channel of the embedding and of each block's two additions to the residual stream."""


@dataclass(frozen=True)
class Optim:
    """How weights are updated."""

    name: Literal["adamw", "muon"] = result("adamw")
    """`muon` orthogonalises the update of hidden matrices; embeddings, output, norms and biases stay with AdamW."""
    lr: float = result(3e-4, ">= 0")
    """Peak learning rate."""
    beta1: float = result(0.9, "[0, 1)")
    """AdamW: decay of the first moment."""
    beta2: float = result(0.95, "[0, 1)")
    """AdamW: decay of the second moment."""
    eps: float = result(1e-8, "> 0")
    """AdamW: added to the root of the second moment."""
    momentum: float = result(0.95, "[0, 1)")
    """Muon: decay of the momentum."""
    weight_decay: float = result(0.1, ">= 0")
    """Decoupled weight decay of matrices. Embeddings, norms and biases are exempt."""
    clip: float = result(1.0, ">= 0")
    """Largest global gradient norm. 0: no clipping."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the steps."""

    name: Literal["cosine", "wsd", "constant"] = result("cosine")
    """After the warmup: half a cosine down, warmup-stable-decay (a plateau, then a straight line down), or constant."""
    warmup: int = result(20, ">= 0")
    """Steps of linear rise from 0."""
    decay: int = result(0, ">= 0")
    """wsd: steps of the final descent. 0: a fifth of all."""
    final: float = result(0.1, "[0, 1]")
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class Train:
    """The loop."""

    steps: int = result(200, "> 0")
    """Optimizer steps of the whole run."""
    stop_at: int = free(0, ">= 0")
    """Leave after this step, checkpoint written; the same command without it goes on. 0: at the end."""
    batch: int = result(8, "> 0", most=1 << 40)
    """Size of a step, over all ranks and micro-batches, in `batch_unit`. Tokens are sequences x length, padding included."""
    batch_unit: Literal["sequences", "tokens"] = result("sequences")
    """Unit of `batch`."""
    micro_batch: int = free(8, "> 0")
    """Most sequences in one forward pass of one rank; how many passes make a step follows from it."""
    seed: int = result(0, ">= 0", most=(1 << 63) - 1)
    """Seed of initial weights, dropout and order of samples."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = result("auto")
    """Compute type. Weights and moments are float32, or float64 with it. `auto`: bfloat16 where the device has it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """Where to compute. `auto`: cuda where there is one."""
    threads: int = free(0, ">= 0", most=1024)
    """Threads for the CPU's kernels. 0: one a core this process may use."""
    compile: bool = free(False)
    """Run the blocks through torch.compile. Rounding changes as it does with another layout."""
    deterministic: bool = free(False)
    """Refuse kernels whose sums come in another order each time. CPU runs are bitwise repeatable without it."""
    allow_change: bool = free(False)
    """Go on with a run although an [optim], [schedule], [train], [eval] or [parallel] knob that bears on the result is not as it was. Written to the journal."""
    recompute: Literal["none", "attention", "full"] = free("none")
    """What the backward pass works out again rather than keep: what attention keeps but its queries, keys and values, or all of a block but its input."""
    recompute_layers: int = free(0, ">= 0")
    """How many blocks, the first ones, do so. 0: all."""


@dataclass(frozen=True)
class Eval:
    """Evaluation on the held-out documents."""

    every: int = free(100, ">= 0")
    """Steps between evaluations; one is made at the start and one at the end too. 0: those two alone."""
    samples: int = free(64, ">= 0")
    """Held-out samples to evaluate on: the first so many, always the same."""


@dataclass(frozen=True)
class Checkpoint:
    """What survives a crash."""

    every: int = free(100, "> 0")
    """Steps between checkpoints; one is always written at the end."""
    keep: int = free(3, "> 0")
    """Newest checkpoints to keep."""


@dataclass(frozen=True)
class Log:
    """Where the numbers go besides metrics.jsonl."""

    tensorboard: bool = free(False)
    """Write TensorBoard event files to the run folder (needs the tensorboard extra)."""
    wandb: str = free("")
    """Weights & Biases project to log to (needs the wandb extra)."""


@dataclass(frozen=True)
class Parallel:
    """The wished-for layout. The product of the degrees is the number of ranks."""

    dp_replicate: int = free(1, "> 0")
    """Copies of the model, each fed other samples."""
    dp_shard: int = free(1, "> 0")
    """Ranks that share one copy's weights, gradients and moments, each fed other samples."""
    tp: int = free(1, "> 0")
    """Ranks that share every matrix and the attention heads."""
    sp: bool = free(False)
    """Megatron sequence parallelism: norms, dropout and the residual stream, too, are shared by the `tp` ranks, by position."""
    sp_regather: bool = free(False)
    """Under `sp`, gather the inputs of the products again in the backward pass rather than keep them whole: less memory, a quarter more bytes."""
    ring: int = free(1, "> 0")
    """Ranks that share each sequence: keys and values travel round a ring under the attention (context parallelism). Any number."""
    ulysses: int = free(1, "> 0")
    """Ranks that share each sequence and exchange its tokens for attention heads: at most as many as the heads a rank of `tp` has."""
    shard_sequence_ranks: bool = free(False)
    """Let the ranks of `ring` and `ulysses`, too, share weights, gradients and moments as those of `dp_shard` do. Else each of them has all of its copy's."""
    dp_compress: Literal["none", "bf16", "onebit", "topk"] = result("none")
    """How copies send their gradients, which bears on the result, as the number of copies then does. `bf16`: rounded to 16 bits. `onebit`: 1-bit Adam, the momentum as signs and scales. `topk`: what changed most; what was left out is sent later."""
    dp_topk: float = result(0.01, "(0, 1]")
    """`topk`: share of each tensor's elements that a copy sends."""
    dp_exact_steps: int = result(100, "> 0")
    """`onebit`: steps in which gradients are sent exactly, until AdamW's second moment is worth keeping as it is: a few times 1 / (1 - optim.beta2)."""
    overlap: int = free(0, ">= 0", most=1 << 16)
    """Under `sp`, into how many pieces the gathered stream is cut, to travel under the products: as many of each rank's stretch, rounded up. 1: one, nothing overlaps. 0: the fastest, measured at the start."""
    tp_compress: Literal["none", "bf16", "int8"] = result("none")
    """How activations and their gradients travel over `tp`: as they are, in bfloat16, or in 8 bits with a float32 scale a token. Rounds them, so it bears on the result."""
    links: str = free("")
    """By what each collective's algorithm is chosen: `measure`, the links as measured at the first start and kept in the run folder; or a links.json. Empty: always the library's own."""


@dataclass(frozen=True)
class Run:
    """A run: everything its result depends on but the corpus, and the rest of its settings."""

    folder: str = free("")
    """Where the run lives. Left out: runs/ and the run file's name."""
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    train: Train = Train()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    parallel: Parallel = Parallel()


@dataclass(frozen=True)
class Knob:
    """One field, as the reference page and the checks see it."""

    key: str
    type: Any
    default: Any
    result: bool
    within: Range
    most: int
    help: str


@functools.cache
def _help(section: type) -> dict[str, str]:
    """The string under each field of a section: Python keeps it in the source alone."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]).body
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def knobs(section: type = Run, prefix: str = "") -> Iterator[Knob]:
    """Every knob, in order, by its dotted key."""
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from knobs(typing.cast(type, field.type), f"{field.name}.")
        else:
            yield Knob(
                prefix + field.name, field.type, field.default, **field.metadata, help=_help(section)[field.name]
            )


def value(run: Run, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split("."), run)


def replaced(run: Run, values: dict[str, Any]) -> Run:
    """The run with some dotted keys set to other values."""
    sections: dict[str, dict[str, Any]] = {}
    for key, new in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = new
    top = sections.pop("", {})
    return dataclasses.replace(
        run, **top, **{section: dataclasses.replace(getattr(run, section), **new) for section, new in sections.items()}
    )


def result_knobs(run: Run) -> dict[str, Any]:
    """The knobs that make the run's identity, by dotted key."""
    return {knob.key: value(run, knob.key) for knob in knobs() if knob.result}
