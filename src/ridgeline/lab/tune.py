"""Search tile configurations on this GPU, and save the best.

A launcher asks `tuning.config` for a configuration; here those questions are answered with every candidate of the kernel's own
space, measured against each other by the lab's clock. A winner must keep the law of tolerance and beat what is in force.
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

    from ridgeline.lab.clock import Measurement
    from ridgeline.lab.law import Law
    from ridgeline.op import Case, Implementation, Op
    from ridgeline.tuning import Config, Request

DIRECTIONS = ("forward", "backward")
FINALISTS = 4
NEAR = 1.1  # of the best of a search: as far as a rule may be from it
Measure = Callable[..., "dict[str, Measurement]"]


@dataclass(frozen=True)
class Found:
    """What the search of one kernel's space for one key came to. Times in seconds, as {"median", "low", "high"}.

    config: the winner, or None where nothing beat the configuration in force. refused: candidates that do not compile or start;
    wrong: candidates that won and broke the law.
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
        """How many times faster than before."""
        return self.before["median"] / self.after["median"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain}


class Data:
    """A case's arguments on a device, and the oracle to judge results by, made when first needed."""

    def __init__(self, op: Op, case: Case, dtype: str, device: str):
        self.op, self.case, self.dtype = op, case, dtype
        self.args, self.kwargs = case.make(dtype, device)

    @cached_property
    def law(self) -> Law:
        from ridgeline.lab.law import Law

        return Law(self.op, self.args, self.kwargs)


class Call:
    """One direction of an implementation on a case's data."""

    def __init__(self, implementation: Implementation, data: Data, direction: str):
        import torch

        from ridgeline.lab.law import as_tuple, leaves
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
        """Why what it computes now breaks the law, or None."""
        outputs, grads = self.data.law.run(self.implementation, backward=self.direction == "backward")
        return self.data.law.judge(outputs, grads).reason()


def questions(call: Callable[[], Any]) -> list[Request]:
    """What a call asks of `tuning.config`, each question once."""
    from ridgeline import tuning

    asked: dict[tuple[str, str, str], Request] = {}

    def listener(request: Request) -> None:
        asked.setdefault((request.op, request.kernel, request.key), request)

    with tuning.listen(listener):
        call()
    return list(asked.values())


def answered(call: Callable[[], Any], request: Request, config: Config | None) -> Callable[[], Any]:
    """The call with one question answered by a configuration; with None, by the one in force."""
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
    """Measures every candidate for one question: all of them briefly, then the best few against the one in force.

    budget: seconds of timing for each of the two rounds. writes: as in `clock.measure`.
    """
    from ridgeline.lab.clock import differs

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
    """Why a candidate cannot be run (too much shared memory, too many registers, no such layout), or None. It is waited for."""
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
    arch: str,
    dtype: str | None = None,
    implementation: str | None = None,
    directions: tuple[str, ...] = DIRECTIONS,
    measure: Measure | None = None,
    budget: float = 1.0,
    configs: Path | None = None,
    save: bool = True,
    tell: Callable[[Found], None] = lambda found: None,
) -> list[Found]:
    """Tunes every kernel that these calls ask a configuration for, and saves each winner as it is found; every question once.

    measure: as `clock.measure`. configs: the folder to write to, instead of the package's own. save: if not, nothing is written, and
    every case asks for itself. tell: hears each result.
    """
    from ridgeline import tuning
    from ridgeline.lab.clock import measure as clock
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
                        tuning.save(arch, request.op, {request.kernel: {request.key: result.config}}, **place)
                    tell(result)
    if not found:
        why = "; ".join(dict.fromkeys(reasons)) or "its kernels have one configuration each"
        raise RidgelineError(f"{op.name}: there is nothing to tune: {why}")
    return list(found.values())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--impl", help="tune this implementation (default: every one in kernels)")
    parser.add_argument("--case", help="a case of the op (default: all its benchmarks)")
    parser.add_argument("--dtype", help="default: every dtype of the case")
    parser.add_argument("--direction", choices=DIRECTIONS, help="default: both")
    parser.add_argument(
        "--budget", type=float, default=1.0, metavar="SECONDS", help="of timing per round and question (default: 1)"
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="write nothing: how far from a search's best is what is used for new shapes",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def main(options: argparse.Namespace) -> int:
    import json

    from ridgeline import device, tuning
    from ridgeline.op import RidgelineError, get

    op = get(options.op)
    if not 0 < options.budget < 86400:
        raise RidgelineError(f"--budget is in seconds, above 0 and under a day, and is {options.budget}")
    use = "sample" if options.sample else "bench"
    cases = [op.case(options.case)] if options.case else [c for c in op.cases if c.use == use]
    if not cases:
        raise RidgelineError(
            f"tune: {op.name} has no cases for {'--sample' if options.sample else 'benchmarks'}; name one by --case"
        )
    here = device.here()
    if here.backend == "cpu":
        raise RidgelineError(
            "tune measures on the GPU that it tunes for, and this machine has none that PyTorch can use"
        )
    folder = tuning.CONFIGS / here.arch
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not options.sample and not os.access(nearest, os.W_OK):
        raise RidgelineError(f"tune writes its findings to {folder}, and {nearest} cannot be written")
    found = tune(
        op,
        cases,
        device="cuda",
        arch=here.arch,
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
            f"within {NEAR - 1:.0%} of the best of a search at {near} of {len(found)}; {max(f.gain for f in found):.2f} x at most"
        )
    elif any(f.config for f in found):
        print(f"written to {folder / (op.name + '.json')}")
    else:
        print("nothing beats what is in force; nothing written")
    return 0


def _tell(found: Found) -> None:
    from ridgeline.lab import units

    question = f"{found.op} {found.kernel}, {found.key} ({found.case} {found.dtype} {found.direction})"
    if found.config is None:
        answer = f"keeps its configuration, {units.seconds(found.before['median'])}"
    else:
        change = f"{units.seconds(found.before['median'])} to {units.seconds(found.after['median'])}, {units.times(found.gain)}"
        answer = f"{label(found.config)}: {change}"
    print(f"{question}: {answer}; {found.tried} tried, {len(found.refused)} refused, {len(found.wrong)} wrong")
