"""torch's FlopCounterMode counts our ops as their costs say, so that a model's utilisation is right with them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ridgeline
from ridgeline.boundary import Launch, observe
from ridgeline.op import Op, get, op_modules
from ridgeline.select import eager

pytestmark = pytest.mark.kernels


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def plain(op: Op, args: list[Any]) -> bool:
    """Whether plain PyTorch serves the product of a sparse weight, which one of our kernels makes dense before."""
    return op.name == "sparse_matmul" and eager(op, None, *args) is not None


@pytest.mark.parametrize("name", op_modules())
def test_forward_counts_as_the_cost_says(name: str, device: str) -> None:
    op = get(name)
    tried = 0
    for case in op.cases:
        dtype = next((d for d in ("float32", "float16") if d in case.dtypes), case.dtypes[0])
        if case.use != "check" or dtype == "bfloat16":
            continue
        args, kwargs = case.make(dtype, device)
        launches: list[Launch] = []
        with torch.no_grad(), observe(launches.append):
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
            wanted = op.cost(*args, **kwargs)[0].flops
            found = counted(lambda op=op, args=args, kwargs=kwargs: op.function(*args, **kwargs))
        if not launches or plain(op, args):  # no kernel serves the case here, or one that only prepares it
            continue
        assert found == wanted, case.name
        tried += 1
        if tried == 2:
            return
    if not tried:
        pytest.skip("no kernel serves its cases here")


@pytest.mark.parametrize(
    "name", ["rms_norm", "add_layer_norm", "softmax", "rope", "silu_mul", "weighted_sum", "dropout"]
)
def test_backward_counts_as_the_cost_says(name: str, device: str) -> None:
    op = get(name)
    args, kwargs = next(c for c in op.cases if c.use == "check").make("float32", device)
    forward, backward = op.cost(*args, **kwargs)[:2]

    def step() -> None:
        out = op.function(*args, **kwargs)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    assert counted(step) == forward.flops + backward.flops


def test_a_step_counts_as_torchs(device: str) -> None:
    """Products count as in PyTorch: of attention, a linear layer, and the last layer with its loss."""
    q, k, v = (torch.randn(1, 2, 32, 16, device=device, requires_grad=True) for _ in range(3))
    x, w = torch.randn(8, 16, device=device, requires_grad=True), torch.randn(24, 16, device=device, requires_grad=True)
    target = torch.randint(24, (8,), device=device)

    attention = 4 * 2 * 32 * 32 * 16
    assert counted(lambda: ridgeline.attention(q, k, v).sum().backward()) == attention * 7 // 2
    assert counted(lambda: ridgeline.attention(q, k, v, causal=True)) == attention * 33 // 64
    product = 2 * 8 * 16 * 24
    step = lambda: ridgeline.linear_cross_entropy(x, w, target).backward()  # noqa: E731
    assert counted(step) == 3 * product
    assert counted(lambda: ridgeline.linear(x, w).sum().backward()) == 3 * product
    lengths = torch.tensor([0, 5, 32], dtype=torch.int32, device=device)
    packed = [t.detach()[0].transpose(0, 1) for t in (q, k, v)]
    found = counted(lambda: ridgeline.attention_varlen(*packed, lengths, lengths, causal=True))
    assert found == 4 * 2 * 16 * sum(n * (n + 1) // 2 for n in (5, 27))


def test_attention_to_caches_counts_the_keys_that_are_seen(device: str) -> None:
    op = get("attention_varlen")
    for case in [c for c in op.cases if "lengths" in c.kwargs and c.use == "check"]:
        args, kwargs = case.make("float32", device)
        assert counted(lambda args=args, kwargs=kwargs: op.function(*args, **kwargs, impl="triton")) == (
            op.cost(*args, **kwargs)[0].flops
        )
    ends, lengths = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 2, 3], [5, 7]))
    q, cache = torch.randn(3, 2, 16, device=device), torch.randn(2, 8, 1, 16, device=device)
    found = counted(lambda: op.function(q, cache, cache, ends, lengths=lengths, causal=True, impl="triton"))
    assert found == 4 * 2 * 16 * (4 + 5 + 7)


def test_a_counter_made_before_an_op_loads_counts_it() -> None:
    """Ops load on first use, and a counter copies torch's registry when it is made."""
    code = """
import torch, ridgeline
from torch.utils.flop_counter import FlopCounterMode
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4, 64, device=device, requires_grad=True)
with FlopCounterMode(display=False) as counter:
    ridgeline.silu_mul(x, x).sum().backward()
print(counter.get_total_flops())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) > 0
