"""Matrix products at their edges, in every implementation: long sums, infinity and NaN, empty sizes, beyond 2^31
elements.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.lab.measurement.law import Law, as_tuple
from ridgeline.op import RidgelineError, get
from ridgeline.select import why_not

kernels = pytest.mark.kernels
FLOATS = {"float32": torch.float32, "float16": torch.float16} | ({} if INTERPRETED else {"bfloat16": torch.bfloat16})
HALVES = {name: dtype for name, dtype in FLOATS.items() if dtype.itemsize == 2}
FLOAT_OPS = ("matmul", "linear", "gated_linear", "gemv")
SCALED = ("int8_matmul", "fp8_matmul")
OPS = (*FLOAT_OPS, *SCALED)


def operands(name: str, M: int, N: int, K: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    """Returns the named op's operands for these sizes, both with K contiguous; in 8 bits with scales that give results
    near 1."""
    dice = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice).to(dtype)

    if name in SCALED:
        a, b = (torch.randint(-127, 128, (n, K), device=device, generator=dice, dtype=torch.int8) for n in (M, N))
        if name == "fp8_matmul":
            a, b = ((t.float() / 16).to(torch.float8_e4m3fn) for t in (a, b))
        scale = (1 / (73 if name == "int8_matmul" else 4.6)) / max(1, K) ** 0.25
        return [
            a,
            b.mT,
            *(torch.full((n,), scale, device=device).view(shape) for n, shape in ((M, (M, 1)), (N, (1, N)))),
        ]
    x, weight = draw(M, K), draw(N, K)
    return {
        "matmul": [x, weight.mT],
        "linear": [x, weight],
        "gated_linear": [x, weight, draw(N, K)],
        "gemv": [weight, x[:16]],
    }[name]


def able(name: str, args: list[Any], **given: Any) -> list[str]:
    """Returns the op's implementations that support the call."""
    rungs = get(name).implementations.values()
    return [r.name for r in rungs if r.kind != "compile" and why_not(r, *args, **given) is None]


def call(name: str, args: list[Any], impl: str | None, dtype: torch.dtype) -> torch.Tensor:
    options = {"out_dtype": dtype} if name in SCALED else {}
    return get(name).function(*args, **options, impl=impl)


@kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_sums_of_65536_products(name: str, dtype: str, device: str) -> None:
    K = 2048 if INTERPRETED else 65536
    args = operands(name, 72, 40, K, FLOATS[dtype], device)
    law = Law(get(name), [a.requires_grad_() for a in args])
    for impl in able(name, args):
        outputs = as_tuple(get(name).function(*law.args, impl=impl))
        verdict = law.judge(outputs)
        assert verdict.ok, f"{impl}: {verdict.reason()}"


@kernels
@pytest.mark.parametrize("name", SCALED)
def test_sums_of_65536_products_of_8_bits(name: str, device: str) -> None:
    """Integers must match to a rounding; 8-bit floats to float16's rounding plus what units drop in 128 products."""
    K = 2048 if INTERPRETED else 65536
    args = operands(name, 72, 48, K, torch.float16, device)
    exact = (args[0].double() @ args[1].double()) * args[2].double() * args[3].double()
    for impl in able(name, args):
        error = (call(name, args, impl, torch.float16).double() - exact).norm() / exact.norm()
        assert error <= (3e-4 if name == "int8_matmul" else 1e-3), (impl, error)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_infinities_and_nan(name: str, dtype: str, device: str) -> None:
    """Infinity and NaN reach exactly the rows or columns that they are in."""
    for place in (0, 1):
        for value in (float("inf"), float("-inf"), float("nan")):
            args = operands(name, 9, 40, 136, HALVES[dtype], device)
            args[place][3, 7] = value
            wide = [a.double() for a in args]
            expected = get(name).reference(*wide)
            for impl in able(name, args):
                found = get(name).function(*args, impl=impl)
                assert torch.equal(found.isnan(), expected.isnan()), (impl, place, value)
                ends = expected.isinf()
                assert torch.equal(found[ends].double(), expected[ends]), (impl, place, value)


@kernels
@pytest.mark.parametrize("how", ["int8", "fp8 rows", "fp8 blocks", "fp8 1x128"])
def test_infinities_and_nan_of_8_bits(how: str, device: str) -> None:
    """Infinity in scales, and NaN in codes (e4m3 has no infinity), reach exactly their rows, columns or blocks."""
    name, (M, N, K) = "int8_matmul" if how == "int8" else "fp8_matmul", (9, 264, 272)
    for place, where in ((0, (3, 7)), (1, (7, 3)), (2, (3, -1)), (3, (-1, 1))):
        for value in (float("inf"), float("-inf"), float("nan")):
            args = operands(name, M, N, K, torch.float16, device)
            if how in ("fp8 blocks", "fp8 1x128"):
                args[2:] = (
                    torch.rand(M, 3, device=device),
                    torch.rand(3, 3 if how == "fp8 blocks" else N, device=device),
                )
            if place < 2 and (value == value or name == "int8_matmul"):
                continue
            args[place][where] = value
            expected = get(name).reference(*args[:2], *[t.double() for t in args[2:]], out_dtype=torch.float64)
            assert expected.isfinite().any()
            for impl in able(name, args):
                found = call(name, args, impl, torch.float16).double()
                assert torch.equal(found.isfinite(), expected.isfinite()), (impl, place, value)
                if how in (
                    "int8",
                    "fp8 rows",
                ):  # for an infinite block the formula sums infinities of both signs
                    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@kernels
@pytest.mark.parametrize("zero", [None, -128, 127])
@pytest.mark.parametrize("sizes", [(2, 3, 2048), (24, 16, 4096), (70, 37, 1111)], ids=str)
def test_whole_numbers_are_exact(sizes: tuple[int, int, int], zero: int | None, device: str) -> None:
    """In every implementation: sums that fit in 32 bits are rounded once to float32."""
    a, b, *_ = operands("int8_matmul", *sizes, torch.float32, device)
    a[0], b[:, 0] = -128, 127 if zero is None else -128  # the largest sums
    one = torch.ones(1, device=device)
    zeros = None if zero is None else torch.full((sizes[0], 1), zero, dtype=torch.int32, device=device)
    exact = (a.double() - (zero or 0)) @ b.double()
    for impl in able("int8_matmul", [a, b, one, one]):
        y = ridgeline.int8_matmul(a, b, one, one, zero_a=zeros, out_dtype=torch.float32, impl=impl)
        assert torch.equal(y, exact.float()), impl


@kernels
@pytest.mark.parametrize("sizes", [(0, 24, 16), (5, 0, 16), (5, 24, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_sizes_of_zero(name: str, sizes: tuple[int, int, int], device: str) -> None:
    """An empty sum is 0, and a product without rows is empty."""
    args = operands(name, *sizes, torch.float16, device)
    for impl in (None, *able(name, args)):
        y = call(name, args, impl, torch.float16)
        assert tuple(y.shape) == sizes[:2], impl
        assert not y.count_nonzero(), impl


@kernels
@pytest.mark.parametrize(
    "shapes", [((0, 3, 4), (0, 4, 5)), ((2, 0, 4), (2, 4, 5)), ((2, 3, 0), (2, 0, 5)), ((2, 3, 4), (1, 4, 0))], ids=str
)
def test_batches_of_zero(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    a, b = (torch.ones(shape, device=device, dtype=torch.float16) for shape in shapes)
    for impl in (None, *able("matmul", [a, b])):
        y = ridgeline.matmul(a, b, impl=impl)
        assert y.shape == torch.matmul(a, b).shape, impl
        assert not y.count_nonzero(), impl


def test_nothing_of_no_size_is_left_to_hopper() -> None:
    """If a kernel's rule serves a call automatically, a kernel supports it."""
    with devices.pretend("sm_90"), observe(lambda launch: None):
        for batch, M, N, K in ((0, 1024, 1025, 1025), (2, 0, 2047, 2047), (2, 2048, 0, 2047), (2, 2048, 2047, 0)):
            y = ridgeline.matmul(
                torch.zeros(batch, M, K, dtype=torch.float16), torch.zeros(batch, K, N, dtype=torch.float16)
            )
            assert tuple(y.shape) == (batch, M, N)
            for name in ("linear", "gated_linear"):
                x, weight = torch.zeros(batch, M, K, dtype=torch.float16), torch.zeros(N, K, dtype=torch.float16)
                args = [x, weight] if name == "linear" else [x, weight, weight]
                assert tuple(get(name).function(*args, activation="silu").shape) == (batch, M, N)


GRAPHED = {"rows of whole 16 bytes": (72, 264, 136), "others": (70, 261, 137), "short rows": (2, 264, 64)}
GRAPHED |= {"one row": (1, 72, 40) if INTERPRETED else (1, 1056, 1032)}


@kernels
@pytest.mark.parametrize("sizes", GRAPHED)
@pytest.mark.parametrize("name", OPS)
def test_replays_of_a_graph(name: str, sizes: str, device: str) -> None:
    """A call in a CUDA graph gives the same as outside it, forward and backward, replayed on new data.

    Without a GPU the call is repeated."""
    args = operands(name, *GRAPHED[sizes], torch.float16, device)
    leaves = [a.requires_grad_() for a in args] if name in FLOAT_OPS else []
    dy = torch.randn_like(call(name, args, None, torch.float16))

    def work(args: list[torch.Tensor], impl: str) -> list[torch.Tensor]:
        y = call(name, args, impl, torch.float16)
        return [y.detach(), *(torch.autograd.grad(y, args, dy) if leaves else ())]

    for rung in [get(name).implementations[i] for i in able(name, args)]:
        if rung.is_kernel:
            replay = (
                captured(lambda impl=rung.name: work(args, impl), 3)
                if device == "cuda"
                else lambda impl=rung.name: work(args, impl)
            )
            for seed in range(1, 2 if INTERPRETED else 4):
                others = operands(name, *GRAPHED[sizes], torch.float16, device, seed)
                for a, other in zip(args, others, strict=True):
                    a.detach().copy_(other)
                expected = work([o.requires_grad_(bool(leaves)) for o in others], rung.name)
                assert all(torch.equal(one, other) for one, other in zip(replay(), expected, strict=True)), rung.name


SPLIT = (72, 520, 8328)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1000, 1032, 520), (1000, 1032, 521), SPLIT], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["matmul", "linear", "gated_linear"])
def test_the_same_bits_each_time(name: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    """Forward and backward in half precision in every implementation, for new launches and for replays."""
    args = [a.requires_grad_() for a in operands(name, *sizes, HALVES[dtype], "cuda")]
    dy = torch.randn(sizes[:2], device="cuda", dtype=HALVES[dtype])
    for impl in [i for i in able(name, args) if get(name).implementations[i].is_kernel]:
        started: list[Launch] = []
        found = []
        for n in range(5):
            with observe(started.append) if n == 0 else nullcontext():
                y = get(name).function(*args, impl=impl)
            found.append([y.detach(), *torch.autograd.grad(y, args, dy)])
        assert all(
            torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True)
        ), impl
        if sizes == SPLIT and impl == "gluon" and name != "gated_linear":
            assert len(started) == 2, started  # the parts along K, and their sums


@pytest.mark.gpu
def test_long_steps_along_k() -> None:
    """Steps between a tile's elements pass 2^31."""
    b = torch.empty(39 * 80_000_000 + 2, dtype=torch.float16, device="cuda").as_strided((40, 2), (80_000_000, 1))
    b.copy_(torch.randn(40, 2))
    a = torch.randn(3, 40, device="cuda", dtype=torch.float16)
    torch.testing.assert_close(ridgeline.matmul(a, b, impl="triton"), a @ b.contiguous(), rtol=1e-2, atol=1e-2)


LONG = {"a": ((1 << 31) // 32768 + 40, 24, 32768), "b": (24, (1 << 31) // 32768 + 40, 32768), "y": (66000, 33000, 64)}


@pytest.mark.gpu
@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("name", ["matmul", "linear", "gated_linear", "int8_matmul", "fp8_matmul"])
def test_more_than_two_to_the_31(name: str, long: str) -> None:
    """Elements of a, of b or of the result past 2^31 are correct."""
    args = operands(name, *LONG[long], torch.bfloat16, "cuda")
    rows, columns = (slice(-70, None),), (slice(None), slice(-70, None))
    piece, of_b = (
        (columns if long == "b" else rows),
        (rows if "linear" in name else columns),
    )  # b: a transposed weight
    own = {0, 2} if name in SCALED else {0}  # of a, including its scales
    head = [t[of_b if long == "b" else rows] if (n in own) == (long != "b") else t for n, t in enumerate(args)]
    expected = call(name, head, "naive" if name in SCALED else "torch", torch.bfloat16)
    for impl in [i for i in able(name, args) if i not in ("naive", "torch")]:
        y = call(name, args, impl, torch.bfloat16)
        torch.testing.assert_close(
            y[piece],
            expected,
            rtol=2e-2,
            atol=2e-2 * float(expected.abs().max()),
            msg=lambda m, impl=impl: f"{impl}: {m}",
        )
        del y


@pytest.mark.gpu
@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("shape", [(70000, 32768), ((1 << 25) + 1000, 64)], ids=["long rows", "short rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "complex32"])
def test_gemv_of_more_than_two_to_the_31(dtype: str, shape: tuple[int, int]) -> None:
    def draw(*shape: int) -> torch.Tensor:
        if dtype == "bfloat16":
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return torch.view_as_complex(torch.randn(*shape, 2, device="cuda", dtype=torch.float16) / 8)

    a, x = draw(*shape), draw(2, shape[1])
    for given in (x[0], x):
        expected = ridgeline.gemv(a[-70:], given, impl="torch")
        for impl in [i for i in able("gemv", [a, given]) if i not in ("naive", "torch")]:
            y = ridgeline.gemv(a, given, impl=impl)[..., -70:]
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2.0, msg=lambda m, impl=impl: f"{impl}: {m}")


@pytest.mark.parametrize("library", ["cublas", "cublaslt"])
def test_each_of_torchs_libraries(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of matmul set the switch for forward's product and for backward's two, and reset it even on failure."""
    from ridgeline.lab.measurement import peers
    from ridgeline.lab.measurement.peers import blas

    said: list[str] = ["default"]

    def prefer(library: str | None = None) -> str:
        said.extend([library] if library else [])
        return said[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    a, b = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
    )
    y = blas._function().apply(library, a, b)
    assert torch.equal(y, a @ b)
    dy = torch.randn(3, 5, dtype=torch.float64)
    for found, expected in zip(torch.autograd.grad(y, (a, b), dy), torch.autograd.grad(a @ b, (a, b), dy), strict=True):
        torch.testing.assert_close(found, expected)
    assert said == ["default", *[library, "default"] * 3]
    with pytest.raises(RuntimeError):
        blas._product(library, a, a)
    assert said[-1] == "default"
    (peer,) = [p for p, missing in peers.of(get("matmul")) if p.name == library and missing is None]
    with pytest.raises(RidgelineError, match=f"{library} .* cpu"):
        peer(a, b)


def test_the_formula_of_a_product() -> None:
    """`naive` supports what torch.matmul does, vectors and broadcast batches included, up to a number of products."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 5)),
        ((2, 1, 3, 4), (6, 4, 5)),
    ]
    for left, right in [*shapes, ((2, 3, 4), (4,)), ((4,), (2, 4, 3)), ((3, 0), (0, 4)), ((0,), (0,))]:
        a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
        y, expected = ridgeline.matmul(a, b, impl="naive"), torch.matmul(a, b)
        torch.testing.assert_close(y, expected)
        for found, wanted in zip(*(torch.autograd.grad(t.sum(), (a, b)) for t in (y, expected)), strict=True):
            torch.testing.assert_close(found, wanted)
    big = torch.ones(1024, 1).expand(1024, 1024)
    with pytest.raises(RidgelineError, match="every product in memory"):
        ridgeline.matmul(big, big, impl="naive")
