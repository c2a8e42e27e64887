"""The house against its own rules: sizes, names, what may be imported, and that the docs speak of what is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "outlast").rglob("*.py"))


def test_the_budget():
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert sum(lines.values()) < 14_000
    assert {str(path): count for path, count in lines.items() if count > 400} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_in_the_head_and_say_what_they_are_for(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            docstring = len((ast.get_docstring(node) or "").splitlines())
            most = 90 if (path.name, node.name) == ("loop.py", "train") else 60
            assert node.end_lineno - node.lineno + 1 - docstring <= most, f"{node.name} is long"
    if path.read_text().strip():
        assert ast.get_docstring(tree), "a file says at its top what it is for"
    assert not {"utils", "common", "core", "base", "manager", "registry", "factory"} & set(path.stem.split("_"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_model_never_reaches_torch_distributed():
    for path in (ROOT / "outlast" / "model").rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith("torch.distributed")], path


def test_one_file_reads_the_environment():
    for path in SOURCES:
        if path.name != "environment.py":
            assert not re.search(r"os\.environ|os\.getenv|expandvars", path.read_text()), path


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]), ids=lambda p: p.name)
def test_pages_name_what_is_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:outlast|tests|benchmarks|configs|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_the_map_has_every_file():
    text = (ROOT / "docs" / "map.md").read_text()
    for path in SOURCES:
        if path.read_text().strip():
            assert f"`{path.relative_to(ROOT)}`" in text, f"{path} is missing: make docs"


def test_the_reference_has_every_knob():
    from outlast.config import knobs

    text = (ROOT / "docs" / "reference.md").read_text()
    for knob in knobs():
        assert f"| `{knob.key.rpartition('.')[2]}` |" in text, f"{knob.key} is missing: make docs"


def test_run_files_are_valid():
    from outlast import config, settings

    for path in (ROOT / "configs").glob("*.toml"):
        settings.check(config.replaced(config.Run(), settings.read_file(path)))
