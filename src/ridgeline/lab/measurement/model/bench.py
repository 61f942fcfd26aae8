"""Measures whole training steps of a Hugging Face model, each variant in a process of its own, taking turns."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from math import isfinite
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.model.step import SIZES, VARIANTS, Task, floor, known

if TYPE_CHECKING:
    from ridgeline.lab.measurement.results import Merge

Row = dict[str, Any]
REFERENCES = ("eager", "compile", "liger", "ridgeline")  # whose losses the others are held against, the first there is
TOLERANCE = 2e-3  # of the reference's loss, in each of the first steps
ROUNDS = 6  # the fewest whose least and most are a 95% interval of the median
STEPS = 24
APART = 2  # rounds where each starts the processes anew
PATIENCE = 300  # seconds that one command may take
GRACE = 5  # seconds in which a process that was hung up on ends by itself
CONTEXT = 1.2e9  # bytes of the GPU that a process takes beyond its tensors
FULL = 0.94  # share of the GPU's memory that is planned with
HOST_SHARE = 0.6  # share of the host's memory that parked processes may take
STATE = 6  # bytes per weight that stay between steps: the weight and two moments


class Process:
    """A variant's process, its answers, and the row that becomes of it. `status` is "ok" while it can go on."""

    def __init__(self, task: Task):
        self.task = task
        self.reason: str | None
        self.found: Row = {}
        self.rounds: list[Row] = []
        self.start()

    def start(self) -> None:
        """Starts a process, also in place of one that has ended, and lets it import what it needs."""
        from ridgeline.lab.measurement.model.worker import serve

        self.status, self.reason = "ok", None
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.task))
        self.process.start()
        theirs.close()
        self.send("imports")

    def send(self, command: str, **arguments: Any) -> None:
        try:
            self.connection.send((command, arguments))
        except (BrokenPipeError, OSError):
            self.fail("wrong", "its process has ended")

    def receive(self, patience: float = PATIENCE) -> tuple[str, Any]:
        """The next message; a status other than "ok" and "turn" ends the process, as does waiting in vain."""
        try:
            if not self.connection.poll(patience):
                return self.fail("wrong", f"its process gave no answer in {PATIENCE} s")
            status, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return self.fail("wrong", f"its process broke off with exit code {self.process.exitcode}")
        return (status, value) if status in ("ok", "turn") else self.fail(status, value)

    def fail(self, status: str, reason: str) -> tuple[str, Any]:
        self.status, self.reason = status, reason
        self.end()
        return status, reason

    def ask(self, command: str, **arguments: Any) -> Row | None:
        """The answer to a command, or None if the variant cannot go on."""
        if self.status == "ok":
            self.send(command, **arguments)
        if self.status != "ok":
            return None
        status, value = self.receive()
        return value if status == "ok" else None

    def end(self) -> None:
        """Hangs up, upon which the process ends, or is ended; then its memory is free."""
        self.connection.close()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(GRACE)
            self.process.kill()
        self.process.join()


def imported(processes: list[Process]) -> None:
    """Takes the answers to the first command, with which every process starts."""
    for process in able(processes):
        status, value = process.receive()
        process.found |= value if status == "ok" else {}


def build(processes: list[Process]) -> None:
    """Lets all build their models, side by side."""
    for process in able(processes):
        process.send("build")
    for process in able(processes):
        status, value = process.receive()
        process.found |= value if status == "ok" else {}


def able(processes: list[Process]) -> list[Process]:
    """The processes that can go on."""
    return [process for process in processes if process.status == "ok"]


def prepare(processes: list[Process], every: list[Process] | None = None) -> bool:
    """Lets all make their first steps: one has the GPU at a time, and others may compile meanwhile.

    Eager is the first, since it needs the most memory, and others follow its choice of experts. every: those among
    which the reference is, if `processes` are not all. Returns whether processes must be parked between turns, since
    the GPU does not hold them all.
    """
    from multiprocessing.connection import wait

    waiting: list[Process] = []
    owner, parked = None, False
    order = sorted(able(processes), key=lambda p: REFERENCES.index(p.task.variant))
    for process in order:
        process.send("prepare")
    open_ = {process.connection: process for process in able(order)}
    while open_:
        ready = wait(list(open_), timeout=PATIENCE)
        late = [] if ready else [connection for connection, p in open_.items() if p not in waiting]
        for process in [open_[connection] for connection in ready or late]:  # type: ignore[index]
            connection = process.connection
            status, value = process.receive(PATIENCE if ready else 0)
            if status == "turn":
                waiting.append(process)
                continue
            del open_[connection]
            owner = None if process is owner else owner
            process.found |= value if status == "ok" else {}
            idle = [p for p in able(processes) if "losses" in p.found]
            again = status == "oom" and not parked and bool(idle)
            parked = parked or again or not fits(processes)
            for other in idle if parked else []:
                other.ask("park")
            if again:  # once more, with the others parked
                process.start()
                imported([process])
                build([process])
                process.send("prepare")
                open_[process.connection] = process
        if owner is None and waiting:
            owner = min(waiting, key=lambda p: order.index(p))
            waiting.remove(owner)
            owner.connection.send(choices(every or processes))
    return parked


def choices(processes: list[Process]) -> Any:
    """The experts that the routers of the first process chose; None if there are none."""
    return next((p.found["choices"] for p in processes if p.found.get("choices")), None)


def fits(processes: list[Process]) -> bool:
    """Whether the GPU holds every process between its turns and, beside them, the largest step that was made."""
    found = [process.found for process in able(processes)]
    total = max((f.get("total_bytes", 0) for f in found), default=0)
    held = CONTEXT + sum(STATE * f["parameters"] + CONTEXT for f in found)  # the parent measured the roof
    most = max((f["reserved_bytes"] - STATE * f["parameters"] for f in found if "reserved_bytes" in f), default=0)
    return len(found) < 2 or not total or held + most < FULL * total


def disagreement(processes: list[Process]) -> None:
    """Fails each variant whose first losses differ from the reference's by more than the tolerance.

    With experts, only the steps in which the variant followed the reference's choice are held (`routing` says why), and
    always the first, which comes before any weight has changed.
    """
    from ridgeline.lab.measurement.model import routing

    checked = {p.task.variant: p for p in able(processes) if "losses" in p.found}
    name = next((name for name in REFERENCES if name in checked), None)
    for process in checked.values() if name else ():
        process.found["reference"] = name
        reference = checked[name].found  # type: ignore[index]
        right = reference["losses"]
        if reason := routing.wrong(process.found.get("routing")):
            process.fail("wrong", reason)
            continue
        held = max(1, process.found.get("followed", 0)) if reference.get("choices") else len(right)
        for n, (loss, wanted) in enumerate(list(zip(process.found["losses"], right, strict=True))[:held], 1):
            if not abs(loss - wanted) <= TOLERANCE * abs(wanted):
                process.fail("wrong", f"its loss of step {n} is {loss:.4f}, and that of {name} is {wanted:.4f}")
                break


def turn(process: Process, steps: int, warm: int, parked: bool) -> None:
    """One turn of one process: untimed steps, then timed ones."""
    if found := process.ask("measure", steps=steps, warm=warm):
        process.rounds.append(found)
    if parked:
        process.ask("park")


def detail(process: Process, parked: bool) -> None:
    """The host time and the profile of a variant. They are left out, with the reason, if they fail."""
    for command in ("host", "profile", "small")[: 2 + process.task.small]:
        before = process.status
        if found := process.ask(command):
            process.found |= found
        elif before == "ok" and process.rounds:
            process.found["undetailed"] = f"{command}: {process.reason}"
            process.status, process.reason = "ok", None
            return
    if parked:
        process.ask("park")


def together(processes: list[Process], steps: int, report: Callable[[str], None], emit: Callable[..., None]) -> None:
    """All processes stay alive and take turns, A B C D A B C D.

    Those that wait keep their weights and moments on the GPU, or on the host if the GPU does not hold them all.
    """
    report("building the models")
    build(processes)
    report("the first steps")
    parked = prepare(processes)
    disagreement(processes)
    for process in processes:
        process.found["between"] = "on the host" if parked else "on the GPU"
        if process.status != "ok":
            emit(process)
    rounds = min(ROUNDS, steps)
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        for process in able(processes):
            turn(process, -(-steps // rounds), 2 if number == 0 else 1, parked)
    for process in able(processes):
        emit(process)
    for process in able(processes):
        report(f"profile of {process.task.label}")
        detail(process, parked)
        emit(process)
        process.end()


def apart(processes: list[Process], steps: int, report: Callable[[str], None], emit: Callable[..., None]) -> None:
    """One process uses the GPU at a time, in repeated rounds, each in a new process, which imports while others run.

    On a CPU the next starts only then. Losses are compared in the first round."""
    order = sorted(able(processes), key=lambda p: REFERENCES.index(p.task.variant))
    rounds = min(APART, steps)
    for number in range(rounds):
        for process in able(order):
            gpu = process.task.device.startswith("cuda")
            report(f"round {number + 1} of {rounds}: {process.task.label}")
            if number and not gpu:
                process.start()
            if number:
                imported([process])
            build([process])
            prepare([process], processes)
            disagreement(processes if number == 0 else [process])
            process.found["between"] = "ended"
            turn(process, -(-steps // rounds), 2, False)
            if number == rounds - 1 and process.status == "ok":
                detail(process, False)
            process.end()
            if number < rounds - 1 and process.status == "ok" and gpu:
                process.start()
            emit(process)


def record(tasks: list[Task], roof: Callable[[], Row], steps: int, report: Callable[[str], None],
           write: Callable[[Row], None]) -> None:  # fmt: skip
    """Measures all tasks of one model, and writes a row as soon as a variant's figures are there.

    A row may be written twice; the later one, which has the profile too, replaces the earlier. roof: measures the
    machine's roof, while the processes import.
    """
    gpu = tasks[0].device.startswith("cuda")
    report("the roof")
    limits = {} if gpu else roof()  # on a CPU nothing else may run meanwhile
    processes = [Process(task) for task in tasks]
    try:
        limits = limits or roof()
        write({"type": "roof", **limits})
        imported(processes)

        def emit(process: Process) -> None:
            write(row(process, limits))

        state = sum(STATE * p.found["parameters"] for p in able(processes))
        host = min((p.found["host_bytes"] for p in able(processes)), default=0)
        alone = any(task.graph for task in tasks) or state > HOST_SHARE * host
        for process in processes:
            if process.status != "ok":
                emit(process)
        (apart if alone and len(tasks) > 1 else together)(processes, steps, report, emit)
        for process in processes:
            if process.status != "ok":
                emit(process)
    finally:
        for process in processes:
            process.connection.close()
        for process in processes:
            process.end()


def row(process: Process, roof: Row) -> Row:
    """The row of a variant: its figures as far as they are there, beside the floor."""
    from ridgeline.lab.measurement.clock import interval, median

    task, found = process.task, process.found
    made: Row = {"type": "model", "model": name_of(task.model), "title": known(task.model), "batch": task.batch,
                 "seq": task.seq, "variant": task.label, "status": process.status, "reason": process.reason,
                 "dtype": "bfloat16", "tolerance": TOLERANCE}  # fmt: skip
    kept = ("parameters", "versions", "losses", "reference", "between", "host_us", "host_small_us", "kinds", "kernels",
            "launches", "undetailed", "patched", "followed", "routing", "learning_rate")  # fmt: skip
    made |= {name: found[name] for name in kept if name in found}
    if "losses" in made:
        made["losses"] = [loss if isfinite(loss) else None for loss in made["losses"]]  # JSON has no other numbers
    if "work" in found:
        made["work"] = found["work"]
        made["floor"] = floor(found["work"], roof)
    samples = [r["seconds"] for r in process.rounds]
    if not samples:
        return made
    low, high = interval(samples)
    seconds, count = {"median": median(samples), "low": low, "high": high}, task.batch * task.seq
    made |= {"seconds": seconds, "samples": samples, "last_loss": process.rounds[-1]["loss"]}
    made["tokens_per_second"] = {"median": count / seconds["median"], "low": count / high, "high": count / low}
    made["peak_bytes"] = max((r["peak_bytes"] for r in process.rounds if r["peak_bytes"]), default=None)
    made["share"] = made["floor"]["seconds"] / seconds["median"]
    made["share_lasting"] = made["floor"]["lasting"] / seconds["median"]
    if not all(isfinite(r["loss"]) for r in process.rounds):
        made |= {"status": "wrong", "reason": "its loss is not finite after the timed steps", "last_loss": None}
    return made


def name_of(model: str) -> str:
    """The name under which rows of a model are kept: of a folder, the folder's."""
    return model if model in SIZES else known(model)


def measured_roof(device: str) -> Row:
    """The roof of bench, measured quickly, with the rate of matrix products that the machine keeps up for seconds."""
    from ridgeline.lab.measurement.candidates import release
    from ridgeline.lab.measurement.roof import measure_roof

    roof = measure_roof(device, True)
    roof["lasting"] = {"bfloat16": lasting(device)}
    release(device)
    return roof


def lasting(device: str, side: int | None = None, seconds: float = 3.0) -> dict[str, float]:
    """FLOP/s of bfloat16 matrix products in a row: the median and its interval over slices, without the first third."""
    import torch

    from ridgeline.lab.measurement.clock import interval, median

    gpu = device.startswith("cuda")
    side, seconds = side or (8192 if gpu else 512), seconds if gpu else seconds / 6
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, count = torch.empty_like(a), 100 if gpu else 1
    rates: list[float] = []
    torch.mm(a, b, out=out)
    start = last = time.perf_counter()
    while last - start < seconds or len(rates) < 6:
        for _ in range(count):
            torch.mm(a, b, out=out)
        if gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        rates.append(2 * side**3 * count / (now - last))
        last = now
    steady = rates[len(rates) // 3 :]
    low, high = interval(steady)
    return {"median": median(steady), "low": low, "high": high}


def chosen(options: argparse.Namespace, device: str) -> list[Task]:
    """The tasks that the options select. Raises RidgelineError for those that make no sense."""
    from ridgeline.op import RidgelineError

    known(options.model)
    for name in ("batch", "seq", "steps"):
        if getattr(options, name) < 1:
            raise RidgelineError(f"--{name} must be 1 or more, and is {getattr(options, name)}")
    if options.seq < 2:
        raise RidgelineError("--seq must be 2 or more, since a token's label is the next one, and is 1")
    variants = list(dict.fromkeys(options.variants.split(",")))
    if wrong := [name for name in variants if name not in VARIANTS]:
        raise RidgelineError(f"there is no variant {wrong[0]!r}; the variants are {', '.join(VARIANTS)}")
    taken = [name for name in ("impl", "case", "dtype", "without", "budget") if getattr(options, name, None)]
    taken += [name for name in ("quick", "grid", "peers", "counters") if getattr(options, name, False)]
    if options.ops or taken:
        raise RidgelineError(f"--model measures whole steps and does not take {', '.join([*options.ops, *taken])}")
    if options.graph and not device.startswith("cuda"):
        raise RidgelineError("--graph needs a GPU")
    if options.graph and options.small:
        raise RidgelineError("--small measures steps that the host enqueues one by one, so it does not go with --graph")
    if options.memory is not None and "ridgeline" not in variants:
        raise RidgelineError(f"--memory is for the variant ridgeline, and the variants are {', '.join(variants)}")
    if options.record and options.model not in SIZES:
        raise RidgelineError(f"--record keeps steps of the sizes {', '.join(SIZES)} alone, and not of a folder's model")
    if find_spec("transformers") is None:
        raise RidgelineError(
            "--model builds models of Hugging Face's transformers, which is not installed (pip install transformers)"
        )
    how = {"memory": options.memory, "graph": options.graph, "small": options.small}
    return [Task(options.model, options.batch, options.seq, name, device, **how) for name in variants]


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("whole training steps")
    group.add_argument("--model", metavar="NAME", help=f"time a model's training step: {', '.join(SIZES)}, or a FOLDER "
                       "with a config.json; its weights are random")  # fmt: skip
    group.add_argument("--batch", type=int, default=4, metavar="N", help="sequences in a step (default: 4)")
    group.add_argument("--seq", type=int, default=4096, metavar="N", help="tokens of a sequence (default: 4096)")
    group.add_argument("--variants", default=",".join(VARIANTS), metavar="NAMES",
                       help=f"of {', '.join(VARIANTS)}, separated by commas (default: all)")  # fmt: skip
    group.add_argument("--steps", type=int, default=STEPS, metavar="N",
                       help=f"timed steps of each variant, in {ROUNDS} rounds (default: {STEPS})")  # fmt: skip
    group.add_argument("--memory", metavar="POLICY", help="passed to ridgeline.hf.patch")
    group.add_argument("--graph", action="store_true", help="make each step one CUDA graph")
    group.add_argument("--small", action="store_true", help="also measure the host time of a step of 1 x 512 tokens")


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.measurement import merging, results
    from ridgeline.lab.measurement.machine import default_device, facts
    from ridgeline.lab.measurement.model import table as model_table
    from ridgeline.lab.measurement.store import Run
    from ridgeline.lab.tables import progress

    device = default_device(options.device)
    tasks = chosen(options, device)
    if options.record:
        results.recordable(facts(device)["gpu"], False)
    run = Run(facts(device), at=options.commit)
    merged: Merge | None = None
    try:
        with progress() as report:
            record(tasks, lambda: measured_roof(device), options.steps, lambda text: report(text, 0, 1), run.write)
    finally:
        if options.record and any(row["type"] == "model" for row in run.rows):
            merged = results.merge(run.rows)
            merging.tell(merged)
    found = model_table.newest(run.rows)
    print(json.dumps(found)) if options.json else model_table.show(found)
    print(f"ridgeline: the run is {run.path}", file=sys.stderr)
    return 0
