"""What a training run says on the terminal: an opening panel, a line a step, a closing panel. Plain lines elsewhere."""

import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import outlast
from outlast import journal, settings
from outlast.checkpoint.store import Saved
from outlast.layout import degrees, passes
from outlast.model import hf
from outlast.plan import memory
from outlast.train.loop import Ending
from outlast.train.optimizer import Group
from outlast.train.start import Settled, Training, device_name, identity_hash
from outlast.train.watchers import Watcher


def size(count: float, unit: str = "B") -> str:
    """A number of bytes, or of anything, in thousands: 31.4 MB."""
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.3g} {prefix}{unit}" if prefix else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.3g} T{unit}"


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


def opening(console: Console, settled: Settled, groups: list[Group], saved: Saved | None) -> None:
    """Say what is about to run."""
    run, data, shape = settled.run, settled.corpus, settled.run.model
    batch, count = settings.batch_sequences(run), memory.parameters(shape)
    state = memory.state(shape, run.train.dtype, run.optim.name)
    kept = memory.activations(shape, run.train.dtype, min(batch, run.train.micro_batch), run.data.sequence_length)
    train_tokens, held_tokens = (sum(len(s) for s in part) for part in _parts(settled))
    damaged = f", {data.damaged} damaged passed over" if data.damaged else ""
    why = {
        "bfloat16": "weights and moments float32",
        "float32": "weights and moments too; auto takes bfloat16 where CUDA has it",
        "float64": "weights and moments too: for proofs",
    }
    per_step = passes(batch, run.train.micro_batch, 1)
    lines = [
        ("run", f"{run.folder}  identity {identity_hash(settled.identity)}"),
        ("device", f"{device_name(settled.device)}, {torch.get_num_threads()} threads, {_peak(settled)}"),
        ("compute", f"{run.train.dtype} ({why[run.train.dtype]})"),
        ("layout", " x ".join(f"{axis} {degree}" for axis, degree in degrees(run.parallel).items()) + " = 1 rank"),
        ("data", f"{size(train_tokens, 'tokens')} to learn from, {size(held_tokens, 'tokens')} held out, {settled.tokenizer.name}{damaged}"),
        ("model", f"{shape.num_layers} layers, width {shape.hidden_size}, {shape.num_heads}/{shape.num_kv_heads} heads of "
                  f"{shape.head_dim}, {size(sum(count.values()), 'parameters')}, all of them active"),
        ("export", hf.family(shape) or "no Hugging Face family has this shape: it cannot be exported"),
        ("memory", f"{size(state.total + kept)} a rank: weights {size(state.weights)}, gradients {size(state.gradients)}, "
                   f"moments {size(state.moments)}, activations {size(kept)}"),
        ("step", f"{batch} sequences x {run.data.sequence_length} = {batch * run.data.sequence_length:,} tokens, in {per_step} "
                 f"{'pass' if per_step == 1 else 'passes'} of at most {run.train.micro_batch} sequences"),
        ("schedule", f"{run.train.steps} steps, lr {run.optim.lr:g}, {run.schedule.name} after {run.schedule.warmup} of warmup"),
        *((f"group {group.name}", f"{len(group.parameters)} tensors, {size(sum(p.numel() for p in group.parameters.values()), 'parameters')}, "
           f"{group.optimizer}, weight decay {group.weight_decay:g}") for group in groups),
        ("checkpoint", f"going on from {saved.path.name}" if saved else "none yet: starting from the beginning"),
    ]  # fmt: skip
    facts(console, f"outlast {outlast.__version__} train", lines)
    for where, why_not in data.first_damaged[:3]:
        console.print(
            f"  passed over {where}: {why_not}", style="yellow", highlight=False, soft_wrap=True, markup=False
        )


def _parts(settled: Settled) -> tuple[list, list]:
    return [group.train for group in settled.corpus.groups], [group.held_out for group in settled.corpus.groups]


def _peak(settled: Settled) -> str:
    peak = memory.peak_flops(device_name(settled.device))
    return f"peak {peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "peak unknown, so MFU is n/a"


class Terminal(Console):
    """Where a run's words go; a reader that leaves does not end the run."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        mfu = "n/a" if numbers["mfu"] is None else f"{numbers['mfu']:.1%}"
        self.console.print(
            f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {known['loss']:.4f}  norm {known['grad_norm']:.3f}  "
            f"lr {known['lr']:.2e}  {size(known['tokens_per_second'], 'tok/s')}  MFU {mfu}  "
            f"mem {size(known['memory_bytes'])}  wait {known['data_wait_seconds'] / known['seconds']:.1%}",
            highlight=False,
            soft_wrap=True,
        )


def _not_evaluated(training: Training) -> str:
    return "n/a: no document is held out" if training.run.eval.samples else "n/a: eval.samples is 0"


def closing(console: Console, training: Training, ending: Ending) -> None:
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
