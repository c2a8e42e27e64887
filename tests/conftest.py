"""Shapes and types in signatures are checked while the tests run; a module imported before this would escape."""

import os
import subprocess

from jaxtyping import install_import_hook

from outlast import environment

environment.prepare()  # before torch is loaded
install_import_hook("outlast.model", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from ranks import Ranks  # noqa: E402

settings.register_profile("outlast", deadline=None, print_blob=True)
settings.load_profile("outlast")


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def ranks(request):
    """Worker groups, started once and shared: see tests/ranks.py."""
    with Ranks(request.config.getini("filterwarnings"), checked=True) as groups:
        yield groups


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, so that a disk can really be full."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
