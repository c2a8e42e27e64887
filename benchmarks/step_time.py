"""A training step of ours against transformers' in one process, and against torch's own parallelism over ranks.

Goals: median ratio ours / theirs at most 1.0, or inside the spread of ours against itself.

A step is forward, loss, backward, clipping and a fused AdamW update, in float32 on the CPU, one document a sequence.

In one process: against LlamaForCausalLM, same weights, batch, threads and optimizer. Beside it the limit: the step's
matrix products alone, same shapes and threads, forward and both backward ones.

Over 2 and 4 ranks, a thread each (benchmarks/rank_steps.py): tensor and sequence parallelism against a Llama under
`parallelize_module`, sharded data parallelism against the same model under plain `fully_shard`. Both run in the same
ranks, in turn, each step begun together; a step takes as long as on its slowest rank. Losses must agree to 1e-4.

    python -m benchmarks.step_time [--check] [--rounds N] [--only one|ranks]
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure, rank_steps
from outlast.config import Model, Run
from outlast.model.transformer import Packing, Transformer
from outlast.parallel import gradients, mesh
from outlast.plan import memory
from outlast.train.optimizer import Optimizer, clip

GOAL = "median ratio ours / transformers at most 1.0, or inside the spread of ours against itself"
THREADS = 2
LR = 1e-5
CASES = {
    "4 layers x 256, vocabulary 4,096, 8 x 512 tokens": (replace(Model(), vocab_size=4096), 8, 512),
    "8 layers x 512, vocabulary 32,000, 2 x 512 tokens": (
        replace(
            Model(),
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1408,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            tie_embeddings=False,
        ),
        2,
        512,
    ),
    "4 layers x 256, vocabulary 257, 2 x 2,048 tokens": (replace(Model(), vocab_size=257), 2, 2048),
}


def ours(model: Transformer, tokens: Tensor, targets: Tensor) -> Callable[[], float]:
    """Our step on a batch. Calling it returns the mean loss."""
    model.train()
    run = Run(model=model.shape)
    alone = mesh.make(run.parallel, torch.device("cpu"))
    parts = gradients.parts(model, run, alone)
    optimizer = Optimizer(parts, run, alone)
    batch, length = tokens.shape
    packing = Packing.of(torch.arange(batch), torch.arange(length).repeat(batch, 1), ((length,),) * batch)

    def step() -> float:
        loss = model(tokens, targets, packing) / tokens.numel()
        loss.backward()
        gradients.complete(parts, alone)
        clip(parts, alone, 1.0)
        optimizer.step(LR)
        return loss.item()

    return step


def theirs(shape: Model, weights: Transformer, tokens: Tensor, targets: Tensor) -> Callable[[], float]:
    """The same by transformers, begun from the same weights."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    named = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in weights.state_dict().items()}
    model.load_state_dict(named)
    model.train()
    decays = [p for p in model.parameters() if p.dim() == 2 and p is not model.model.embed_tokens.weight]
    others = [p for p in model.parameters() if p.dim() == 1 or p is model.model.embed_tokens.weight]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        # shift_labels: targets as they are, so that both learn from the same places.
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def products(shape: Model, batch: int, length: int) -> Callable[[], None]:
    """The step's matrix products alone: what no rearrangement of the rest could go below."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    d, f = shape.hidden_size, shape.intermediate_size
    sizes = [(d, query), (d, key), (d, key), (query, d), (d, f), (d, f), (f, d)] * shape.num_layers + [
        (d, shape.vocab_size)
    ]
    pairs = [(torch.randn(batch * length, i), torch.randn(o, i), torch.randn(batch * length, o)) for i, o in set(sizes)]
    by_size = dict(zip(set(sizes), pairs, strict=True))

    def run() -> None:
        for size in sizes:
            x, w, g = by_size[size]
            F.linear(x, w)
            g @ w
            g.T @ x

    return run


def one_process(rounds: int) -> Iterator[dict[str, Any]]:
    """Measure every case of one process. Yields a row of each."""
    torch.set_num_threads(THREADS)
    for name, (shape, batch, length) in CASES.items():
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, shape.vocab_size, (batch, length + 1), generator=generator)
        batch_of = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        model = Transformer.on(torch.device("cpu"), shape, torch.float32, seed=0)
        peer = theirs(shape, model, *batch_of)
        mine = ours(model, *batch_of)
        losses = [(mine(), peer()) for _ in range(2)]
        if any(abs(a - b) > 1e-4 for a, b in losses):
            sys.exit(f"the two do not compute the same: {name}: {losses}")
        pair = measure.paired(mine, peer, rounds)
        limit = measure.paired(products(shape, batch, length), products(shape, batch, length), rounds).a_seconds
        flops = batch * length * memory.flops_per_token(shape, length)
        yield {
            "step": name,
            "ours s": pair.a_seconds,
            "transformers s": pair.b_seconds,
            "ratio": pair.ratio,
            "A/A spread": f"{pair.spread[0]:.3f}-{pair.spread[1]:.3f}",
            "products alone s": limit,
            "products / ours": limit / pair.a_seconds,
            "GFLOP/s": flops / pair.a_seconds / 1e9,
            "met": pair.meets(1.0),
        }


def told(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, each told as it comes: all of them take minutes."""
    for row in rows:
        print(f"{row['step']}: {row['ratio']:.3f}", flush=True)
        yield row


def main() -> None:
    """Measure, print, save; with --check fail where a goal is missed, the figures on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("one", "ranks"), default="")
    options = parser.parse_args()
    rows = []
    if options.only != "ranks":
        rows += (alone := list(told(one_process(options.rounds))))
        measure.show("a step in one process", alone)
        measure.save("step_time", [GOAL], alone, threads=THREADS)
    if options.only != "one":
        with measure.worker_groups() as groups:
            rows += (over := list(told(rank_steps.rows(groups, options.rounds))))
        measure.show("a step over ranks, a thread each", over)
        measure.save("step_time_ranks", rank_steps.GOALS, over, ranks=4)
    missed = [f"{row['step']}: {row['ratio']:.3f}" for row in rows if not row["met"]]
    ratios = ", ".join(f"{row['ratio']:.3f}" for row in rows)
    print("missed: " + "; ".join(missed) if missed else f"met: ratios {ratios}")
    sys.exit(bool(options.check and missed))


if __name__ == "__main__":
    main()
