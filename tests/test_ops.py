"""Every op, implementation, small case and dtype passes the law and keeps the promises of docs/design.md.

On a CPU the kernels run in Triton's interpreter (float32 and float16; it computes bfloat16 wrongly), on a GPU
natively.
"""

import subprocess
import sys
from copy import copy
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED
from ridgeline.lab.measurement.judge import check, compiling
from ridgeline.lab.measurement.law import Law, as_tuple, leaves
from ridgeline.op import Case, Implementation, Op, RidgelineError, Spec, registry
from ridgeline.select import select, why_not

pytestmark = pytest.mark.kernels

OPS = registry()
SMALL = [(op, case) for op in OPS.values() for case in op.cases if case.use == "check"]
RUNGS = [(op, i) for op in OPS.values() for i in op.implementations.values() if i.kind != "compile"]
KERNELS = [(op, i) for op, i in RUNGS if i.is_kernel]
PURE = {
    name: op for name, op in OPS.items() if not op.mutates
}  # the others, optimizers, have their own tests besides the law
FIRST = {op.name: next(c for c in op.cases if c.use == "check") for op in OPS.values()}
# Implementations in CUDA C++ that do not support their op's first case in float32.
LADDERS = (
    "dot",
    "transpose",
    "sgemm",
    "hgemm",
    "gemv",
    "softmax",
    "index_add",
    "upsample_nearest2d",
    "repeat_kv",
    "cumsum",
    "copy",
)
WITH_GRADIENTS = {
    name: op for name, op in PURE.items() if any(i.is_kernel and i.differentiable for i in op.implementations.values())
}


def named(value: object) -> str | None:
    return value.name if isinstance(value, Op | Case | Implementation) else None


def call(op: Op, implementation: Implementation, case: Case, dtype: str, device: str) -> tuple[list, dict]:
    """Returns the arguments of a case; skips the test if this machine or the implementation does not support it."""
    if implementation.is_kernel and INTERPRETED and dtype == "bfloat16":
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    args, kwargs = case.make(dtype, device)
    reason = why_not(implementation, *args, *kwargs.values())
    if reason:
        pytest.skip(reason)
    return args, kwargs


def takes(implementation: Implementation, case: Case, dtype: str) -> bool:
    """Returns whether an implementation supports a case on an H100, by shapes and dtypes."""
    args, kwargs = case.make(dtype, "meta")
    with devices.pretend("sm_90"):
        return why_not(implementation, *args, *kwargs.values()) is None


def own(op: Op, implementation: Implementation) -> tuple[Case, str] | None:
    """Returns the first small case of more than a few elements that an implementation supports, and its dtype."""
    if op.name not in LADDERS or not implementation.is_kernel or takes(implementation, FIRST[op.name], "float32"):
        return None
    cases = [(case, dtype) for case in op.cases if case.use == "check" for dtype in case.dtypes]
    some = [(c, d) for c, d in cases if c.make(d, "meta")[0][0].numel() > 100]
    return next((case, dtype) for case, dtype in some if takes(implementation, case, dtype))


OWN = [(op, i, *found) for op, i in RUNGS if (found := own(op, i))]


def uncoded(result: object) -> list[torch.Tensor]:
    """Returns a call's results, with 8-bit ones as float32 and complex halves as complex64 for assert_close."""
    wide = {torch.complex32: torch.complex64}
    return [t.float() if t.element_size() == 1 else t.to(wide.get(t.dtype, t.dtype)) for t in as_tuple(result)]


def gradients(outputs: object, args: list, seed: int = 3) -> list[torch.Tensor]:
    outputs = [o for o in as_tuple(outputs) if o.is_floating_point()]
    if not leaves(args):
        return []
    dice = torch.Generator(outputs[0].device).manual_seed(seed)
    incoming = [torch.randn(o.shape, device=o.device, generator=dice).to(o.dtype) for o in outputs]
    return list(torch.autograd.grad(outputs, leaves(args), incoming))


@pytest.mark.parametrize(("op", "case"), SMALL, ids=named)
def test_law(op: Op, case: Case, device: str) -> None:
    for dtype in case.dtypes:
        law = Law.of(op, case.name, dtype, device)
        for implementation in op.implementations.values():
            if implementation.kind != "compile":
                row = check(op, implementation.name, case.name, dtype, device, law)
                assert row["ok"] is not False, f"{implementation.name} {dtype}: {row['reason']}"


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "implementation"), [(o, i) for o, i in KERNELS if o.name in PURE], ids=named)
def test_a_second_gpu(op: Op, implementation: Implementation) -> None:
    """Tensors on a GPU that is not the current one are computed there, with the same bits if sums have an order."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    dtype = next((d for d in FIRST[op.name].dtypes if d in implementation.dtypes), FIRST[op.name].dtypes[0])
    given, kwargs = call(op, implementation, FIRST[op.name], dtype, "cuda:0")

    def moved(value: object) -> object:
        return (
            value.detach().to("cuda:1").requires_grad_(value.requires_grad)
            if isinstance(value, torch.Tensor)
            else value
        )

    same = {"rtol": 0, "atol": 0} if implementation.deterministic else {}
    there = [moved(a) for a in given], {k: moved(v) for k, v in kwargs.items()}
    here, other = implementation(*given, **kwargs), implementation(*there[0], **there[1])
    dice = [torch.randn_like(o) if o.requires_grad else None for o in as_tuple(here)]
    for a, b in zip(as_tuple(here), as_tuple(other), strict=True):
        assert b.device == torch.device("cuda:1")
        torch.testing.assert_close(*map(uncoded, (a, b.to("cuda:0"))), equal_nan=True, **same)
    outputs = [o for o in as_tuple(here) if o.requires_grad]
    if outputs:
        incoming = [d for d in dice if d is not None]
        mine = torch.autograd.grad(outputs, leaves(given), incoming)
        others = torch.autograd.grad(
            [o for o in as_tuple(other) if o.requires_grad], leaves(there[0]), [d.to("cuda:1") for d in incoming]
        )
        torch.testing.assert_close(list(mine), [g.to("cuda:0") for g in others], equal_nan=True, **same)


LAYOUTS = {
    "transposed": lambda t: t.detach().mT.contiguous().mT if t.dim() > 1 else t.detach(),
    "every second": lambda t: torch.stack([t.detach(), t.detach()], -1)[..., 0],
    "offset": lambda t: torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view(t.shape),
    "expanded": lambda t: t.detach()[..., :1].expand(t.shape) if t.dim() and t.numel() else t.detach(),
}


def laid_out(op: Op, rungs: list[Implementation], case: Case, dtype: str, layout: str, device: str) -> int:
    """Checks the implementations that support a case's tensors in this layout, and returns how many these are.

    Expanded tensors have so few different elements that a rounding is luck: their standard is the result on a
    contiguous copy."""
    args, kwargs = case.make(dtype, device)
    args = [LAYOUTS[layout](a).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    able = [i for i in rungs if i.is_kernel and why_not(i, *args, *kwargs.values()) is None]
    law = Law(op, args, kwargs)
    for implementation in able:
        if layout == "expanded":
            copies = [
                a.detach().contiguous().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
            one, other = implementation(*args, **kwargs), implementation(*copies, **kwargs)
            torch.testing.assert_close(uncoded(one), uncoded(other))
            torch.testing.assert_close(gradients(one, args), gradients(other, copies))
            continue
        verdict = law.judge(*law.run(implementation))
        assert verdict.ok, f"{implementation.name}: {verdict.reason()}"
    return len(able)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", PURE.values(), ids=named)
def test_layouts(op: Op, layout: str, device: str) -> None:
    """Strided, unaligned and expanded inputs."""
    laid_out(op, list(op.implementations.values()), FIRST[op.name], "float32", layout, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "implementation", "case", "dtype"), OWN, ids=named)
def test_layouts_in_its_own_dtype(
    op: Op, implementation: Implementation, case: Case, dtype: str, layout: str, device: str
) -> None:
    call(op, implementation, case, dtype, device)
    if not laid_out(op, [implementation], case, dtype, layout, device):
        pytest.skip("it refuses this layout")


SIZES = {
    "gelu": [[(0,)], [()], [(1,)], [(0, 3)], [(5, 0, 2)], [(7, 1, 3)]],
    "mul": [[(0,), (0,)], [(), ()], [(1,), (7,)], [(3, 0), (1, 1)], [(0, 1), (1, 5)], [(2, 1, 3), ()]],
    "softmax": [[(0,)], [(1,)], [(3, 0)], [(0, 3)], [(5, 0, 2)], [(7, 1, 3)]],
    "matmul": [
        [(0, 5), (5, 3)],
        [(4, 5), (5, 0)],
        [(4, 0), (0, 3)],
        [(0, 2, 3), (3, 4)],
        [(5,), (2, 5, 3)],
        [(7, 1), (1, 9)],
        [(1,), (1,)],
    ],
}


@pytest.mark.parametrize("name", SIZES)
def test_empty_and_odd_sizes(name: str, device: str) -> None:
    """Shapes with a zero or a one, and without dimensions: PyTorch's own results and gradients."""
    own = {
        "gelu": torch.nn.functional.gelu,
        "mul": torch.mul,
        "softmax": lambda x: torch.softmax(x, -1),
        "matmul": torch.matmul,
    }[name]
    for shapes in SIZES[name]:
        args = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
        for impl in (
            None,
            *(i.name for i in OPS[name].implementations.values() if i.is_kernel and why_not(i, *args) is None),
        ):
            y, expected = getattr(ridgeline, name)(*args, impl=impl), own(*args)
            assert y.shape == expected.shape, (shapes, impl)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(gradients(y, args), gradients(expected, args))


def resized(arg: object, old: int, new: int) -> object:
    """Returns a tensor of a case with one size replaced, and class indices kept below it if they were below the old
    one."""
    if not isinstance(arg, Spec):
        return arg
    other = copy(arg)
    object.__setattr__(other, "shape", tuple(new if n == old else n for n in arg.shape))
    object.__setattr__(other, "high", new if old and arg.high == old else arg.high)
    return other


ODD = {
    "no rows": (0, None),
    "one row": (1, None),
    "7 rows": (7, None),
    "one column": (None, 1),
    "131 columns": (None, 131),
}


def resized_case(op: Op, rungs: list[Implementation], case: Case, dtype: str, size: str, device: str) -> int:
    """Checks the implementations that support a case with another first or last size of its first tensor; returns
    their number.

    They must pass the law or be as close to float64 as the dtype allows, since torch's error in a single number is
    luck."""
    first = next(a for a in case.args if isinstance(a, Spec)).shape
    rows, columns = ODD[size]
    if columns and (len(first) == 1 or op.name == "rope"):
        pytest.skip("its columns are its rows, or pairs that cos has columns for")
    old, new = (first[-1], columns) if columns else (first[0], rows)
    args, kwargs = Case("", tuple(resized(a, old, new) for a in case.args), case.kwargs).make(dtype, device)
    exact = [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    able = [i for i in rungs if i.is_kernel and why_not(i, *args, *kwargs.values()) is None]
    rtol, atol, of_gradients = (
        (1e-5, 1e-5, 1e-4) if dtype == "float32" else (1e-2, 1e-2, 1e-2)
    )  # for one column, a rounding times rstd
    for implementation in able:
        if rows != 0 and (law := Law(op, args, kwargs)).judge(*law.run(implementation)).ok:
            continue
        one, expected = implementation(*args, **kwargs), op.reference(*exact, **kwargs)
        torch.testing.assert_close(
            uncoded(one), uncoded(expected), equal_nan=True, check_dtype=False, rtol=rtol, atol=atol
        )
        torch.testing.assert_close(
            gradients(one, args), gradients(expected, exact), check_dtype=False, rtol=rtol, atol=of_gradients
        )
    return len(able)


@pytest.mark.parametrize("size", ODD)
@pytest.mark.parametrize("op", PURE.values(), ids=named)
def test_few_rows_and_columns(op: Op, size: str, device: str) -> None:
    resized_case(op, list(op.implementations.values()), FIRST[op.name], "float32", size, device)


@pytest.mark.parametrize("size", ODD)
@pytest.mark.parametrize(("op", "implementation", "case", "dtype"), OWN, ids=named)
def test_few_rows_and_columns_in_its_own_dtype(
    op: Op, implementation: Implementation, case: Case, dtype: str, size: str, device: str
) -> None:
    call(op, implementation, case, dtype, device)
    if op.name == "index_add" and size == "no rows":
        pytest.skip("an index needs a row")
    if not resized_case(op, [implementation], case, dtype, size, device):
        pytest.skip("it refuses this size")


@pytest.mark.parametrize(("op", "implementation"), [(o, i) for o, i in KERNELS if o.name in WITH_GRADIENTS], ids=named)
def test_gradient_layouts(op: Op, implementation: Implementation, device: str) -> None:
    """An expanded incoming gradient gives the same as its contiguous copy."""
    args, kwargs = call(op, implementation, FIRST[op.name], "float32", device)
    y = [o for o in as_tuple(implementation(*args, **kwargs)) if o.is_floating_point()]
    incoming = [torch.randn((), device=device).to(o.dtype).expand(o.shape) for o in y]
    try:
        expanded = torch.autograd.grad(y, leaves(args), incoming, retain_graph=True)
    except RidgelineError as error:
        assert "contiguous" in str(error)
        return
    for one, other in zip(
        expanded, torch.autograd.grad(y, leaves(args), [i.contiguous() for i in incoming]), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("op", "implementation"), [(o, i) for o, i in RUNGS if o.name in PURE], ids=named)
def test_again(op: Op, implementation: Implementation, device: str) -> None:
    """Two calls give the same bits, and leave their inputs unchanged."""
    args, kwargs = call(op, implementation, FIRST[op.name], "float32", device)
    before = [a.detach().clone() for a in args if isinstance(a, torch.Tensor)]
    first, second = (implementation(*args, **kwargs) for _ in range(2))
    for one, other in zip(
        [*as_tuple(first), *gradients(first, args)], [*as_tuple(second), *gradients(second, args)], strict=True
    ):
        assert torch.equal(one, other) or not implementation.deterministic
    for was, now in zip(before, [a for a in args if isinstance(a, torch.Tensor)], strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize(("op", "implementation"), [(o, i) for o, i in KERNELS if o.name in WITH_GRADIENTS], ids=named)
def test_second_derivative(op: Op, implementation: Implementation, device: str) -> None:
    args, kwargs = call(op, implementation, FIRST[op.name], "float32", device)
    outputs = as_tuple(implementation(*args, **kwargs))
    grads = torch.autograd.grad(sum(o.sum() for o in outputs), leaves(args), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        sum(g.sum() for g in grads).backward()


@pytest.mark.parametrize("op", PURE.values(), ids=named)
@pytest.mark.parametrize("impl", [None, "triton"])
def test_compile(op: Op, impl: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph; over three shapes at most two compilations; the same results."""
    from torch._dynamo.testing import CompileCounterWithBackend

    if impl and impl not in op.implementations:
        pytest.skip(f"it has no {impl}")
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else it adds weights' gradients in any order
    counter = CompileCounterWithBackend("aot_eager")
    kwargs = FIRST[op.name].make("float32", device)[1]
    compiled = torch.compile(
        lambda *a: op.function(*a, **kwargs, impl=impl), backend=counter, fullgraph=True, dynamic=True
    )
    specs = FIRST[op.name].args
    rows, tokens = (*next(a for a in specs if isinstance(a, Spec)).shape, 1)[:2]
    if ".recurrent." in op.function.__module__:  # PyTorch's own rung is traced a token at a time
        specs = tuple(resized(a, tokens, 3) for a in specs)
    for size in (5, 9, 17):  # of the first tensor's first dimension, wherever it occurs
        args, _ = Case("", tuple(resized(a, rows, size) for a in specs)).make("float32", device)
        one, other = compiled(*args), op.function(*args, **kwargs, impl=impl)
        torch.testing.assert_close(*map(uncoded, (one, other)))
        for g, h in zip(gradients(one, args), gradients(other, args), strict=True):
            torch.testing.assert_close(g, h)
    assert counter.frame_count <= 2


class Registered(TorchDispatchMode):
    """Records every call of an op of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "ridgeline":
            self.calls.setdefault(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [op for op in PURE.values() if "triton" in op.implementations], ids=named)
def test_opcheck(op: Op, device: str) -> None:
    args, kwargs = FIRST[op.name].make("float32", device)
    with Registered() as registered:
        gradients(op.function(*args, **kwargs, impl="triton"), args)
    assert registered.calls
    for func, given in registered.calls.items():
        given = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in given)
        coded = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in given)
        utils = (
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )  # the schema check would multiply them
        results = torch.library.opcheck(func, given, **({"test_utils": utils} if coded else {}))
        assert set(results.values()) == {"SUCCESS"}, f"{func}: {results}"


def test_export_loads_elsewhere(tmp_path, device: str) -> None:  # type: ignore[no-untyped-def]
    """A program exported here runs in a fresh process that registers the ops."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for name in ("gelu", "softmax"):
                x = getattr(ridgeline, name)(x, impl="triton")
            return ridgeline.matmul(ridgeline.mul(x, x, impl="triton"), w, impl="triton")

    x, w = torch.randn(4, 32, device=device), torch.randn(32, 8, device=device)
    torch.export.save(torch.export.export(Model(), (x, w)), tmp_path / "model.pt2")
    torch.save((x, w, Model()(x, w)), tmp_path / "data.pt")
    code = (
        "import sys, ridgeline, torch; ridgeline.register_all()\n"
        "x, w, y = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x, w), y)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt2", tmp_path / "data.pt"], check=True)


@pytest.mark.parametrize("op", PURE.values(), ids=named)
def test_refusals(op: Op, device: str) -> None:
    """An impossible call raises one sentence on what was given and what is accepted."""
    args, _ = FIRST[op.name].make("float32", device)
    with pytest.raises(RidgelineError, match="has no implementation 'no such'; it has .*naive|torch"):
        op.function(*args, impl="no such")
    for implementation in op.implementations.values():
        wide = [isinstance(a, torch.Tensor) and a.is_floating_point() and a.element_size() > 1 for a in args]
        double = [a.detach().double() if w else a for a, w in zip(args, wide, strict=True)]
        if implementation.is_kernel and "float64" not in implementation.dtypes:
            with pytest.raises(RidgelineError, match=f"impl='{implementation.name}' cannot run this call: "):
                op.function(*double, impl=implementation.name)
    assert (
        as_tuple(op.function(*double))[0].dtype == as_tuple(op.reference(*double))[0].dtype
    )  # without `impl`, PyTorch serves it
    assert torch.float64 in op.kernel_dtypes or not select(op, None, *double).is_kernel


def test_autocast(device: str) -> None:
    """matmul and softmax accept the dtypes under autocast that torch's own accept."""
    x = torch.randn(8, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for name, own in (
            ("matmul", torch.matmul),
            ("softmax", torch.nn.functional.softmax),
            ("gelu", torch.nn.functional.gelu),
        ):
            args = (x, x) if name == "matmul" else (x.bfloat16(), -1) if name == "softmax" else (x,)
            assert getattr(ridgeline, name)(*args).dtype == own(*args).dtype, name


WEIGHT = partial(torch.linspace, 0.5, 1.5, 2048, dtype=torch.bfloat16)
LARGE = {  # arguments made from x, and the same from a part of it
    "gelu": lambda x: (x,),
    "mul": lambda x: (x, x),
    "silu_mul": lambda x: (x, x),
    "softmax": lambda x: (x, -1),
    "masked_softmax": lambda x: (x, x > -1),
    "rms_norm": lambda x: (x, WEIGHT(device=x.device)),
    "layer_norm": lambda x: (x, WEIGHT(device=x.device), WEIGHT(device=x.device)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_than_two_to_the_31(name: str) -> None:
    """Elements past 2**31 are correct."""
    rows, columns = (1 << 20) + 8, 2049 if "softmax" in name else 2048
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    op = OPS[name]
    y = op.function(*LARGE[name](x), impl="triton")
    for piece in (slice(0, 64), slice(rows // 2, rows // 2 + 64), slice(rows - 64, rows)):
        torch.testing.assert_close(y[piece], op.implementations["torch"].call(*LARGE[name](x[piece])))


@pytest.mark.gpu
def test_dropout_of_more_than_two_to_the_31() -> None:
    """Elements past 2**31 are correct, and kept according to their own random numbers."""
    from ridgeline.tiles.philox import words

    rows, columns = (1 << 20) + 8, 2048
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = ridgeline.dropout(x, 0.5, seed=7, impl="triton")
    for start in (0, rows // 2, rows - 64):
        group = torch.arange(start * columns // 4, (start + 64) * columns // 4, device="cuda")
        kept = (words(7, group & 0xFFFFFFFF, group >> 32).flatten() >= 1 << 31).view(64, columns)
        torch.testing.assert_close(y[start : start + 64], x[start : start + 64] * kept * 2)


@pytest.mark.gpu
def test_rope_of_more_than_two_to_the_31() -> None:
    q = torch.randn(129, 32, 4096, 128, device="cuda", dtype=torch.bfloat16)
    k, angles = q[:, :1].clone(), torch.rand(4096, 64, device="cuda") * 6.3
    made = ridgeline.rope(q, k, angles.cos(), angles.sin(), impl="triton")
    for piece in (slice(0, 1), slice(64, 65), slice(128, 129)):
        expected = OPS["rope"].reference(q[piece], k[piece], angles.cos(), angles.sin())
        torch.testing.assert_close([m[piece] for m in made], list(expected))


def hosted(op: Op, device: str) -> tuple[list, dict]:
    """Returns the arguments of the first call that PyTorch's own op takes: a small one of an op with gradients, else
    a benchmark's, since PyTorch's 8-bit products refuse odd sizes."""
    use = "check" if op.name in WITH_GRADIENTS else "bench"
    for case, dtype in [(c, d) for c in op.cases if c.use == use for d in c.dtypes]:
        given, kwargs = case.make(dtype, device)
        try:
            op.implementations["torch"](*given, **kwargs)
        except RidgelineError:
            continue
        return given, kwargs
    raise AssertionError(f"{op.name}: PyTorch takes none of its cases")


@pytest.mark.parametrize("name", ["linear_cross_entropy", "ssd", "topk_gate", "conv2d"])
def test_host_time_takes_what_torch_takes(name: str) -> None:
    """The rung of PyTorch's own can be called as the test of host time calls it, on a call of few elements."""
    given, kwargs = hosted(OPS[name], "cpu")
    assert max(t.numel() for t in leaves(given)) < 1 << 14
    OPS[name].implementations["torch"].call(*given, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in PURE.values() if "torch" in op.implementations], ids=named)
def test_host_time(op: Op) -> None:
    """A call costs the host at most max(1.6 x torch's own, 25 us), forward and, with gradients, backward each.

    If forward makes the gradients, it is the sum of both, and forward without gradients."""
    from ridgeline.lab.measurement.clock import device_timer

    given, kwargs = hosted(op, "cuda")
    args = leaves(given)
    host = partial(device_timer("cuda").host, seconds=5e-6)
    best = {}
    for who, function in 5 * (("ours", op.function), ("torch", op.implementations["torch"].call)):
        with compiling():
            times: tuple[float, ...] = (host(partial(function, *given, **kwargs)),)
            if args:
                y = [o for o in as_tuple(function(*given, **kwargs)) if o.requires_grad]  # not indices or counts
                dy = [torch.randn_like(o) for o in y]
                times += (host(partial(torch.autograd.grad, y, args, dy, retain_graph=True)),)
                if op.name == "linear_cross_entropy":
                    with torch.no_grad():
                        times = host(partial(function, *given, **kwargs)), sum(times)
            best[who] = tuple(map(min, times, best.get(who, times)))
    for ours, theirs in zip(best["ours"], best["torch"], strict=True):
        assert ours <= max(1.6 * theirs, 25e-6), best
