"""The ladders' ends: calls that kernels cannot index, or that PyTorch does better, are left to it, by sizes alone."""

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import boundary, device
from ridgeline.cuda import CudaKernel
from ridgeline.op import RidgelineError, get
from ridgeline.select import eager, select, why_not

FAR = 1 << 31


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(n: int) -> tuple[Any, ...]:
    return meta(5, 1), 0, meta(n, dtype=torch.int64), meta(n, 1)


# An op: a call that kernels serve, one that is left to PyTorch, and the rungs that refuse the second by name.
LEFT = {
    "histogram, bins": ("histogram", (meta(9), 1 << 24), (meta(9), (1 << 24) + 1), ["cuda_global", "cuda"]),
    "transpose, columns": (
        "transpose",
        (meta(4, 1 << 30),),
        (meta(4, FAR),),
        ["cuda", "cuda_padded", "cuda_packed", "cuda_tma", "gluon"],
    ),
    "transpose, rows": (
        "transpose",
        (meta(1 << 30, 4),),
        (meta(FAR, 4),),
        ["cuda", "cuda_packed", "cuda_tma", "gluon"],
    ),
    "transpose, matrices": (
        "transpose",
        (meta(FAR - 1, 4, 4),),
        (meta(FAR, 4, 4),),
        ["cuda", "cuda_packed", "cuda_tma", "gluon"],
    ),
    "upsample, columns of x": ("upsample_nearest2d", (meta(1, 1, 2, 1 << 29), 2), (meta(1, 1, 2, FAR), 0.5), ["cuda"]),
    "upsample, columns of y": (
        "upsample_nearest2d",
        (meta(1, 1, 2, 1 << 29), 2),
        (meta(1, 1, 2, 1 << 30), 2),
        ["cuda", "cuda_packed"],
    ),
    "upsample, all pixels": (
        "upsample_nearest2d",
        (meta(1 << 30, 2, 4, 4), 2),
        (meta(1 << 30, 8, 4, 4), 2),
        ["cuda", "cuda_packed"],
    ),
    "index_add, indices": ("index_add", indices(FAR - 1), indices(FAR), ["cuda"]),
    "radix_sort, keys": ("radix_sort", (meta(1 << 14), None), (meta((1 << 14) - 1), None), []),
    "reduce_sum, slices": ("reduce_sum", (meta(1000, 3, 4), 1), (meta(1000000, 3, 4), 1), []),
    "reduce_sum, slices of larger ones": (
        "reduce_sum",
        (meta(1000000, 3, 400), 1),
        (meta(1000, 1000, 3, 2, 4), (2, 3)),
        [],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pytorch(name: str) -> None:
    op, served, left, refusing = get(LEFT[name][0]), *LEFT[name][1:]
    with device.pretend("sm_90"):
        assert eager(op, None, *served) is None
        plain = eager(op, None, *left)
        assert plain is not None
        assert plain.name == "torch"
        for rung in refusing:
            assert why_not(op.implementations[rung], *left), rung
            assert why_not(op.implementations[rung], *served) is None, rung
        for rung in op.implementations.values():
            reason = rung.unless(*left) if rung.unless else None
            assert reason is None or not any(c.isdigit() for c in reason.replace("float32", "")), reason


def test_whole_sums_and_ends_are_left_to_kernels() -> None:
    op = get("reduce_sum")
    with device.pretend("sm_90"):
        for x, dim in (
            (meta(1000000, 3, 4), None),
            (meta(1000000, 3, 4), (1, 2)),
            (meta(1000000, 3, 4), 0),
            (meta(3, 4, 1000000), 1),
        ):
            assert eager(op, None, x, dim) is None


def test_counts_in_shared_memory_only_where_they_have_room() -> None:
    rungs, x = get("histogram").implementations, meta(9)
    with device.pretend("sm_90"):
        assert why_not(rungs["cuda_shared"], x, 50000) is None
        assert "shared memory" in str(why_not(rungs["cuda_shared"], x, 100000))
        assert why_not(rungs["cuda_copies"], x, 8192) is None
        assert "copies" in str(why_not(rungs["cuda_copies"], x, 8193))
        assert why_not(rungs["cuda"], x, 100000) is None


def test_products_refuse_sides_whose_tiles_reach_too_far() -> None:
    rung, n = next(i for i in get("sgemm").implementations.values() if i.kind == "cuda"), FAR - 256
    with device.pretend("sm_90"):
        assert why_not(rung, meta(n, 1), meta(1, 3)) is None
        assert "2^31" in str(why_not(rung, meta(n + 1, 1), meta(1, 3)))
        assert "2^31" in str(why_not(rung, meta(3, 1), meta(1, n + 1)))


def test_regimes_of_softmax_refuse_rows_that_they_cannot_hold_or_count() -> None:
    rungs = get("softmax").implementations
    with device.pretend("sm_90"):
        for name, most in (("cuda_bh", 1024), ("cuda_warp", 1024), ("cuda_uncached", FAR - 1024)):
            assert why_not(rungs[name], meta(3, most)) is None
            assert str(most + 1) in str(why_not(rungs[name], meta(3, most + 1)))
        assert why_not(rungs["cuda_block"], meta(3, 20000)) is None
        assert "shared memory" in str(why_not(rungs["cuda_block"], meta(3, 30000)))


def test_rows_of_softmax_go_by_length() -> None:
    """Warps take up to 1024 columns that 16 bytes divide, clusters wide rows, tiles the rest."""
    half = torch.bfloat16
    for name in ("softmax", "log_softmax"):
        with device.pretend("h200"):
            for x, expected in (
                (meta(9, 16), "cuda_warp"),
                (meta(9, 1024, dtype=half), "cuda_warp"),
                (meta(9, 17), "triton"),
                (meta(9, 20, dtype=half), "triton"),
                (meta(9, 2048, dtype=half), "triton"),
                (meta(9, 4096, dtype=half), "cuda_cluster"),
            ):
                assert select(get(name), None, x, kernels=True).name == expected, (name, x.shape)


@pytest.mark.parametrize("columns", [16384, 32768])
def test_long_rows_of_softmax_in_tiles_and_clusters(columns: int) -> None:
    """The cluster's rung gives 16384 columns to tiles, forward of any dtype and log_softmax's backward in float32."""
    for name, dtype, backward in (("softmax", torch.bfloat16, False), ("log_softmax", torch.float32, True)):
        seen: list[Any] = []
        x = meta(9, columns, dtype=dtype).requires_grad_()
        with device.pretend("h200"), boundary.observe(seen.append):
            y = getattr(ridgeline, name)(x)
            if backward:
                torch.autograd.grad(y, x, meta(9, columns, dtype=dtype))
        kernels = {"cuda" if isinstance(launch.kernel, CudaKernel) else "triton" for launch in seen}
        assert kernels == {"triton" if columns == 16384 else "cuda"}


@pytest.mark.parametrize(("card", "dtype", "n", "allowed", "expected"), [
    ("h200", torch.float16, 1025, False, "cuda_packed"),
    ("h200", torch.bfloat16, 1025, False, "cuda_packed"),
    ("h100", torch.float16, 1025, False, "cuda"),
    ("h200", torch.float16, 1025, None, "cuda"),
    ("h200", torch.float32, 1025, False, "cuda"),
    ("h200", torch.float16, 1024, False, "cuda_pass"),
])  # fmt: skip
def test_atomics_where_they_are_quicker(
    card: str, dtype: torch.dtype, n: int, allowed: bool | None, expected: str
) -> None:
    x, index, source = meta(3000, 256, dtype=dtype), meta(n, dtype=torch.int64), meta(n, 256, dtype=dtype)
    with device.pretend(card):
        assert select(get("index_add"), None, x, 0, index, source, 1.0, allowed).name == expected


def test_no_row_can_be_added_where_there_is_none() -> None:
    """By shapes alone: on a GPU the index is not read, and backward would read what is not there."""
    x, index = meta(4, 0), meta(3, dtype=torch.int64)
    with pytest.raises(RidgelineError, match="index must be empty where x has no rows"):
        ridgeline.index_add(x, 1, index, meta(4, 3))
    assert ridgeline.index_add(x, 1, meta(0, dtype=torch.int64), meta(4, 0)).shape == (4, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1, 3, 40, 200])
@pytest.mark.parametrize(("size", "n"), [(70, 15), (2000, 15), (2000, 400), (700, 1024), (9000, 1024), (900, 3000)])
def test_rows_that_indices_out_of_range_name(size: int, n: int, inner: int) -> None:
    """NaN in the nearest row, and nowhere else.

    Rows are named many times over, and sums are whole numbers."""
    x, source = (torch.randint(-8, 9, (2, rows, inner), device="cuda").float() for rows in (size, n))
    index = torch.randint(1, size - 1, (n,), device="cuda") // 7 * 7  # so that some are 0
    index[[3, n // 2, n - 1]] = torch.tensor([-5, size, -(1 << 40)], device="cuda")
    expected = x.double().index_add(1, index.clamp(0, size - 1), source.double()).float()
    expected[:, [0, -1]] = float("nan")
    for rung in get("index_add").implementations.values():
        if rung.is_kernel and why_not(rung, x, 1, index, source, 1.0, True) is None:
            found = ridgeline.index_add(x, 1, index, source, impl=rung.name)
            torch.testing.assert_close(
                found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=rung.name: f"{name}: {m}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "torch", "cuda"])
def test_cumsum_under_autocast(impl: str | None) -> None:
    x = torch.randn(7, 300, device="cuda", dtype=torch.float16, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        found, expected = ridgeline.cumsum(x, 1, impl=impl), torch.cumsum(x, 1)
        assert ridgeline.cumsum(x, 1, torch.float16, impl=impl).dtype == torch.float16
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(found)
    exact = dy.double().flip(1).cumsum(1).flip(1)  # torch's own gradient is summed in float16 here
    torch.testing.assert_close(torch.autograd.grad(found, x, dy)[0].double(), exact, rtol=1e-3, atol=1e-3)


def test_whole_numbers_below_a_histogram(device: str) -> None:
    """Beyond 2^24 float32 rounds a whole number onto the range's end, which it lies outside of."""
    x = torch.tensor([-(2**24) - 1, -(2**24), 0, 2**24, 2**24 + 1], dtype=torch.int32, device=device)
    expected = [0] * 256
    expected[0], expected[128], expected[255] = 1, 1, 1
    for rung in get("histogram").implementations.values():
        if (rung.is_kernel and device == "cpu") or rung.kind == "compile":
            continue
        assert ridgeline.histogram(x, 256, (-(2**24), 2**24), impl=rung.name).tolist() == expected, rung.name
