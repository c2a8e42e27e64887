"""Models this small run on one thread: a second one only waits, and long where the machine is busy."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_two_threads):
    torch.set_num_threads(1)
