"""Search tile configurations on this GPU, and save the best.

Launchers request configurations from `tuning.config`. The search answers these requests with every candidate of the
kernel's space and times the candidates against each other. A winner must be faster than the current configuration and
pass the tolerance check.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.lab.measurement.clock import Measurement
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import Case, Implementation, Op
    from ridgeline.tuning import Config, Request

DIRECTIONS = ("forward", "backward")
FINALISTS = 4
NEAR = 1.1  # how many times the best time of a search a rule may take
Measure = Callable[..., "dict[str, Measurement]"]


@dataclass(frozen=True)
class Found:
    """The result of searching one kernel's space for one key. Times are in seconds, as {"median", "low", "high"}.

    config: the winner, or None if nothing beat the current configuration.
    before, after: the time with the current configuration and with the winner. tried: the number of candidates.
    refused: the candidates that do not compile or start, each with the reason.
    wrong: the candidates that were fastest but failed the tolerance check, each with the reason.
    """

    op: str
    kernel: str
    key: str
    case: str
    dtype: str
    direction: str
    config: Config | None
    before: dict[str, float]
    after: dict[str, float]
    tried: int
    refused: dict[str, str]
    wrong: dict[str, str]

    @property
    def gain(self) -> float:
        """Returns the speed-up: the time before divided by the time after."""
        return self.before["median"] / self.after["median"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain}


class Data:
    """A case's arguments on a device, and the law to check results by, made when first needed."""

    def __init__(self, op: Op, case: Case, dtype: str, device: str):
        self.op, self.case, self.dtype = op, case, dtype
        self.args, self.kwargs = case.make(dtype, device)

    @cached_property
    def law(self) -> Law:
        from ridgeline.lab.measurement.law import Law

        return Law(self.op, self.args, self.kwargs)


class Call:
    """One direction of an implementation on a case's data."""

    def __init__(self, implementation: Implementation, data: Data, direction: str):
        import torch

        from ridgeline.lab.measurement.law import as_tuple, leaves
        from ridgeline.op import RidgelineError

        self.implementation, self.data, self.direction = implementation, data, direction
        if direction == "forward":
            self.run: Callable[[], Any] = lambda: implementation(*data.args, **data.kwargs)
        elif not leaves(data.args):
            raise RidgelineError(f"nothing in {data.case.name} takes a gradient")
        else:
            outputs = [o for o in as_tuple(implementation(*data.args, **data.kwargs)) if o.requires_grad]
            incoming = [torch.randn_like(o) for o in outputs]
            self.run = lambda: torch.autograd.grad(
                outputs, leaves(data.args), incoming, retain_graph=True, allow_unused=True
            )

    def fault(self) -> str | None:
        """Returns why the results of the call fail the tolerance check, or None if they pass."""
        outputs, grads = self.data.law.run(self.implementation, backward=self.direction == "backward")
        return self.data.law.judge(outputs, grads).reason()


def questions(call: Callable[[], Any]) -> list[Request]:
    """Returns the distinct requests of a call to `tuning.config`."""
    from ridgeline import tuning

    asked: dict[tuple[str, str, str], Request] = {}

    def listener(request: Request) -> None:
        asked.setdefault((request.op, request.kernel, request.key), request)

    with tuning.listen(listener):
        call()
    return list(asked.values())


def answered(call: Callable[[], Any], request: Request, config: Config | None) -> Callable[[], Any]:
    """Returns the call with one request answered by a configuration; with None, by the current one."""
    from ridgeline import tuning

    def listener(asked: Request) -> Config | None:
        return (
            dict(config)
            if config and (asked.kernel, asked.key, asked.op) == (request.kernel, request.key, request.op)
            else None
        )

    def run() -> Any:
        with tuning.listen(listener):
            return call()

    return run


def label(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def search(call: Call, request: Request, measure: Measure, budget: float, writes: int | None = None) -> Found:
    """Measures every candidate for one request: all of them briefly, then the best few against the current one.

    budget: seconds of timing for each of the two rounds. writes: as in `clock.measure`.
    """
    from ridgeline.lab.measurement.clock import differs

    configs = {label(dict(c)): dict(c) for c in request.space}
    functions, refused = {}, {}
    for name, config in configs.items():
        function = answered(call.run, request, config)
        reason = _refusal(function)
        if reason is None:
            functions[name] = function
        else:
            refused[name] = reason
    now = answered(call.run, request, None)
    first = measure({"now": now} | functions, budget=budget, min_reps=3, details=False, writes=writes)
    best = sorted(functions, key=lambda name: first[name].median)[:FINALISTS]
    last = measure({"now": now} | {name: functions[name] for name in best}, budget=budget, details=False, writes=writes)
    before, wrong = last["now"], {}
    winner = "now"
    for name in sorted(best, key=lambda name: last[name].median):
        if last[name].median >= before.median or not differs(last[name], before):
            break
        fault = answered(call.fault, request, configs[name])()
        if fault is None:
            winner = name
            break
        wrong[name] = fault
    return Found(
        request.op,
        request.kernel,
        request.key,
        call.data.case.name,
        call.data.dtype,
        call.direction,
        configs.get(winner),
        before.seconds,
        last[winner].seconds,
        len(configs),
        refused,
        wrong,
    )


def _refusal(function: Callable[[], Any]) -> str | None:
    """Runs a candidate and returns why it cannot run (shared memory, registers, no such layout), or None if it can."""
    import torch
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from ridgeline.cuda import CudaError

    try:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (OutOfResources, PTXASError, CompilationError, CudaError, torch.cuda.OutOfMemoryError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def tune(
    op: Op,
    cases: list[Case],
    *,
    device: str,
    folder: str,
    dtype: str | None = None,
    implementation: str | None = None,
    directions: tuple[str, ...] = DIRECTIONS,
    measure: Measure | None = None,
    budget: float = 1.0,
    configs: Path | None = None,
    save: bool = True,
    tell: Callable[[Found], None] = lambda found: None,
) -> list[Found]:
    """Tunes every kernel that requests a configuration in these calls, each request once; saves each winner when found.

    measure: as `clock.measure`. configs: the folder to write to, instead of the package's own.
    save: if False, nothing is written, and every case is searched for itself. tell: called with each result.
    Raises RidgelineError if there is nothing to tune.
    """
    from ridgeline import tuning
    from ridgeline.lab.measurement.clock import measure as clock
    from ridgeline.op import RidgelineError
    from ridgeline.select import find

    rungs = [find(op, implementation)] if implementation else [i for i in op.implementations.values() if i.is_kernel]
    pairs = [(case, name) for case in cases for name in case.dtypes if dtype in (None, name)]
    found: dict[tuple[str, ...], Found] = {}
    reasons = (
        []
        if pairs
        else [f"no case takes {dtype}; they take {', '.join(dict.fromkeys(d for c in cases for d in c.dtypes))}"]
    )
    for case, name in pairs:
        data = Data(op, case, name, device)
        args, kwargs = case.make(name, "meta")
        costs = dict(zip(DIRECTIONS, op.cost(*args, **kwargs), strict=False))
        for rung, direction in product(rungs, directions):
            if {"forward": "fwd", "backward": "bwd"}[direction] not in rung.launchers:
                reasons.append(f"{rung.name} has no {direction} kernels")
                continue
            try:
                call = Call(rung, data, direction)
                asked = questions(call.run)
            except RidgelineError as error:
                reasons.append(str(error))
                continue
            for request in asked:
                question = request.kernel, request.key, *(() if save else (case.name, name))
                if question not in found:
                    cost = costs[direction]
                    result = search(call, request, measure or clock, budget, None if cost is None else cost.write)
                    found[question] = result
                    if save and result.config is not None:
                        place = {} if configs is None else {"configs": configs}
                        tuning.save(folder, request.op, {request.kernel: {request.key: result.config}}, **place)
                    tell(result)
    if not found:
        why = "; ".join(dict.fromkeys(reasons)) or "its kernels have one configuration each"
        raise RidgelineError(f"{op.name}: there is nothing to tune: {why}")
    return list(found.values())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help="an op, as `ridgeline list` names it")
    parser.add_argument("--impl", metavar="NAME", help="tune only this implementation (default: all kernels of the op)")
    parser.add_argument("--case", metavar="NAME", help="tune for this case (default: all benchmarks of the op)")
    parser.add_argument("--dtype", help="tune for this dtype (default: all dtypes of the case)")
    parser.add_argument("--direction", choices=DIRECTIONS, help="tune only this direction (default: both)")
    parser.add_argument(
        "--budget",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="timing per kernel, key and round; a search has two rounds (default: 1)",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="write nothing; search for other shapes, and show how close the default configurations are to the best",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def main(options: argparse.Namespace) -> int:
    import json

    from ridgeline import device, tuning
    from ridgeline.op import RidgelineError, get

    op = get(options.op)
    if not 0 < options.budget < 86400:
        raise RidgelineError(f"--budget must be above 0 and under 86400 seconds (a day), and is {options.budget}")
    use = "sample" if options.sample else "bench"
    cases = [op.case(options.case)] if options.case else [c for c in op.cases if c.use == use]
    if not cases:
        raise RidgelineError(
            f"{op.name} has no cases for {'--sample' if options.sample else 'benchmarks'}; name one with --case"
        )
    here = device.here()
    if here.backend == "cpu":
        raise RidgelineError("tune needs the GPU that it tunes for, and PyTorch finds none on this machine")
    folder = tuning.CONFIGS / tuning.folder(here)
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not options.sample and not os.access(nearest, os.W_OK):
        raise RidgelineError(f"tune writes its results to {folder}, but {nearest} is not writable")
    found = tune(
        op,
        cases,
        device="cuda",
        folder=folder.name,
        dtype=options.dtype,
        implementation=options.impl,
        directions=(options.direction,) if options.direction else DIRECTIONS,
        budget=options.budget,
        save=not options.sample,
        tell=lambda result: None if options.json else _tell(result),
    )
    if options.json:
        print(json.dumps([f.to_dict() for f in found], indent=1))
    elif options.sample:
        near = sum(f.gain <= NEAR for f in found)
        print(
            f"{near} of {len(found)} default configurations are within {NEAR - 1:.0%} of the best; "
            f"the largest gain is {max(f.gain for f in found):.2f}x"
        )
    elif any(f.config for f in found):
        print(f"written to {folder / (op.name + '.json')}")
    else:
        print("nothing beats the current configurations; nothing written")
    return 0


def _tell(found: Found) -> None:
    from ridgeline.lab import units

    question = f"{found.op} {found.kernel}, {found.key} ({found.case} {found.dtype} {found.direction})"
    if found.config is None:
        answer = f"keeps its configuration, {units.seconds(found.before['median'])}"
    else:
        before, after = units.seconds(found.before["median"]), units.seconds(found.after["median"])
        answer = f"{label(found.config)}: {before} to {after}, {units.times(found.gain)}"
    print(f"{question}: {answer}; {found.tried} tried, {len(found.refused)} refused, {len(found.wrong)} wrong")
