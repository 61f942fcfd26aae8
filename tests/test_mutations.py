"""Mutations: PyTorch's results for each op, changed as a faulty kernel would, break the law; on a GPU too.

`test_law` does the same, more closely, to an op of its own.
"""

import pytest
import torch

from ridgeline.lab.measurement.law import Law
from ridgeline.op import Case, Op, Spec, registry
from ridgeline.select import why_not

pytestmark = pytest.mark.kernels


def matrix(op: Op) -> Case | None:
    """Returns the op's first small case with a matrix of more than a few rows and columns, or None."""
    specs = [
        (c, c.args[0])
        for c in op.cases
        if c.use == "check" and isinstance(c.args[0], Spec) and "torch" in op.implementations
    ]
    return next((c for c, first in specs if len(first.shape) == 2 and min(first.shape) > 8), None)


def changed(y, where, value):
    y = y.clone()
    y[where] = value(y)
    return y


RESULTS = {
    "a wrong scale": lambda y: y * 1.01,
    "a dropped row": lambda y: changed(y, (..., -1, slice(None)), lambda y: 0) if y.dim() > 1 else y * 1.01,
    "a dropped column": lambda y: changed(y, (..., -1), lambda y: 0),
    "a column from beyond the mask": lambda y: changed(y, (..., -1), lambda y: y[..., 0] + 1),
}


def transposed(t):
    """Returns what a kernel reads of t.mT if it assumes that it is contiguous."""
    return t.detach().mT.reshape(t.shape).requires_grad_(t.requires_grad)


COARSE = ("layer_norm", "add_layer_norm")
LINEAR = ("copy", "cumsum", "index_add", "sum_to", "transpose")  # their gradients do not depend on the inputs
UNORDERED = ("histogram",)  # it counts the same, wherever an element is
MATRICES = {op: case for op in registry().values() if not op.mutates and op.family != "loss" and (case := matrix(op))}
CASES = [pytest.param(op, dtype, id=f"{op.name}-{dtype}") for op, case in MATRICES.items() for dtype in case.dtypes]


def law_of(op: Op, dtype: str, device: str) -> Law:
    args, _ = MATRICES[op].make(dtype, device)
    if reason := why_not(op.implementations["torch"], *args):
        pytest.skip(reason)
    return Law.of(op, MATRICES[op].name, dtype, device)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_bent_results_break_the_law(op: Op, dtype: str, device: str) -> None:
    if op.name in COARSE and device == "cpu" and dtype == "bfloat16":
        pytest.skip("on a CPU torch's own sums a bias's gradient in bfloat16, and the law allows twice that error")
    law = law_of(op, dtype, device)
    outputs, grads = law.run(op.implementations["torch"])
    assert law.judge(outputs, grads).ok
    for name, bend in RESULTS.items():
        assert law.judge([bend(y) for y in outputs], grads).worst("forward") > 1.5, name
        for index in range(len(grads)):
            bent = [bend(g) if i == index else g for i, g in enumerate(grads)]
            assert law.judge(outputs, bent).worst("backward") > 1.5, f"{name} in gradient {index}"


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_inputs_taken_for_contiguous_break_the_law(op: Op, dtype: str, device: str) -> None:
    if op.name in UNORDERED:
        pytest.skip("the elements' order does not count")
    law = law_of(op, dtype, device)
    law.args = [transposed(a) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in law.args]
    verdict = law.judge(*law.run(op.implementations["torch"]))
    assert verdict.worst("forward") > 1.5
    assert verdict.worst("backward") > 1.5 or not law.grads or op.name in LINEAR


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_softmax_without_its_mask_breaks_the_law(dtype: str, device: str) -> None:
    op = registry()["softmax"]
    law = Law.of(op, MATRICES[op].name, dtype, device)
    padded = torch.nn.functional.pad(law.args[0].detach(), (0, 5))
    assert law.judge([torch.softmax(padded, -1)[..., :-5]]).worst() > 1.5
