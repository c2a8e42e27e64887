"""Make docs/run.svg: a real run, ended by SIGTERM and gone on with, as a terminal shows it.

python docs/picture.py
"""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 118
COMMAND = [
    "train",
    str(Path(__file__).parent.parent / "configs" / "tiny.toml"),
    "--train.steps",
    "60",
    "--train.batch",
    "4",
]


def run(folder: str, until: str, *more: str) -> list[str]:
    """Run the command, ended by SIGTERM once a line holds `until`. Returns what it printed."""
    told = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-u", "-m", "outlast", *COMMAND, *more]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=told, cwd=folder) as process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if until and until in line:
                process.send_signal(signal.SIGTERM)
    return [*lines, f"[exit code {process.returncode}]"]


def shortened(lines: list[str]) -> list[str]:
    """All but the inner step lines, blank ones, the progress bar, and what the corpus is known to be damaged at."""
    steps = [i for i, line in enumerate(lines) if re.search(r"step +\d+/", line)]
    lines = ["  …" if i == steps[2] else line for i, line in enumerate(lines) if i not in steps[3:-2]]
    return [
        line for line in lines if Text.from_ansi(line).plain.strip() and not re.search("  passed over|tokenis", line)
    ]


def main() -> None:
    """Run twice, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        first = shortened(run(folder, "step  6/"))
        second = shortened(run(folder, "", "--train.stop-at", "12"))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown = ["$ outlast train configs/tiny.toml --train.steps 60            # SIGTERM after step 6", *first]
    shown += ["$ outlast train configs/tiny.toml --train.steps 60 --train.stop-at 12", *second]
    console.print(Text.from_ansi("\n".join(shown)))
    no_web_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    no_web_fonts = no_web_fonts.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    Path(__file__).with_name("run.svg").write_text(console.export_svg(title="outlast", code_format=no_web_fonts))


if __name__ == "__main__":
    main()
