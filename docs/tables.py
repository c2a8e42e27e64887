"""What the docs say that the code knows better: cog puts it in, and `cog --check` sees that it is still so."""

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import get_args, get_origin

import cog

ROOT = Path(__file__).parent.parent


def tree(folder: str = "outlast") -> None:
    """Print a line a file: its place and the first sentence of its docstring."""
    for path in sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent, path.name)):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        if said:
            cog.outl(f"- `{path.relative_to(ROOT)}` {said.splitlines()[0]}")


def knobs() -> None:
    """Print a table of knobs a section."""
    from outlast.config import knobs as every

    section = None
    for knob in every():
        before, section = section, knob.key.rpartition(".")[0]
        name = knob.key.rpartition(".")[2]
        if section != before:
            cog.outl(
                f"\n## [{section}]\n\n| knob | default | result | what |\n|---|---|---|---|"
                if section
                else "\n| knob | default | result | what |\n|---|---|---|---|"
            )
        default = json.dumps(list(knob.default) if isinstance(knob.default, tuple) else knob.default)
        choices = (
            f" One of {', '.join(f'`{c}`' for c in get_args(knob.type))}."
            if str(get_origin(knob.type)) == "typing.Literal"
            else ""
        )
        cog.outl(f"| `{name}` | `{default}` | {'yes' if knob.result else ''} | {knob.help}{choices} |")


def help_of(*words: str) -> None:
    """Print what `outlast WORDS --help` prints, 100 columns wide."""
    from outlast import cli

    os.environ.update(COLUMNS="100", TERM="dumb", NO_COLOR="1")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    cog.outl("```text\n" + "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines()) + "\n```")


def file(path: str) -> None:
    """Print a file of the repository."""
    cog.outl(f"```{'toml' if path.endswith('.toml') else 'text'}\n{(ROOT / path).read_text().rstrip()}\n```")


def results(name: str) -> None:
    """Print a benchmark's table as its JSON has it, with the command, the machine and the day."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    rows = found["rows"]
    columns = list(rows[0])
    shared = found.get("ranks", 1) > 1
    ranks = f", up to {found['ranks']} ranks, a thread each" if shared and found["threads"] == 1 else ""
    cog.outl(f"`{found['command']}`, {found['date']}: {_machine(found['machine'])}{ranks}\n")
    cog.outl("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cog.outl("| " + " | ".join(_number(row[column]) for column in columns) + " |")
    for goal in found.get("goals", []):
        cog.outl(f"\nGoal: {goal}")


def _machine(facts: dict) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())


def _number(given: object) -> str:
    return f"{given:.4g}" if isinstance(given, float) else str(given)
