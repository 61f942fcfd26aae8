"""Runs every kernel of every op once, on small cases, forward and backward: what `make sanitize` watches.

Inputs are made and results are checked on the CPU, so that the tool watches hardly any kernel of torch. The allowed
errors then come from torch's CPU kernels, which add in other orders: a result is wrong from TIMES the allowed error.
Each case runs in one of its dtypes, in turn, or in that of --dtype. The exit code is 1 if a result is wrong.

    python tests/sanitize.py [OP ...] [--impl NAME] [--without NAMES] [--dtype NAME]

With TRITON_INTERPRET=1 it runs only Triton's kernels, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ridgeline.boundary import INTERPRETED
from ridgeline.lab.measurement.cases import chosen_ops
from ridgeline.lab.measurement.law import Law, as_tuple, leaves, real
from ridgeline.op import Implementation, Op, RidgelineError, registry, tensors_of

TIMES = 10
DEVICE = "cpu" if INTERPRETED else "cuda"


def moved(value: Any) -> Any:
    """Returns an argument on the device: a tensor as a new leaf, with its strides."""
    if isinstance(value, torch.Tensor):
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(DEVICE)
        there = whole.as_strided(value.shape, value.stride(), value.storage_offset())
        return there.detach().requires_grad_(value.requires_grad)
    return type(value)(moved(v) for v in value) if isinstance(value, list | tuple) else value


def outcome(law: Law, implementation: Implementation) -> str | None:
    """Runs a case and returns what is wrong with its results, or None. Raises RidgelineError if it is not supported."""
    args = [moved(a) for a in law.op.fresh(law.args)]
    returned = implementation(*args, **{k: moved(v) for k, v in law.kwargs.items()})
    outputs = (*as_tuple(returned), *tensors_of(args[n] for n in law.op.mutates))
    pairs = [(o, moved(g)) for o, g in zip(outputs, law.incoming, strict=True) if g is not None and o.requires_grad]
    grads: tuple[Any, ...] = ()
    if implementation.differentiable and pairs and leaves(args):
        grads = torch.autograd.grad([o for o, _ in pairs], leaves(args), [g for _, g in pairs], allow_unused=True)
    verdict = law.judge([real(o.detach().cpu()) for o in outputs], [g if g is None else g.cpu() for g in grads])
    wrong = {name: finding for name, finding in verdict.findings().items() if finding.worst > TIMES}
    return ", ".join(f"{name} ({f.worst:.3g} times what is allowed, {f.where})" for name, f in wrong.items()) or None


def sweep(ops: list[Op], impl: str | None, without: str, dtype: str | None) -> tuple[int, int]:
    """Runs all selected calls; returns how many ran and how many were wrong."""
    ran = wrong = 0
    names = {*without.split(",")}

    def is_out(i: Implementation) -> bool:
        return bool(names & {i.name, f"kind={i.kind}", f"{i.op.name}.{i.name}"})

    left = {op.name: [i for i in op.implementations.values() if is_out(i)] for op in registry().values()}
    for i in chain(*left.values()):  # nor may they run inside another op, such as the product in its backward
        i.op.implementations[i.name] = replace(i, served=False)
    for op in ops:
        out = {i.name for i in left[op.name]}
        rungs = [i for i in op.implementations.values() if i.is_kernel and i.name not in out and impl in (None, i.name)]
        kernels = [i for i in rungs if i.kind == "triton" or not INTERPRETED]
        refused = {i.name: "no small case" for i in kernels}
        for number, case in enumerate(c for c in op.cases if c.use == "check"):
            usable = [d for d in case.dtypes if dtype in (None, d) and not (INTERPRETED and d == "bfloat16")]
            if not usable:
                continue
            chosen = usable[number % len(usable)]
            law = Law.of(op, case.name, chosen)
            for implementation in kernels:
                try:
                    fault = outcome(law, implementation)
                except RidgelineError as error:
                    if refused.get(implementation.name):
                        refused[implementation.name] = str(error)
                    continue
                ran += 1
                refused.pop(implementation.name, None)
                if fault:
                    wrong += 1
                    print(f"{op.name} {implementation.name}, {case.name} {chosen}: wrong: {fault}", flush=True)
        print(f"{op.name}: {', '.join(i.name for i in kernels if i.name not in refused) or 'no kernel'}", flush=True)
        for name, reason in refused.items():
            print(f"{op.name} {name}: not run: {reason}", flush=True)
    return ran, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops; all of them by default")
    parser.add_argument("--impl", help="one implementation only")
    parser.add_argument(
        "--without", metavar="NAMES", default="", help="leave out rungs, OP.NAME or kind=KIND, with commas between"
    )
    parser.add_argument("--dtype", help="one dtype only: float32, float16, bfloat16")
    options = parser.parse_args()
    if not INTERPRETED and not torch.cuda.is_available():
        print(
            "sanitize: PyTorch sees no GPU here; TRITON_INTERPRET=1 runs Triton's kernels on the CPU", file=sys.stderr
        )
        return 2
    try:
        ops = chosen_ops(options.ops)
    except RidgelineError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    ran, wrong = sweep(ops, options.impl, options.without, options.dtype)
    print(f"{ran} calls, {wrong} wrong")
    return int(wrong > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main())
