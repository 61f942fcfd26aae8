"""An implementation's forward, backward and both, as functions without arguments that can be timed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.measurement.clock import Function
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import Implementation


def forward(law: Law, rung: Implementation) -> Function:
    """The forward call as a function of no arguments. Tensors that it changes in place are restored before each run.

    On a GPU, an op that asks for it (`Op.graphed`) gives a graph of calls, except where the host reads values."""
    from ridgeline.op import tensors_of

    if law.op.graphed and not rung.reads and tensors_of(law.args)[0].is_cuda:
        from ridgeline.lab.measurement.clock import cache_bytes
        from ridgeline.lab.measurement.graphed import graphed

        return graphed(law, rung, cache_bytes("cuda"))
    if not law.op.mutates:
        return partial(rung, *law.args, **law.kwargs)
    args = law.op.fresh(law.args)
    changed, given = (tensors_of(some[n] for n in law.op.mutates) for some in (args, law.args))

    def before() -> None:
        for tensor, original in zip(changed, given, strict=True):
            tensor.copy_(original)

    call: Any = partial(rung, *args, **law.kwargs)
    call.before = before
    return call


def backward(law: Law, rung: Implementation) -> Function:
    """The backward alone as a function of no arguments; the graph is kept.

    Incoming gradients have the outputs' memory format.
    """
    import torch

    from ridgeline.lab.measurement.law import as_tuple, leaves

    pairs = [
        (o, g)
        for o, g in zip(as_tuple(rung(*law.args, **law.kwargs)), law.incoming, strict=True)
        if g is not None and o.requires_grad
    ]
    outputs = [o for o, _ in pairs]
    incoming = [g if g.stride() == o.stride() else torch.empty_like(o, requires_grad=False).copy_(g) for o, g in pairs]
    return partial(torch.autograd.grad, outputs, leaves(law.args), incoming, retain_graph=True, allow_unused=True)


def both(law: Law, rung: Implementation) -> Function:
    """Forward and then backward as a function of no arguments, as in training: the gradient of a loss is 1."""
    import torch

    from ridgeline.lab.measurement.law import as_tuple, leaves

    incoming = [g if g is None or g.dim() else torch.ones_like(g) for g in law.incoming]

    def step() -> Any:
        outputs = as_tuple(rung(*law.args, **law.kwargs))
        pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if g is not None and o.requires_grad]
        return torch.autograd.grad([o for o, _ in pairs], leaves(law.args), [g for _, g in pairs], allow_unused=True)

    return step


CALLS = {"forward": forward, "backward": backward, "both": both}
DIRECTIONS = tuple(CALLS)
