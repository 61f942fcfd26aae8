"""An op that is in no file: row softmax in plain PyTorch, with whatever implementations a test gives it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ridgeline import op as ops
from ridgeline import select
from ridgeline.op import Case, Cost, Op, Spec, nbytes


def reference(x):
    return torch.exp(x - x.amax(-1, keepdim=True)) / torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, keepdim=True)


def cost(x):
    return Cost(nbytes(x), nbytes(x), 5 * x.numel()), Cost(2 * nbytes(x), nbytes(x), 4 * x.numel())


@contextmanager
def fake_op(reference: Callable = reference, **implementations: Callable) -> Iterator[Op]:
    """The op `fake_softmax` for the time of a test, with `torch` and the given implementations."""

    def fake_softmax(x, *, impl=None):
        return select.find(made, impl or "torch").call(x)

    cases = [Case("64x96", (Spec(64, 96),)), Case("256x512", (Spec(256, 512),), use="quick")]
    made = Op(fake_softmax, reference=reference, cost=cost, cases=cases)
    made.eager("torch", "PyTorch's own kernel", lambda x: torch.softmax(x, -1), served=True)
    for name, call in implementations.items():
        made.eager(name, f"the mutant {name}", call)
    try:
        yield made
    finally:
        del ops.LOADED["fake_softmax"]
