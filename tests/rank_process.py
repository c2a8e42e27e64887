"""The processes behind tests/ranks.py: a template that has imported everything, and the ranks that it forks."""

import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import pickle
import pkgutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def template(descriptor: int, warning_filters: list[str]) -> None:
    """Fork and end ranks as the socket asks, till it closes. Holds no store and no thread, or a fork would break them."""
    link = socket.socket(fileno=descriptor)
    package = importlib.import_module("outlast")
    for module in pkgutil.walk_packages(package.__path__, "outlast.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            with suppress(Exception):  # who needs a module that cannot be imported is told when it is used
                importlib.import_module(module.name)
    importlib.import_module("torch.distributed.fsdp")
    for text in warning_filters:
        parse = importlib.import_module("_pytest.config").parse_warning_filter
        warnings.filterwarnings(*parse(text, escape=False))
    gc.collect()
    gc.freeze()  # so that a rank's collections do not copy the pages it shares
    children: set[int] = set()
    with suppress(OSError):  # whoever asked has gone
        while True:
            text, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 250)
            if not text:
                break
            order = json.loads(text)
            if "fork" in order:
                answer = _fork(link, order["fork"], descriptors)
                children.update(answer)
            else:
                answer = _end(order["end"])
                children.difference_update(order["end"])
            link.sendall(json.dumps(answer).encode())
    _end(list(children))
    os._exit(0)


def _end(pids: list[int]) -> list[int]:
    for pid in pids:  # all are children not yet waited for: no other process can have the number
        os.kill(pid, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _fork(link: socket.socket, n: int, descriptors: list[int]) -> list[int]:
    """Fork n ranks; descriptors are the n connections and the n files for stacks. Returns the process ids."""
    listener = socket.create_server(("127.0.0.1", 0))  # listens before any rank is there: no race for a free port
    pids = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            try:
                link.close()
                for other in set(descriptors) - {descriptors[rank], descriptors[n + rank]}:
                    os.close(other)  # or another rank's connection would stay open when that rank dies
                _live(functools.partial(_join, rank, n, listener), Connection(descriptors[rank]), descriptors[n + rank])
            finally:
                os._exit(1)
        pids.append(pid)
    listener.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


def _live(step: Callable[[], Any], connection: Connection, stacks: int) -> None:
    """A rank's life: join the group, then answer calls until one fails or nobody asks any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the template, however that ends
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    while True:
        try:
            message = pickle.dumps((True, packed(step())))
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
            os._exit(1)  # peers that wait for this rank in a collective see its connection close
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        try:
            connection.send_bytes(message)
            step = functools.partial(_call, *pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)


def _join(rank: int, n: int, listener: socket.socket) -> None:
    """The process group; rank 0 keeps its store."""
    port = listener.getsockname()[1]
    held = listener.detach() if rank == 0 else None
    listener.close()
    store = dist.TCPStore("127.0.0.1", port, n, rank == 0, wait_for_workers=False, master_listen_fd=held)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)


def _call(path: list[str], folder: str, reference: str, arguments: bytes) -> tuple[bool, Any]:
    """Whether the process group outlived the function, and the function's result."""
    sys.path[:] = path
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    module, _, name = reference.partition(":")
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    args, kwargs = pickle.loads(arguments)
    with warnings.catch_warnings():
        result = function(*args, **kwargs)
    if not dist.is_initialized():
        return False, result
    together = torch.ones(1)
    dist.all_reduce(together)
    if together.item() != dist.get_world_size():
        raise RuntimeError(f"{reference} left collectives that not every rank has joined")
    return True, result


class _Pickler(pickle.Pickler):
    """Copies tensors: torch's own way for processes shares memory, and pickles the whole storage of a view."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise TypeError("a DTensor belongs to its process group: pass .to_local() or .full_tensor()")
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        content = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return _tensor, (content.numpy(), obj.dtype, obj.shape)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)


def packed(content: Any) -> bytes:
    """Pickled, tensors as copies without their autograd history."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(content)
    return file.getvalue()
