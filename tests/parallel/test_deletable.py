"""Each parallelism is one file and one line of parallel.apply: without them, what does not need it trains as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys
from pathlib import Path
import outlast, layouts
from ranks import Ranks

if __name__ == "__main__":
    copy, folder, gone = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    assert Path(outlast.__file__).parent == copy / "outlast", outlast.__file__
    assert not (copy / "outlast" / "parallel" / f"{gone}.py").exists()
    alone = layouts.put_together([layouts.trained(layouts.words(folder, {}, "alone"))])
    with Ranks() as groups:
        for i, name in enumerate(sys.argv[4:]):
            layout = layouts.LAYOUTS[name]
            words = layouts.words(folder, layout, f"run-{i}")
            together = layouts.put_together(groups.run(layouts.ranks_of(layout), layouts.on_rank, words))
            worst = max(layouts.furthest(together, alone).values())
            print(f"without {gone}, {name}: worst {worst:.1e}")
            assert worst <= 1e-9
"""


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("tensor_parallel", ["dp_replicate 2 x dp_shard 2"]),
        ("data_parallel", ["tp 2 + sp x dp_replicate 2"]),
        ("ring_attention", ["ulysses 2 x tp 2 + sp"]),
        ("ulysses", ["ring 2 x tp 2 + sp"]),
    ],
)
def test_a_parallelism_can_be_deleted(tmp_path, gone, left):
    shutil.copytree(ROOT / "outlast", tmp_path / "outlast", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "outlast" / "parallel" / f"{gone}.py").unlink()
    composed = tmp_path / "outlast" / "parallel" / "__init__.py"
    lines = composed.read_text().splitlines(keepends=True)
    calls = [line for line in lines if line.strip().startswith(f"{gone}.apply(")]
    assert len(calls) == 1
    text = "".join(line for line in lines if line not in calls)
    imported = re.search(r"^from outlast.parallel import (.*)$", text, re.M)
    others = [name for name in imported[1].split(", ") if name != gone]
    assert len(others) == len(imported[1].split(", ")) - 1
    composed.write_text(text.replace(imported[0], f"from outlast.parallel import {', '.join(others)}"))
    (tmp_path / "program.py").write_text(PROGRAM)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests")])}
    command = [sys.executable, tmp_path / "program.py", tmp_path, tmp_path / "runs", gone, *left]
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
