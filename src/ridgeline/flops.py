"""The operations that `torch.utils.flop_counter.FlopCounterMode` counts for Ridgeline's ops, from `Op.cost`.

`<op>_fwd` counts as the op's forward cost and `<op>_bwd` as its backward cost. Their arguments reach the cost function
by name. If a registered op has other names, or does less or more than the cost says, `Op(flops=...)` counts for it.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ridgeline.op import LOADED, Op

# Names in registered ops, and arguments of public functions with the same shape. The backward of an add_ norm has the
# sum in place of the summands.
PUBLIC = (("saved", "x"), ("saved", "residual"), ("y", "x"), ("dy", "x"), ("w", "weight"), ("groups", "num_groups"))


def register(name: str) -> None:
    """Registers the formula of `torch.ops.ridgeline.<name>`."""
    register_flop_formula(getattr(torch.ops.ridgeline, name), get_raw=True)(partial(count, name))


def tell(packet: Any) -> None:
    """Gives the formula of `packet` to the active counters that lack it: ops load on first use, and a counter made
    before copied torch's registry without them."""
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(known, dict):
            known.setdefault(packet, flop_registry[packet])


def count(name: str, *args: Any, out_val: Any = None, **_: Any) -> int:
    """Returns the floating-point operations of one call of `torch.ops.ridgeline.<name>`."""
    for op in LOADED.values():  # a registered op may be named after no public one
        if name in op.flops:
            return int(op.flops[name](*args))
    op = LOADED[name if name in LOADED else name.rpartition("_")[0]]
    schema = getattr(torch.ops.ridgeline, name).default._schema
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
    for own, public in PUBLIC:
        if own in given:
            given.setdefault(public, given[own])
    cost = op.cost(**_accepted(op, given))[1 if name.endswith("_bwd") else 0]
    return 0 if cost is None else cost.flops


def _accepted(op: Op, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the op's cost function takes."""
    taken = inspect.signature(op.cost).parameters
    missing = [n for n, p in taken.items() if p.default is p.empty and p.kind < p.VAR_POSITIONAL and n not in given]
    if missing:
        raise TypeError(f"{op.name}: its cost function needs {', '.join(missing)}; give Op a flops= that does not")
    return {n: given[n] for n in taken if n in given}
