"""The process of one variant: builds the model, and makes training steps when its parent gives it the turn.

Messages go over a pipe. The parent sends (command, arguments); the process answers (status, value), where the status
is that of the variant's row: "ok", or why the variant cannot go on. While it prepares, the process asks for the turn
once it needs the GPU: torch.compile asks after its first compilation, so that compiling overlaps with others' turns.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.model.step import Missing, Task

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CHECKED = 5  # losses of the first steps that are compared between variants
HOST_CALLS = 3
SMALL = (1, 512)  # batch and tokens of a step that leaves the GPU idle, for its host time
PARKED = 1 << 20  # bytes; smaller tensors stay on the GPU


class Session:
    """One variant of one model. Each public method is a command, whose value is plain data."""

    def __init__(self, task: Task):
        self.task, self.gpu = task, task.device.startswith("cuda")
        self.copies: list[tuple[Any, Any]] = []  # storages that are parked in turn, and their place on the host
        self.parked = False
        self.least = PARKED

    def imports(self) -> dict[str, Any]:
        """Imports what building needs, without touching the GPU. Returns versions, and how much there is of what."""
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", KINETO_LOG_LEVEL="6")
        import torch
        import transformers
        from transformers import AutoModelForCausalLM

        from ridgeline.lab.measurement.model.step import configuration

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(configuration(self.task.model))
        return {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "parameters": sum(p.numel() for p in model.parameters()),
            "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }

    def build(self) -> dict[str, Any]:
        """Builds the variant, with its weights alone. Returns the least work of its step, and its learning rate."""
        import torch

        from ridgeline.lab.measurement.model import step as model_step

        task = self.task
        model = model_step.plain(task)
        least = model_step.work(model, task.batch, task.seq)
        self.vocabulary, rate = model.config.vocab_size, model_step.rate(model.config)
        self.model, self.optimizer, patched = model_step.varied(task, model)
        self.ids = model_step.tokens(task, self.vocabulary, task.batch, task.seq)
        self.step = self.single = model_step.stepper(self.model, self.optimizer, self.ids)
        total = torch.cuda.get_device_properties(0).total_memory if self.gpu else 0
        return {"work": least, "total_bytes": total, "patched": patched, "learning_rate": rate}

    def prepare(self, turn: Callable[[], Any]) -> dict[str, Any]:
        """Makes the first steps. Returns their losses, the peak of memory, and what stays between turns.

        turn: called once before the GPU is needed for more than weights; it returns when this process may go on, with
        the experts that the reference's routers chose, if it has any. Without them this process's are returned. Hooks
        would be compiled, so torch.compile's model goes its own way.
        """
        from ridgeline.lab.measurement.model.routing import Followed, Noted

        routing: Noted | Followed | None = None
        if self.task.variant == "compile":
            self._after_compiling(turn)
        else:
            choices = turn()
            routing = Followed(self.model, choices) if choices else Noted(self.model)
        count = CHECKED - 2 if self.task.graph else CHECKED
        losses = [self.step() for _ in range(count)]
        found: dict[str, Any] = {}
        if isinstance(routing, Noted):
            found = {"choices": routing.end()}
        elif routing is not None:
            found = {"followed": count, "routing": routing.end()}
        if self.task.graph:
            self._capture()
            losses += [self.step().clone() for _ in range(CHECKED - count)]
        values = [float(loss) for loss in losses]
        self._release()
        return {"losses": values, **found, **self._memory()}

    def _after_compiling(self, turn: Callable[[], Any]) -> None:
        """Lets `turn` be called when the first compilation has ended, before what it made runs."""
        from torch._dynamo.callback import callback_handler

        asked: list[bool] = []

        def once(*_: Any) -> None:
            if not asked:
                asked.append(True)
                turn()

        callback_handler.register_end_callback(once)

    def _capture(self) -> None:
        """Makes the step one CUDA graph. Raises Missing if it cannot be captured."""
        import torch

        graph, step = torch.cuda.CUDAGraph(), self.step
        try:
            side = torch.cuda.Stream()  # as the captured one is on: autograd keeps the stream of a weight's gradient
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()  # a captured step must follow one that has made every state
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                loss = step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever stops a capture is the variant's reason
            raise Missing(f"its step cannot be captured as a CUDA graph: {_sentence(error)}") from error

        def replay() -> Any:
            graph.replay()
            return loss

        self.step = replay

    def measure(self, steps: int, warm: int) -> dict[str, Any]:
        """One turn: untimed steps, then `steps` timed ones in a row. Returns seconds per step, and the last loss."""
        self.back()
        for _ in range(warm):
            self.step()
        if self.gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()
        clock = _Clock(self.gpu)
        for _ in range(steps):
            loss = self.step()
        seconds = clock.seconds() / steps
        found = {"seconds": seconds, "loss": float(loss), **self._memory()}
        self._release()
        return found

    def host(self) -> dict[str, Any]:
        """The host's microseconds per step: until it is enqueued, after the queue has run empty."""
        self.back()
        found = {"host_us": _host(self.step, self.gpu)}
        self._release()
        return found

    def small(self) -> dict[str, Any]:
        """The same for a step so small that the GPU waits for the host."""
        from ridgeline.lab.measurement.model import step as model_step

        self.back()
        ids = model_step.tokens(self.task, self.vocabulary, *SMALL)
        found = {"host_small_us": _host(model_step.stepper(self.model, self.optimizer, ids), self.gpu)}
        self._release()
        return found

    def profile(self) -> dict[str, Any]:
        """The time of one step by kind of work, and its longest kernels. A captured step is profiled uncaptured."""
        from contextlib import nullcontext

        import torch
        from torch.profiler import ProfilerActivity

        from ridgeline.lab.measurement.model import kinds as model_kinds

        self.back()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.gpu
        with model_kinds.named() if self.task.variant == "ridgeline" else nullcontext():
            self.single()
            _synchronize(self.gpu)
            with torch.profiler.profile(activities=activities) as profiler:
                self.single()
                _synchronize(self.gpu)
        self._release()
        lines = model_kinds.kernels(profiler.events())
        return {"kinds": model_kinds.by_kind(lines), "kernels": lines[:20], "launches": sum(x["calls"] for x in lines)}

    def park(self) -> dict[str, Any]:
        """Moves weights and moments to the host's memory, so that others have the GPU's. `back` undoes it."""
        if not self.parked and not self.task.graph:  # a graph's addresses stay
            self.copies = self.copies or [(storage, _on_host(storage, self.gpu)) for storage in self._storages()]
            for storage, kept in self.copies:
                kept.copy_(_bytes(storage), non_blocking=True)
            _synchronize(self.gpu)
            for storage, _ in self.copies:
                storage.resize_(0)
            self.parked = True
        self._release()
        return self._memory()

    def back(self) -> None:
        """Moves parked weights and moments back to the GPU."""
        for storage, kept in self.copies if self.parked else ():
            storage.resize_(kept.numel())
            _bytes(storage).copy_(kept, non_blocking=True)
        _synchronize(self.gpu)
        self.parked = False

    def _storages(self) -> list[Any]:
        """The storages of weights, buffers and the optimizer's state, each once."""
        import torch

        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        tensors = [t for t in (*self.model.parameters(), *self.model.buffers(), *states) if t.is_cuda == self.gpu]
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return [storage for storage in found.values() if storage.nbytes() >= self.least]

    def _release(self) -> None:
        gc.collect()
        if self.gpu:
            import torch

            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _memory(self) -> dict[str, Any]:
        """Bytes of the GPU: the peak of what tensors took and of what was reserved for them, and what is held now."""
        if not self.gpu:
            return {"peak_bytes": None, "reserved_bytes": 0, "held_bytes": 0}
        import torch

        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "held_bytes": torch.cuda.memory_reserved(),
        }


class _Clock:
    """Seconds from its making to the end of all that was enqueued: by events on a GPU."""

    def __init__(self, gpu: bool):
        self.gpu = gpu
        _synchronize(gpu)
        if gpu:
            import torch

            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()
        self.start = time.perf_counter()

    def seconds(self) -> float:
        if not self.gpu:
            return time.perf_counter() - self.start
        self.events[1].record()
        _synchronize(True)
        return self.events[0].elapsed_time(self.events[1]) / 1e3


def _bytes(storage: Any) -> Any:
    """A storage's bytes as a tensor."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storage: Any, gpu: bool) -> Any:
    """Memory on the host for a storage, pinned in place on a GPU: torch's allocator takes up to twice as much."""
    import torch

    room = torch.empty(storage.nbytes(), dtype=torch.uint8)
    if gpu and (code := int(torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.numel(), 0))):
        raise Missing(f"the host's memory for its weights cannot be pinned (CUDA error {code})")
    return room


def _synchronize(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.synchronize()


def _host(step: Callable[[], Any], gpu: bool) -> float | None:
    """The median of a step's microseconds on the host, each after the queue has run empty; None on a CPU."""
    from ridgeline.lab.measurement.clock import median

    if not gpu:
        return None
    step()
    calls = []
    for _ in range(HOST_CALLS):
        _synchronize(gpu)
        start = time.perf_counter()
        step()
        calls.append(time.perf_counter() - start)
    _synchronize(gpu)
    return median(calls) * 1e6


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def _full() -> str:
    import torch

    from ridgeline.lab import units

    if not torch.cuda.is_available():
        return "it needs more memory than there is"
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    return (
        f"it needs more memory than there is: it had {units.size(own)} of {units.size(total)}, "
        f"and other processes had {units.size(total - free - own)}"
    )


def answer(session: Session, command: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Runs a command and returns the row's status and the value, or the reason why there is none."""
    import torch

    from ridgeline.op import RidgelineError

    try:
        return "ok", getattr(session, command)(**arguments)
    except torch.OutOfMemoryError:
        return "oom", _full()
    except Missing as error:
        return error.status, str(error)
    except RidgelineError as error:
        return "unsupported", str(error)
    except Exception as error:  # whatever a peer or a model raises is its row's reason, and the others go on
        return "wrong", f"it raised {_sentence(error)}"


def serve(connection: Connection, task: Task) -> None:
    """Answers the parent's commands until it hangs up."""
    sys.stdout = sys.stderr  # what packages print is no output of the verb

    def turn() -> Any:
        connection.send(("turn", None))
        return connection.recv()

    session = Session(task)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            command, arguments = connection.recv()
            if command == "prepare":
                arguments = {"turn": turn}
            connection.send(answer(session, command, arguments))
