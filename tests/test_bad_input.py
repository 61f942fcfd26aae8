"""Bad input to the public functions: one clear sentence that names what was given and what is accepted."""

from collections.abc import Callable

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError, registry

x, half, whole = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.float16), torch.ones(4, 6, dtype=torch.int32)
away = torch.ones(4, 6, device="meta")

BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "gelu: another approximation": (lambda: ridgeline.gelu(x, approximate="cubic"), ["cubic", "none", "tanh"]),
    "gelu: an integer tensor": (lambda: ridgeline.gelu(whole), ["int32", "float32"]),
    "gelu: no tensor": (lambda: ridgeline.gelu([1.0, 2.0]), ["list", "tensor"]),
    "mul: two devices": (lambda: ridgeline.mul(x, away), ["cpu", "meta"]),
    "mul: no tensor": (lambda: ridgeline.mul(x, "2"), ["str", "tensor"]),
    "mul: shapes that do not broadcast": (lambda: ridgeline.mul(x, torch.ones(5)), ["(4, 6)", "(5,)"]),
    "softmax: a dim that is not there": (lambda: ridgeline.softmax(x, dim=2), ["2", "-2"]),
    "softmax: an integer tensor": (lambda: ridgeline.softmax(whole), ["int32", "float32"]),
    "softmax: no tensor": (lambda: ridgeline.softmax(None), ["NoneType", "tensor"]),
    "softmax: a dtype that is none": (lambda: ridgeline.softmax(x, dtype=torch.int8), ["int8", "float32"]),
    "matmul: inner sizes": (lambda: ridgeline.matmul(x, x), ["(4, 6)"]),
    "matmul: two dtypes": (lambda: ridgeline.matmul(x, half.T), ["float32", "float16"]),
    "matmul: two devices": (lambda: ridgeline.matmul(x, away.T), ["cpu", "meta"]),
    "matmul: no tensor": (lambda: ridgeline.matmul(x, 3), ["int", "tensor"]),
}


@pytest.mark.parametrize("name", BAD)
def test_is_refused(name: str) -> None:
    call, named = BAD[name]
    with pytest.raises(RidgelineError) as error:
        call()
    said = str(error.value)
    assert said.startswith(name.split(":")[0]), said
    assert "\n" not in said
    assert not [word for word in named if word not in said], said


@pytest.mark.parametrize("name", registry())
def test_unknown_implementation(name: str) -> None:
    op = registry()[name]
    args, kwargs = op.cases[0].make("float32")
    with pytest.raises(RidgelineError, match="no implementation 'nowhere'; it has ") as error:
        op.function(*args, **kwargs, impl="nowhere")
    assert all(impl in str(error.value) for impl in op.implementations)


@pytest.mark.parametrize("name", registry())
def test_an_implementation_that_this_machine_cannot_run(name: str) -> None:
    """On CPU tensors, CUDA C++ cannot run anywhere, nor Triton outside the interpreter: asked for by name, each says why."""
    op = registry()[name]
    args, kwargs = op.cases[0].make("float32")
    for impl in [i for i in op.implementations.values() if i.is_kernel]:
        with pytest.raises(RidgelineError, match=f"{name}: impl='{impl.name}' cannot run this call: .*GPU"):
            impl(*args, **kwargs)


def test_a_name_that_is_no_op() -> None:
    with pytest.raises(AttributeError, match=r"no 'nowhere'; its ops are .*gelu"):
        ridgeline.nowhere  # noqa: B018
