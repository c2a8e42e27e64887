"""The verbs. The only place that prints errors and picks exit codes; a verb's heavy imports come after it is known."""

import contextlib
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import outlast
from outlast import config, environment, errors, settings
from outlast.config import Run
from outlast.errors import OutlastError, UsageError

HELP = """outlast: long-context language models, trained on whatever machines there are

  outlast train [RUNFILE] [--section.knob VALUE ...]     train, or go on with a run, on as many ranks as [parallel] says
  outlast tokenize [RUNFILE] [--data.knob VALUE ...]     tokenise the corpus ahead of time
  outlast generate RUN "PROMPT"                          let a trained run continue a text
  outlast export RUN FOLDER                              write a run as a Hugging Face directory
  outlast demo                                           see it work on this machine, in under three minutes

outlast VERB --help lists what a verb takes; --debug shows where an error comes from; --version says which this is.
Exit codes: 0 done · 2 mend the command, file or data · 70 do not start again as it is · 75 start me again.
"""


@dataclass(frozen=True)
class TrainCommand(Run):
    """Train, or go on with a run: the same command resumes from the newest checkpoint. Knobs may stand in a run file."""

    dry_run: bool = False
    """Show the settings as resolved, parameters and memory, and leave."""
    profile: bool = False
    """Write a profiler's trace to trace.json in the run folder, for chrome://tracing or Perfetto: of three steps after two."""


@dataclass(frozen=True)
class TokenizeCommand(Run):
    """Tokenise a run's corpus ahead of time, into the cache the run will look in."""


@dataclass(frozen=True)
class GenerateCommand:
    """Let a trained run continue a text, on the CPU."""

    max_tokens: int = 200
    """Most tokens to make."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the draws."""


@dataclass(frozen=True)
class ExportCommand:
    """Write a run's newest checkpoint as a directory that transformers, vLLM and others read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit code.
    """
    environment.prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return dispatch(words)
    except OutlastError as error:
        if debug:
            traceback.print_exception(error)
        if not isinstance(error, _ToldError):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.INTERRUPTED
    except _LeftError as left:  # outside the loop, which finishes its step and says more
        if not ((launched := environment.launched()) and launched.journal):  # else its supervisor tells
            print("left at SIGTERM before or after the steps; the same command goes on", file=sys.stderr)
        return left.exit_code
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        signal.signal(signal.SIGTERM, before)
    return errors.DONE


def dispatch(words: Sequence[str]) -> int:
    """Do what the words say. Returns the exit code."""
    match words:
        case ["--version"]:
            print(outlast.__version__)
        case [] | ["-h" | "--help" | "help"]:
            print(HELP, end="")
        case [verb, *args]:
            if verb not in VERBS:
                raise UsageError(f"there is no verb {verb!r}", fix=errors.nearest(verb, VERBS))
            return VERBS[verb](args)
    return errors.DONE


class _LeftError(BaseException):
    """SIGTERM came; not an Exception, so that nothing on the way takes it for a failure."""

    exit_code = errors.RESTART


def _leave(_number: int, _frame: object) -> None:
    raise _LeftError


def read_run(command: type, args: Sequence[str], verb: str) -> tuple[Any, Callable[[str], str]]:
    """Settle a verb's knobs: defaults, then the weights' shape, then the run file, then the command line.

    Args:
        command: the verb's dataclass, a Run.
        args: the words after the verb; the first may be a run file.
        verb: its name.

    Returns:
        The filled dataclass, and a function that says where a knob was set.

    Raises:
        UsageError: a setting is unknown, unreadable, or at odds with the weights.
    """
    path = Path(args[0]) if args and not args[0].startswith("-") else None
    words = args[1:] if path else args
    in_file = settings.read_file(path) if path else {}
    named = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}

    def origin(key: str) -> str:
        section, _, name = key.rpartition(".")
        if key in named:
            return f"set by --{key.replace('_', '-')}"
        if key in in_file:
            return f"set in {path} [{section}] {name}" if section else f"set in {path} {name}"
        return f"at its default; set it in [{section}] {name} or by --{key.replace('_', '-')}" if section else ""

    start = {"folder": f"runs/{path.stem if path else 'run'}"} | in_file
    if path and path.name == "run.toml" and (path.parent / "identity.json").exists():
        start["folder"] = str(path.parent)  # a run's own record: it may have been moved since
    with where_set(origin):
        run = settings.read_command_line(command, words, config.replaced(command(), start), f"outlast {verb}")
        if run.model.weights:
            from outlast.model import hf

            shape = hf.read_shape(Path(run.model.weights))
            default = config.replaced(command(), start | shape | in_file)
            run = settings.read_command_line(command, words, default, f"outlast {verb}")
            for key, theirs in shape.items():
                # The context may be stretched; all else the weights were made for.
                if config.value(run, key) != theirs and not key.startswith("model.rope_"):
                    raise UsageError(
                        f"{key} is {config.value(run, key)}, and the weights in {run.model.weights} have {theirs}",
                        fix="leave it out: the shape is read from the weights",
                        key=key,
                    )
    return run, origin


@contextlib.contextmanager
def where_set(origin: Callable[[str], str]) -> Iterator[None]:
    """Add to an error about a knob where that knob was set."""
    try:
        yield
    except OutlastError as error:
        if error.key and not error.where:
            error.where = origin(error.key)
        raise


@contextlib.contextmanager
def progress(console: Any) -> Iterator[Callable[[int, int], None]]:
    """A bar over the bytes read where a person waits, elsewhere a line every tenth of them."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    tenths = [0]

    def line(done: int, total: int) -> None:
        if total and 10 * done // total > tenths[-1]:
            tenths.append(10 * done // total)
            console.print(f"tokenising: {10 * tenths[-1]}%", highlight=False)

    if not console.is_terminal:
        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing the tokeniser", total=None)
        yield lambda done, total: bar.update(task, description="tokenising", completed=done, total=total)


def train(args: Sequence[str]) -> int:
    """The verb `train`: alone, as one of several ranks, or as the supervisor that starts them."""
    launched = environment.launched()
    try:
        command, origin = read_run(TrainCommand, args, "train")
        from outlast.train import command as training

        with where_set(origin):
            run = Run(**{field.name: getattr(command, field.name) for field in dataclasses.fields(Run)})
            debug = ["--debug"] if "--debug" in sys.argv else []
            rank = [sys.executable, "-u", "-m", "outlast", "train", *args, *debug]
            return training.start(run, command.dry_run, command.profile, rank, launched, progress)
    except Exception as error:
        if launched and launched.ranks > 1:
            raise failed_rank(launched, error) from error
        raise


class _ToldError(OutlastError):
    """A rank's failure that its supervisor knows of, and tells."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def failed_rank(launched: environment.Launched, error: Exception) -> Exception:
    """Tell the supervisor, where there is one, why this rank fails. Returns what is left to be told here."""
    from outlast import journal
    from outlast.comm.collectives import is_peer_loss

    if is_peer_loss(error):
        what = f"rank {launched.rank} lost the connection to another rank: {str(error).splitlines()[0]}"
        error = errors.PeerError(
            what, fix="what ended that one is the cause; the same command goes on from the newest checkpoint"
        )
    return _ToldError(getattr(error, "exit_code", 1)) if journal.report(launched, error) else error


def tokenize(args: Sequence[str]) -> int:
    """The verb `tokenize`."""
    run, origin = read_run(TokenizeCommand, args, "tokenize")
    from rich.console import Console

    from outlast.data.batches import Feed
    from outlast.data.tokens import open_tokenizer, prepare
    from outlast.train import console as say

    console = Console()
    with where_set(origin):
        settings.check(run)
        with progress(console) as report:
            tokenizer = open_tokenizer(run.data, run.model.weights)
            corpus = prepare(run.data, tokenizer, report)
        feed = Feed(corpus, run.data, run.train.seed, tokenizer.eos)
    lines = [("tokeniser", f"{tokenizer.name}, {tokenizer.vocab_size} tokens"), ("fingerprint", corpus.fingerprint)]
    for group in corpus.groups:
        for name, part in (("to learn from", group.train), ("held out", group.held_out)):
            lines.append((f"{group.name}, {name}", f"{len(part):,} tokens in {part.documents:,} documents"))
    samples = sum(map(len, feed.samples))
    lines.append(("samples", f"{samples:,} of {run.data.sequence_length:,} tokens, {run.data.packing} packing"))
    lines.append(("read", f"{say.size(corpus.bytes)}, {corpus.empty:,} empty documents left out"))
    lines.append(("damaged", f"{corpus.damaged} passed over" if corpus.damaged else "none"))
    lines += [("", f"{where}: {why}") for where, why in corpus.first_damaged]
    lines.append(("cache", str(corpus.folder)))
    say.facts(console, "outlast tokenize", lines)
    return errors.DONE


def generate(args: Sequence[str]) -> int:
    """The verb `generate`."""
    (run, prompt), command = positional(GenerateCommand, args, "generate", ("RUN", '"PROMPT"'))
    from outlast.serve import generate as serving
    from outlast.serve.trained import open_trained

    options = dataclasses.asdict(command)
    draws = (
        command.max_tokens >= 1,
        0 <= command.temperature < float("inf"),
        0 < command.top_p <= 1,
        0 <= command.seed < 1 << 63,
    )
    if not all(draws):
        told = ", ".join(f"{name.replace('_', '-')} {given}" for name, given in options.items())
        fix = "max-tokens at least 1, temperature at least 0, top-p above 0 and at most 1, seed from 0 to 2^63 - 1"
        raise UsageError(f"cannot draw with {told}", fix=fix)
    if any(0xD800 <= ord(letter) < 0xE000 for letter in prompt):
        raise UsageError("the prompt is not UTF-8", fix="check the terminal's encoding")
    print(prompt + serving.text(open_trained(Path(run)), prompt, **options))
    return errors.DONE


def export(args: Sequence[str]) -> int:
    """The verb `export`."""
    (run, folder), _ = positional(ExportCommand, args, "export", ("RUN", "FOLDER"))
    from outlast.serve import trained

    opened = trained.open_trained(Path(run))
    trained.export(opened, Path(folder))
    print(f"step {opened.step} of {run} is in {folder}")
    return errors.DONE


def positional(command: type, args: Sequence[str], verb: str, names: tuple[str, ...]) -> tuple[list[str], Any]:
    """Split a verb's arguments into its leading words and its options."""
    if "-h" in args or "--help" in args:
        print(f"outlast {verb} {' '.join(names)}\n")
        settings.read_command_line(command, ["--help"], command(), f"outlast {verb}")
    words = list(args[: len(names)])
    if len(words) < len(names) or words[0].startswith("--"):
        raise UsageError(f"outlast {verb} takes {' '.join(names)}", fix=f"see outlast {verb} --help")
    return words, settings.read_command_line(command, args[len(names) :], command(), f"outlast {verb}")


def demo(args: Sequence[str]) -> int:
    """The verb `demo`: a short run on the running Python's own library source, and what its model then writes."""
    if args:
        raise UsageError("outlast demo takes nothing", fix="outlast train takes settings")
    folder = next(path for n in range(1, 10_000) if not (path := Path(f"runs/demo-{n}")).exists())
    # Muon learns the most from the few tokens that a laptop reads in a minute.
    chosen = {"data.tokenizer": "bpe", "data.sequence_length": 256, "optim.name": "muon", "optim.lr": 1e-2}
    chosen |= {"train.steps": 80, "eval.every": 40, "eval.samples": 16, "parallel.tp": 2}
    words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    code = train(["--folder", str(folder), *words, "--parallel.sp"])
    if code == errors.DONE:
        from outlast.serve import generate as serving
        from outlast.serve.trained import open_trained
        from outlast.train import console as say

        say.sequence_parallelism(say.Terminal(), config.replaced(Run(), settings.read_file(folder / "run.toml")))
        told = serving.text(open_trained(folder), "class", max_tokens=120, temperature=0.6, top_p=0.95, seed=0)
        print(f'\nWhat it writes after "class":\n\nclass{told}\n\nTry: outlast generate {folder} "import"')
    return code


VERBS: Final = {"train": train, "tokenize": tokenize, "generate": generate, "export": export, "demo": demo}
