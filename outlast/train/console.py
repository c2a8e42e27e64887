"""What a training run says on the terminal: an opening panel, a line a step, a closing panel. Plain lines elsewhere."""

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import outlast
from outlast import config, journal, layout, records, settings
from outlast.checkpoint.store import Saved
from outlast.config import Run
from outlast.environment import Launched
from outlast.model import hf
from outlast.parallel import chosen_pieces, links
from outlast.parallel.mesh import Mesh
from outlast.plan import memory, traffic
from outlast.train.identity import identity_hash
from outlast.train.loop import Ending
from outlast.train.start import Settled, Training, device_name, parameter_groups
from outlast.train.watchers import Counted, Watcher


def size(count: float, unit: str = "B") -> str:
    """A number of bytes, or of anything, in thousands: 31.4 MB."""
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.3g} {prefix}{unit}" if prefix else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.3g} T{unit}"


def many(count: int, what: str) -> str:
    """A number of things: 1 rank, 2 ranks."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def facts(console: Console, title: str, lines: list[tuple[str, str]]) -> None:
    """Print named facts: a panel where a person looks on, else a line each."""
    if not console.is_terminal:
        told = (f"  {name}: {fact}" if name else f"  {fact}" for name, fact in lines)
        console.print(title, *told, sep="\n", soft_wrap=True, highlight=False, markup=False)
        return
    table = Table.grid(padding=(0, 2))
    for name, fact in lines:
        table.add_row(Text(name, style="bold"), Text(fact))
    console.print(Panel(table, title=title, title_align="left", expand=False))


def opening(console: Console, settled: Settled, saved: Saved | None, mesh: Mesh | None = None) -> None:
    """Say what is about to run; over which links, where the ranks are there already."""
    run, data, shape = settled.run, settled.corpus, settled.run.model
    batch, count = settings.batch_sequences(run), memory.parameters(shape)
    ranks, fed = layout.ranks(run.parallel), layout.data_rank(run.parallel, 0)[0]
    state = memory.state(shape, run.train.dtype, run.optim.name, run.parallel)
    kept, again = _activations(run, run.train.recompute)
    train_tokens, held_tokens = (sum(len(s) for s in part) for part in _parts(settled))
    damaged = f", {data.damaged} damaged passed over" if data.damaged else ""
    why = {
        "bfloat16": "weights and moments float32",
        "float32": "weights and moments too; auto takes bfloat16 where CUDA has it",
        "float64": "weights and moments too: for proofs",
    }
    per_step = layout.passes(batch, run.train.micro_batch, fed)
    sent = traffic.estimate(run, choices=mesh.choices if mesh else None)
    lines = [
        ("run", f"{run.folder}  identity {identity_hash(settled.identity)}"),
        ("device", f"{device_name(settled.device)}, {many(torch.get_num_threads(), 'thread')}{' a rank' if ranks > 1 else ''}, {_peak(settled)}"),
        ("compute", f"{run.train.dtype} ({why[run.train.dtype]})"),
        ("layout", _layout(run)),
        ("data", f"{size(train_tokens, 'tokens')} to learn from, {size(held_tokens, 'tokens')} held out, {settled.tokenizer.name}{damaged}"),
        ("model", f"{shape.num_layers} layers, width {shape.hidden_size}, {shape.num_heads}/{shape.num_kv_heads} heads of "
                  f"{shape.head_dim}, {size(sum(count.values()), 'parameters')}, all of them active"),
        ("export", hf.family(shape) or "no Hugging Face family has this shape: it cannot be exported"),
        ("memory", f"{size(state.total + kept + again)} a rank: weights {size(state.weights)}, gradients {size(state.gradients)}, "
                   f"moments {size(state.moments)}, activations {size(kept)}"
                   + (f", a block worked out again {size(again)}" if again else "")
                   + (f", gathered weights {size(state.gathered)}" if state.gathered else "")
                   + (f", owed to copies {size(state.owed)}" if state.owed else "")),
        *([("recompute", _recomputation(run))] if again else []),
        *([("compression", _compression(run))] if run.parallel.dp_compress != "none" else []),
        *([("traffic", told_traffic(sent))] if ranks > 1 else []),
        *(("links" if i == 0 else "", line) for i, line in enumerate(links.told(mesh, traffic.by_choice(run)) if mesh else ())),
        *(("pieces" if i == 0 else "", line) for i, line in enumerate(chosen_pieces.told(run, mesh) if mesh else ())),
        ("step", f"{batch} sequences x {run.data.sequence_length} = {batch * run.data.sequence_length:,} tokens, in {per_step} "
                 f"{'pass' if per_step == 1 else 'passes'} of at most {run.train.micro_batch} sequences{f' on each of {fed} ranks' if fed > 1 else ''}"),
        ("schedule", f"{run.train.steps} steps, lr {run.optim.lr:g}, {run.schedule.name} after {run.schedule.warmup} of warmup"),
        *((f"group {group.name}", f"{many(len(group.parameters), 'tensor')}, {size(sum(p.numel() for p in group.parameters.values()), 'parameters')}, "
           f"{group.optimizer}, weight decay {group.weight_decay:g}") for group in parameter_groups(settled)),
        ("checkpoint", f"going on from {saved.path.name}" if saved else "none yet: starting from the beginning"),
    ]  # fmt: skip
    facts(console, f"outlast {outlast.__version__} train", lines)
    for where, why_not in data.first_damaged[:3]:
        console.print(
            f"  passed over {where}: {why_not}", style="yellow", highlight=False, soft_wrap=True, markup=False
        )


def _activations(run: Run, recompute: str) -> tuple[int, int]:
    """Bytes a rank keeps for the backward pass of its largest micro-batch, and works out again of one block."""
    fed = layout.data_rank(run.parallel, 0)[0]
    most = min(len(layout.share(0, settings.batch_sequences(run), fed, 0)), run.train.micro_batch)
    what = (run.model, run.train.dtype, most, run.data.sequence_length, run.parallel)
    kept = memory.activations(*what, recompute=recompute, blocks=settings.recomputed(run))
    return kept, memory.again(*what, recompute)


def _recomputation(run: Run) -> str:
    """What is kept with and without."""
    kept = {kind: sum(_activations(run, kind)) for kind in ("none", "attention", "full")}
    blocks = f"{settings.recomputed(run)} of {run.model.num_layers} blocks"
    told = f"{run.train.recompute} in {blocks}; kept and worked out again at once: "
    return told + ", ".join(f"{kind} {size(number)}" for kind, number in kept.items())


def _layout(run: Run) -> str:
    """The degrees, and what else the ranks share."""
    degrees = (f"{axis} {degree}" for axis, degree in layout.degrees(run.parallel).items() if degree > 1)
    told = [" x ".join(degrees) + f" = {layout.ranks(run.parallel)} ranks"]
    if run.parallel.sp:
        told.append("sequence parallel" + (", gathering again" if run.parallel.sp_regather else ""))
        pieces = {0: "pieces to be measured", 1: "in one piece"}
        told.append(pieces.get(run.parallel.overlap, f"in {run.parallel.overlap} pieces"))
    if run.parallel.tp_compress != "none":
        told.append(f"activations rounded to {run.parallel.tp_compress} over tp")
    if layout.size(run.parallel, "sequence") > 1:
        among = "a rank, or its tp, has" if run.parallel.tp > 1 else "a rank has"
        told.append(f"{among} {traffic.tokens_here(run)} tokens of each sequence")
    if run.parallel.shard_sequence_ranks:
        told.append("which share weights too")
    return ", ".join(told) if layout.ranks(run.parallel) > 1 else "one rank"


def _compression(run: Run) -> str:
    """How copies send their gradients, and that the run is no longer the same under every layout."""
    parallel = run.parallel
    how = {
        "bf16": "gradients rounded to bfloat16",
        "topk": f"{parallel.dp_topk:.2%} of each gradient, the largest; the rest is sent later",
        "onebit": f"gradients exactly for {many(parallel.dp_exact_steps, 'step')}, then momentum as signs and scales, the second "
        "moment frozen: the traffic told is that of these later steps, and the norm told and clipped by an upper bound of the mean's",
    }[parallel.dp_compress]
    return f"dp_replicate sends {how}. The result depends on it, and on dp_replicate {parallel.dp_replicate}"


def told_traffic(sent: Mapping[tuple[str, str], traffic.Traffic]) -> str:
    """Bytes a rank sends in a step, by axis and collective."""
    axes: dict[str, list[str]] = {}
    for (axis, op), one in sent.items():
        axes.setdefault(axis, []).append(f"{size(one.bytes)} in {many(one.calls, op.replace('_', '-'))}")
    return "a rank sends at most, each step: " + "; ".join(f"{axis} {', '.join(ops)}" for axis, ops in axes.items())


def _parts(settled: Settled) -> tuple[list, list]:
    return [group.train for group in settled.corpus.groups], [group.held_out for group in settled.corpus.groups]


def _peak(settled: Settled) -> str:
    peak = memory.peak_flops(device_name(settled.device))
    return f"peak {peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "peak unknown, so MFU is n/a"


class Terminal(Console):
    """Where a run's words go; a reader that leaves does not end the run."""

    def print(self, *what: Any, **how: Any) -> None:
        """Print, while somebody reads; a terminal that was closed answers with an input/output error."""
        try:
            super().print(*what, **how)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminal(folder: Path, launched: Launched | None) -> Terminal:
    """Where this process's words go: the terminal; of several ranks only the first one's, with a copy in its log."""
    if launched is None or launched.journal is None:
        return Terminal(quiet=bool(launched and launched.rank))
    return Terminal(quiet=launched.rank > 0) if launched.rank else Copied(folder / "logs" / "rank-0.log")


class Copied(Terminal):
    """A terminal whose words are also appended to a file, without colours."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        with records.storage_errors("cannot write the log", log):
            self._log = Console(file=log.open("a", encoding="utf-8"), width=200)

    def print(self, *what: Any, **how: Any) -> None:
        """Print to both."""
        super().print(*what, **how)
        self._log.print(*what, **how)


class Lines(Watcher):
    """Watcher: a line a step."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps

    def evaluation(self, step: int, loss: float) -> None:
        """Print the loss."""
        self.console.print(
            f"step {step:>{len(str(self.steps))}}/{self.steps}  held-out loss {loss:.4f}", highlight=False
        )

    def update(self, step: int, numbers: dict[str, float | None]) -> None:
        """Print the step's numbers."""
        known = {name: number or 0.0 for name, number in numbers.items()}
        sent = [number for name, number in known.items() if name.startswith("comm.") and name.endswith(".seconds")]
        exposed = f"  comm {sum(sent) / known['seconds']:.1%}" if sent else ""
        mfu = "n/a" if numbers["mfu"] is None else f"{numbers['mfu']:.1%}"
        self.console.print(
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {known['loss']:.4f}  norm {known['grad_norm']:.3f}  "
            f"lr {known['lr']:.2e}  {size(known['tokens_per_second'], 'tok/s')}  MFU {mfu}  "
            f"mem {size(known['memory_bytes'])}  wait {known['data_wait_seconds'] / known['seconds']:.1%}{exposed}",
            highlight=False,
            soft_wrap=True,
        )


def _not_evaluated(training: Training) -> str:
    return "n/a: no document is held out" if training.run.eval.samples else "n/a: eval.samples is 0"


def _told_counted(counted: Counted) -> Iterator[str]:
    """What this rank has sent in all steps, beside the formulas' bytes."""
    for axis, formula in counted.formula.items():
        sent, waited = counted.sent[axis, "bytes"], counted.sent[axis, "seconds"]
        beside = "the formula to the byte" if sent == formula else f"the formula says {formula:,}"
        yield f"{axis}: {sent:,} B sent by rank 0, {beside}; waited {waited:.2f} s of {counted.seconds:.2f} s ({waited / counted.seconds:.1%})"


def closing(console: Console, training: Training, ending: Ending, counted: Counted) -> None:
    """Say what came of it."""
    run, folder = training.run, Path(training.run.folder)
    told = [line for line in journal.read(folder / "journal.jsonl") if line["event"] == "evaluation"]
    losses = [f"{line['loss']:.4f} at step {line['step']}" for line in told]
    lines = [
        ("steps", f"{training.step} of {run.train.steps}" + (f", left at {ending.signal}" if ending.signal else "")),
        (
            "held-out loss",
            " → ".join(dict.fromkeys([losses[0], losses[-1]])) if losses else _not_evaluated(training),
        ),
    ]
    if ending.tokens_per_second:
        lines.append(("speed", f"{size(ending.tokens_per_second, 'tokens/s')}, checkpoints and evaluations included"))
    lines += [("traffic" if i == 0 else "", told) for i, told in enumerate(_told_counted(counted))]
    if run.train.compile and ending.compile_seconds is not None:
        lines.append(
            (
                "compilation",
                f"{ending.compile_seconds:.1f} s in the first step, more than the second took; the first evaluation compiles too",
            )
        )
    lines.append(("run", f"{folder}: journal.jsonl, metrics.jsonl, checkpoints/"))
    if training.step < run.train.steps:
        lines.append(("go on", "the same command goes on from here"))
    facts(console, "finished" if training.step >= run.train.steps else "stopped", lines)


def sequence_parallelism(console: Console, run: Run) -> None:
    """Show what a run's ranks of `tp` keep and send with and without sequence parallelism, by the formulas."""
    lines = []
    for name, tp, sp, again in (
        ("alone", 1, False, False),
        (f"tp {run.parallel.tp}", run.parallel.tp, False, False),
        (f"tp {run.parallel.tp}, sp", run.parallel.tp, True, False),
        (f"tp {run.parallel.tp}, sp, sp_regather", run.parallel.tp, True, True),
    ):
        one = config.replaced(run, {"parallel.tp": tp, "parallel.sp": sp, "parallel.sp_regather": again})
        kept, _ = _activations(one, one.train.recompute)
        sent = traffic.total(traffic.estimate(one), "tp")
        lines.append((name, f"{size(kept)} of activations kept, {size(sent)} sent over tp"))
    facts(console, "what each rank keeps and sends in a step, by the formulas", lines)
