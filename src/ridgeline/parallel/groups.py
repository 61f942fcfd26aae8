"""Processes and meshes: `start` under a launcher, `mesh` by names, and `spawn`, which runs a function on every rank.

`spawn` keeps its processes, since importing torch takes longer than most of what they run. They are forked from a
server that has imported torch, and meet through a file, so that no port is taken.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ridgeline.op import RidgelineError

# torch 2.13 renamed these, and warns of the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What a launcher puts into the environment; then what torchrun adds.
LAUNCHED = RANK, WORLD, HOST, PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
LOCAL, AGENT_SERVES, RESTARTS = "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
GRACE = 5.0  # seconds that the other ranks get to end after one has failed
at_leave: list[Callable[[], None]] = []  # drop what other modules keep by group
Ways = tuple[str, int, int, str, float, int]  # backend, rank, world, file, timeout in seconds, threads


def size(group: Any = None) -> int:
    """Returns the ranks of a group (None: all), 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank(group: Any = None) -> int:
    """Returns this process's rank in a group (None: all), 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def start(backend: str | None = None, *, timeout: float = 60.0) -> torch.device:
    """Joins the processes that a launcher (torchrun) started, and returns this one's device.

    backend: "nccl" or "gloo"; None takes nccl if there is a GPU for each local process. timeout: seconds that a
    collective, and the start, may take. Raises RidgelineError, on each rank that can still be reached, without a
    launcher, if the ranks were started with different world sizes, or if one is missing."""
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing:
        raise RidgelineError(
            f"parallel: no launcher started this process, since {', '.join(missing)} is not set; "
            "start it with: torchrun --nproc-per-node N"
        )
    here, world, port = (_number(name) for name in (RANK, WORLD, PORT))
    local = _number(LOCAL, here)
    if not 0 <= here < world:
        raise RidgelineError(f"parallel: RANK must be between 0 and WORLD_SIZE - 1, but is {here} of {world}")
    if not 0 < port < 2**16:
        raise RidgelineError(f"parallel: MASTER_PORT must be between 1 and {2**16 - 1}, but is {port}")
    backend = backend or ("nccl" if torch.cuda.device_count() > local else "gloo")
    device = _device(backend, local)
    if not dist.is_initialized():
        store = _meet(os.environ[HOST], port, here, world, timeout)
        dist.init_process_group(backend, store=store, rank=here, world_size=world, timeout=timedelta(seconds=timeout))
    return device


def ready() -> None:
    """Raises RidgelineError if there is no process group yet."""
    if not dist.is_initialized():
        raise RidgelineError("parallel: there is no process group yet; call parallel.start() first")


def leave() -> None:
    """Leaves the process group, if there is one, and drops what was kept for it."""
    for drop in at_leave:
        drop()
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh(device: str | None = None, **dims: int) -> DeviceMesh:
    """Returns a mesh of named dimensions, the last of neighbouring ranks: `mesh(dp=4, tp=2)`.

    device: "cuda" or "cpu"; None takes that of the backend. Raises RidgelineError if the dimensions do not multiply to
    the number of ranks."""
    world, ranks = size(), 1
    for many in dims.values():
        ranks *= many
    if not dims or min(dims.values()) < 1 or ranks != world:
        says = " x ".join(f"{name}={many}" for name, many in dims.items()) or "nothing"
        raise RidgelineError(f"parallel: a mesh of {says} has {ranks} ranks, but there are {world}")
    kind = device or ("cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu")
    return init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))


@contextmanager
def answered(what: str = "the step") -> Iterator[None]:
    """Turns a collective's failure, because another rank has ended or does not answer, into one sentence."""
    try:
        yield
    except RidgelineError:
        raise
    except (dist.DistError, RuntimeError) as error:
        said = str(error)
        signs = "Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "timeout", "peer"
        if not isinstance(error, dist.DistError) and not any(sign in said for sign in signs):
            raise
        raise RidgelineError(
            f"parallel: rank {rank()} of {size()} cannot go on with {what}, because another rank has ended or did not "
            "answer in time"
        ) from error


@contextmanager
def pretend(world: int, rank: int = 0) -> Iterator[None]:
    """Inside this context the process is one rank of a world without others: collectives return at once.

    It shows calls, bytes, memory and this rank's own time; values are meaningless."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        leave()


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise RidgelineError(f"parallel: {name} must be a whole number, but is {text!r}")
    return int(text)


def _device(backend: str, local: int) -> torch.device:
    """Returns the device of the local rank under a backend."""
    if backend not in ("gloo", "nccl"):
        raise RidgelineError(f"parallel: the backend must be gloo or nccl, but is {backend!r}")
    if backend == "gloo":
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise RidgelineError(
            f"parallel: nccl needs a GPU for each local rank, and rank {local} has none of "
            f"{torch.cuda.device_count()}; gloo runs on the CPU"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _meet(host: str, port: int, here: int, world: int, timeout: float) -> dist.Store:
    """Returns the store of all ranks, once each has said that it is one of `world`."""
    agent = os.environ.get(AGENT_SERVES) == "True"  # torchrun's own process serves
    again = os.environ.get(RESTARTS, "0")
    end = time.monotonic() + timeout
    try:
        whole = dist.TCPStore(host, port, None, here == 0 and not agent, timedelta(seconds=timeout), False)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RidgelineError(
            f"parallel: rank {here} cannot reach rank 0 at {host}:{port} within {timeout:g} s"
        ) from error
    store = dist.PrefixStore(f"ridgeline{again}", whole)
    wrong = None
    try:
        if store.add(f"taken {here}", 1) > 1:
            wrong = f"two processes call themselves rank {here}"
        store.set(f"world {here}", str(world))
        for other in [] if wrong else range(world):
            left = timedelta(seconds=max(0.1, end - time.monotonic()))
            try:
                store.wait([f"world {other}"], left)
            except (dist.DistError, RuntimeError):
                wrong = f"rank {other} of {world} did not start within {timeout:g} s"
                break
            if (said := int(store.get(f"world {other}"))) != world:
                wrong = f"rank {other} was started with a world of {said}, and rank {here} with {world}"
                break
        store.add("seen", 1)
        if wrong and here == 0 and not agent:  # it serves the others: they must read before it ends
            until = min(end, time.monotonic() + GRACE)
            while time.monotonic() < until and store.add("seen", 0) < 2:
                time.sleep(0.05)
            time.sleep(0.2)
    except (dist.DistError, RuntimeError) as error:
        raise RidgelineError(f"parallel: rank {here} lost rank 0 at {host}:{port} while the ranks met") from error
    if wrong:
        raise RidgelineError(f"parallel: {wrong}")
    return dist.PrefixStore("default", store)


# --- a pool of processes


@dataclass
class Outcome:
    """What a rank's function returned, or what it raised."""

    value: Any = None
    error: str | None = None  # one line: the exception's type and message
    trace: str = ""
    refused: bool = False  # the exception was a RidgelineError


class Worker:
    """A process that runs functions as one rank."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor"]
        )
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_pool: list[Worker] = []


def spawn(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
    threads: int = 1,
    check: bool = True,
) -> list[Any]:
    """Runs `fn(*args)` on every rank of a process group of its own, and returns what each rank returned.

    fn: a function of a module's top level, as pickle demands. backend: "nccl" gives each rank its GPU as the current
    one. timeout: seconds for one collective, and about so for the whole. threads: of torch, in each process.
    check: raises RidgelineError if a rank fails, with the first one's message; False returns an `Outcome` of each."""
    if world < 1:
        raise RidgelineError(f"parallel: a world has at least 1 rank, but {world} was asked for")
    _device(backend, world - 1) if backend == "nccl" else _device(backend, 0)
    for dead in [w for w in _pool if not w.process.is_alive()]:
        _forget(dead)
    while len(_pool) < world:
        _pool.append(Worker())
    workers = _pool[:world]
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        file = os.path.join(folder, "store")
        for n, worker in enumerate(workers):
            ways: Ways = backend, n, world, file, timeout, threads
            worker.pipe.send_bytes(pickle.dumps((fn, args, ways)))
        outcomes = _gathered(workers, timeout, check)
    if check:
        failed = [(n, o) for n, o in enumerate(outcomes) if o.error]
        if failed:
            # The rank that failed by itself explains more than those that lost it.
            n, first = min(failed, key=lambda one: (not one[1].trace, "another rank" in str(one[1].error), one[0]))
            raise RidgelineError(f"parallel: rank {n} of {world}: {first.error}\n{first.trace}".rstrip())
        return [o.value for o in outcomes]
    return outcomes


def close() -> None:
    """Ends the processes of the pool."""
    for worker in [*_pool]:
        _forget(worker)


atexit.register(close)


def _forget(worker: Worker) -> None:
    _pool.remove(worker)
    worker.end()


def _gathered(workers: Sequence[Worker], timeout: float, check: bool) -> list[Outcome]:
    """Waits for the outcomes; ends the processes that do not answer. After a failure the others get little time."""
    left: dict[Connection, int] = {w.pipe: n for n, w in enumerate(workers)}
    outcomes = [Outcome(error=f"it did not end within {timeout:g} s, and was killed") for _ in workers]
    end = time.monotonic() + timeout + GRACE
    while left and (seconds := end - time.monotonic()) > 0:
        for pipe in wait(list(left), seconds):
            assert isinstance(pipe, Connection)
            n = left.pop(pipe)
            try:
                outcomes[n] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                workers[n].process.join(1)
                outcomes[n] = Outcome(error=f"the process ended with exit code {workers[n].process.exitcode}")
            if outcomes[n].error and check:
                end = min(end, time.monotonic() + GRACE)
    for n, (worker, outcome) in enumerate(zip(workers, outcomes, strict=True)):
        if worker.pipe in left or (outcome.error and not outcome.refused):
            _forget(workers[n])
    return outcomes


def _serve(pipe: Connection) -> None:
    """The life of a pool's process."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            message = pipe.recv_bytes()
            answer = _ran(message)
            pipe.send_bytes(answer)


def _ran(message: bytes) -> bytes:
    """Runs one function as one rank, and returns its pickled outcome."""
    try:
        fn, args, (backend, here, world, file, timeout, threads) = pickle.loads(message)
        os.environ.update({RANK: str(here), WORLD: str(world), LOCAL: str(here)})
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        _device(backend, here)
        store = dist.FileStore(file, world)
        with answered("the start"):
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=here, world_size=world, timeout=limit)
            dist.barrier()  # else one that fails at once would break the others' connections in the making
        outcome = Outcome(fn(*args))
        leave()
        return pickle.dumps(outcome)
    except Exception as error:
        with suppress(Exception):
            leave()
        refused = isinstance(error, RidgelineError)
        said = str(error) if refused else f"{type(error).__name__}: {error}"
        return pickle.dumps(Outcome(error=said, trace="" if refused else traceback.format_exc(), refused=refused))
