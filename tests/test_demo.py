"""`outlast demo` as a newcomer runs it: nothing tokenised before, two ranks, and what it shows."""

import json
import os
import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_demo(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    words = [sys.executable, "-m", "outlast", "demo"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tp 2 = 2 ranks, sequence parallel" in done.stdout
    losses = re.search(r"held-out loss: ([\d.]+) at step 0 → ([\d.]+) at step 80", done.stdout)
    assert float(losses[1]) - float(losses[2]) > 2
    assert "the formula to the byte" in done.stdout
    sent = dict(re.findall(r"(tp 2(?:, sp)?): .* kept, ([\d.]+ MB) sent over tp", done.stdout))
    assert sent["tp 2"] == sent["tp 2, sp"]
    assert 'What it writes after "class":' in done.stdout
    assert json.loads((tmp_path / "runs" / "demo-1" / "outcome.json").read_text())["outcome"] == "done"
