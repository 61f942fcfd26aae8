"""2:4 sparsity: the format, what tensor cores read of it, emulated lane by lane, the products, and their refusals."""

from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import device as devices
from ridgeline.boundary import Launch, observe
from ridgeline.op import get
from ridgeline.ops.matmul import _sparse, _sparse_cuda

IMPLS = ["naive", pytest.param("triton", marks=pytest.mark.kernels)]


def weight(N: int, K: int, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, K, device=device).to(dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_sparsify_keeps_the_two_largest(impl: str, device: str) -> None:
    w = weight(37, 200, device)
    values, metadata = ridgeline.sparsify(w, impl=impl)
    dense = ridgeline.densify(values, metadata, impl=impl)
    size, kept = w.abs().unflatten(1, (-1, 4)), dense.unflatten(1, (-1, 4)) != 0
    assert metadata.shape == (4, 37, 8)
    assert bool((kept.sum(-1) == 2).all())
    assert bool((torch.where(kept, size, float("inf")).amin(-1) >= torch.where(kept, 0, size).amax(-1)).all())
    assert torch.equal(dense, torch.where(dense != 0, w, 0))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("four", "columns"),
    [
        ([1.0, 1, 1, 1], (0, 1)),
        ([0.0, 0, 0, 0], (0, 1)),
        ([1.0, -2, 2, 2], (1, 2)),
        ([3.0, -1, 2, 2], (0, 2)),
        ([0.0, 0, 0, 5], (0, 3)),
        ([1.0, 2, 0, 1], (0, 1)),
        ([2.0, 1, 1, 0], (0, 1)),
        ([0.0, 1, 2, 1], (1, 2)),
        ([0.0, 2, 1, 1], (1, 2)),
        ([1.0, float("nan"), 9, 2], (1, 2)),
        ([float("inf"), 1, float("nan"), float("-inf")], (0, 2)),
    ],
)
def test_ties_and_nan(four: list[float], columns: tuple[int, int], impl: str, device: str) -> None:
    values, metadata = ridgeline.sparsify(torch.tensor([four], device=device), impl=impl)
    assert tuple(_sparse.kept(metadata, 4)[0, 0].tolist()) == columns
    torch.testing.assert_close(values.cpu(), torch.tensor([[four[c] for c in columns]]).float(), equal_nan=True)
    assert metadata.flatten().tolist() == [columns[0] | columns[1] << 2 | 4 << 4, *[0x44] * 7]


@pytest.mark.parametrize("impl", IMPLS)
def test_int8_becomes_dense(impl: str, device: str) -> None:
    values = torch.randint(-128, 128, (9, 40), dtype=torch.int8, device=device)
    metadata = _sparse.Metadata(9, 80).make(torch.int8, device, None)
    assert torch.equal(ridgeline.densify(values, metadata, impl=impl), _sparse.plain_densify(values, metadata))


# What one warp's mma.sp.m16n8k32 computes, by the PTX ISA's fragments of halves. They are written here on their own,
# not from `_sparse.py` or the kernels: lane = 4 * group + place.
def a_at(row: int, column: int) -> tuple[int, int, int]:
    """The lane, register and half that hold kept number `column` (0 to 15) of a row of the left operand."""
    return row % 8 * 4 + column % 8 // 2, row // 8 + 2 * (column // 8), column % 2


def b_at(k: int, column: int) -> tuple[int, int, int]:
    return column * 4 + k % 8 // 2, k // 8, k % 2


def meta_at(row: int, column: int, selector: int) -> tuple[int, int]:
    """The lane and first bit of the two bits for kept number `column` of a row: lanes 0 and 1 of a group have 16
    columns, or 8 kept numbers, each, for selector 0; lanes 2 and 3 for 1."""
    return row % 8 * 4 + 2 * selector + column // 8, row // 8 * 16 + column % 8 * 2


def mma_sp(a: torch.Tensor, b: torch.Tensor, words: list[int], selector: int) -> torch.Tensor:
    """D (16, 8) of registers a, b (32 lanes, 4, 2) and each lane's word of metadata."""
    d = torch.zeros(16, 8)
    for row in range(16):
        for column in range(16):
            lane, bit = meta_at(row, column, selector)
            k = column // 2 * 4 + (words[lane] >> bit & 3)
            for n in range(8):
                d[row, n] += a[a_at(row, column)] * b[b_at(k, n)]
    return d


def ldmatrix(rows: list[torch.Tensor]) -> torch.Tensor:
    """Registers (32, 4, 2) of the 32 rows of 8 numbers at the lanes' addresses: matrix i has those of lanes 8 i on."""
    return torch.stack(
        [torch.stack([rows[8 * i + lane // 4][2 * (lane % 4) :][:2] for i in range(4)]) for lane in range(32)]
    )


def word(tile: torch.Tensor, lane: int) -> int:
    """`kept_columns` of sparse.cuh, for rows of 8 bytes."""
    flat = tile.flatten().tolist()
    at = lane // 4 * 8 + lane % 4 * 2
    return flat[at] | flat[at + 1] << 8 | flat[at + 64] << 16 | flat[at + 65] << 24


def test_fragments_of_mma_sp() -> None:
    """The kernel's addresses and the format's bytes give W x^T, of a tile 16 x 64 by 64 x 8."""
    w, x = weight(16, 64), weight(8, 64)
    values, metadata = ridgeline.sparsify(w)
    words = [word(metadata[0], lane) for lane in range(32)]
    d = torch.zeros(16, 8)
    for half in range(2):
        a = ldmatrix([values[lane % 16, 16 * half + lane // 16 * 8 :][:8] for lane in range(32)])
        b = ldmatrix([x[lane % 8, 32 * half + lane // 8 * 8 :][:8] for lane in range(32)])
        d += mma_sp(a, b, words, half)
    torch.testing.assert_close(d, ridgeline.densify(values, metadata) @ x.T)


def test_fragments_of_mma_sp_of_bytes() -> None:
    """The same for int8, m16n8k64: 128 columns of K, two halves of 64, each with a block of metadata of its own."""
    values, x = torch.randint(-128, 128, (16, 64)), torch.randint(-128, 128, (8, 128))
    metadata = _sparse.Metadata(16, 128).make(torch.int8, "cpu", None)
    d = torch.zeros(16, 8, dtype=torch.int64)
    for half in range(2):
        flat = metadata[half].flatten().tolist()
        starts = [(lane // 4 + lane % 2 * 8) * 8 + lane % 4 // 2 * 4 for lane in range(32)]  # kept_columns_of_bytes
        words = [int.from_bytes(bytes(flat[at : at + 4]), "little") for at in starts]
        # Rows of 16 bytes at the lanes' addresses; a lane then has four bytes of each of four matrices.
        rows_a = [values[lane % 16, 32 * half + lane // 16 * 16 :][:16] for lane in range(32)]
        rows_b = [x[lane % 8, 64 * half + lane // 8 * 16 :][:16] for lane in range(32)]
        a, b = (
            [[rows[8 * i + lane // 4][4 * (lane % 4) :][:4] for i in range(4)] for lane in range(32)]
            for rows in (rows_a, rows_b)
        )
        for row in range(16):
            for column in range(32):  # of the kept numbers
                word = words[row % 8 * 4 + row // 8 + 2 * (column // 16)]
                k = column // 2 * 4 + (word >> column % 16 * 2 & 3)
                left = a[row % 8 * 4 + column % 16 // 4][row // 8 + 2 * (column // 16)][column % 4]
                for n in range(8):
                    d[row, n] += left * b[n * 4 + k % 16 // 4][k // 16][k % 4]
    assert torch.equal(d, _sparse.plain_densify(values, metadata) @ x.T)


def test_words_of_wgmma_sp() -> None:
    """Each word is what CUTLASS's layout of metadata says for 64 x 32 halves: (thread, column) -> row + 64 * k."""
    w = weight(64, 64)
    _, metadata = ridgeline.sparsify(w)
    columns = _sparse.kept(metadata, 64)
    for selector in range(2):
        for thread in range(128):
            if thread % 4 // 2 != selector:
                continue
            made = word(metadata[0, thread // 32 * 16 :][:16], thread % 32)
            for j in range(32):  # the 16 columns of one row, then those of the row 8 below; two bits for two of four
                at = 1024 * (thread & 1) + (thread >> 2 & 7) + 16 * (thread >> 5) + 64 * (j % 16) + 8 * (j // 16)
                row, k = at % 64, at // 64 + 32 * selector
                if k % 4 < 2:
                    bit = j // 16 * 16 + j % 16 // 4 * 4 + k % 4 * 2
                    assert made >> bit & 3 == columns[row, k // 4, k % 4]


def test_sums_turn_on_their_way_to_shared_memory() -> None:
    """wgmma's sums, stored by the addresses that the lanes give to stmatrix.trans, are rows of y in TMA's swizzle."""
    d = torch.arange(64 * 64).view(64, 64)  # rows of W by rows of x
    board = torch.full((64, 8, 8), -1)  # rows of y, pieces of 16 bytes, halves
    for warp in range(4):
        for j in range(0, 8, 2):
            for matrix in range(4):
                rows, first = 16 * warp + 8 * (matrix % 2), 8 * (j + matrix // 2)
                block = d[rows : rows + 8, first : first + 8]  # lane l has row l / 4, columns 2 (l % 4) and the next
                for r in range(8):
                    lane = 8 * matrix + r
                    m, piece = 8 * j + lane // 16 * 8 + lane % 8, 2 * warp + lane // 8 % 2
                    board[m, piece ^ (m & 7)] = block[:, r]
    y = torch.stack([board[m, [p ^ (m & 7) for p in range(8)]].flatten() for m in range(64)])
    assert torch.equal(y, d.T)


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
def test_gradients_stay_where_weights_are(impl: str, device: str) -> None:
    w, x, bias = (
        weight(24, 96, device).requires_grad_(),
        weight(2, 5 * 96, device).view(2, 5, 96),
        weight(1, 24, device)[0],
    )
    x.requires_grad_()
    bias.requires_grad_()
    values, metadata = ridgeline.sparsify(w, impl="triton" if impl == "triton" else "naive")
    y = ridgeline.sparse_matmul(x, values, metadata, bias=bias, impl=impl)
    dense = ridgeline.densify(values, metadata).detach().requires_grad_()
    expected = torch.nn.functional.linear(x, dense, bias)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), dy)
    wanted = torch.autograd.grad(expected, (x, dense, bias), dy)
    torch.testing.assert_close((dx, db), (wanted[0], wanted[2]))
    torch.testing.assert_close(dw, torch.where(dense != 0, wanted[1], 0))


@pytest.mark.kernels
def test_refusals(device: str) -> None:
    x, values = torch.ones(4, 24, device=device).half(), torch.ones(8, 12, device=device).half()
    metadata = _sparse.Metadata(8, 24).make(torch.half, device, None)
    assert "16 bytes" in str(_sparse_cuda.unfit(x, values, metadata))
    assert _sparse_cuda.left(x, values) is not None
    whole = torch.ones(8, 16, device=device).half()
    assert _sparse_cuda.left(torch.ones(4, 32, device=device).half(), whole) is None
    assert "multiple of 8" in str(_sparse_cuda.left_wgmma(x, whole[:7]))
    with pytest.raises(ridgeline.RidgelineError, match="cuda_mma"):
        ridgeline.sparse_matmul(x, values, metadata, impl="cuda_mma")
    torch.testing.assert_close(  # a call that CUDA C++ cannot take is served
        ridgeline.sparse_matmul(x, values, metadata), x @ ridgeline.densify(values, metadata).T
    )


def test_rule_prefers_what_it_should() -> None:
    with devices.pretend("sm_90") as gpu:
        assert _sparse_cuda.rule(gpu, 8192, 8192, 128)["BM"] == 256
        few = _sparse_cuda.rule(gpu, 128, 1024, 64)
    assert few["BM"] in (64, 128)
    assert few["LAG"] == 0


def test_rule_fits_shared_memory() -> None:
    for size, tall, (stages, boards) in [(s, t, r) for s, ring in _sparse_cuda.RING.items() for t, r in ring.items()]:
        assert stages * _sparse_cuda.step_bytes(tall, size) + 2 * boards * 8192 + 1024 <= 227 << 10
    for config in _sparse_cuda.space():
        assert config["LAG"] < config["STAGES"]
        assert config["BM"] // config["DOWN"] <= 256


SIZES = [(16, 16, 64), (128, 128, 64), (33, 40, 128), (300, 264, 80), (513, 1032, 1040), (2048, 2048, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda_mma", "cuda_wgmma"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_exact(size: tuple[int, int, int], dtype: torch.dtype, impl: str, device: str) -> None:
    """Small integers have exact sums: a wrong column shows as a wrong number, not as noise."""
    M, N, K = size
    x = torch.randint(-2, 3, (M, K), device=device).to(dtype)
    values = torch.randint(-2, 3, (N, K // 2), device=device).to(dtype)
    metadata = _sparse.Metadata(N, K).make(dtype, device, None)
    bias = torch.randint(-2, 3, (N,), device=device).to(dtype)
    y = ridgeline.sparse_matmul(x, values, metadata, bias=bias, impl=impl)
    exact = x.double() @ _sparse.plain_densify(values, metadata).double().T + bias.double()
    assert torch.equal(y, exact.to(dtype))


def block_sparse(device: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, blocks, starts and columns: an empty row, columns out of order, two blocks at one place, one of no row."""
    x, blocks = weight(20, 64, device, dtype).requires_grad_(), torch.randn(6, 16, 16, device=device).to(dtype)
    starts, columns = torch.tensor([0, 3, 3, 5], device=device), torch.tensor([3, 0, 0, 1, 2, 2], device=device)
    return x, blocks.requires_grad_(), starts, columns


@pytest.mark.parametrize("impl", ["naive", "torch", pytest.param("triton", marks=pytest.mark.kernels)])
def test_blocks_in_any_order(impl: str, device: str) -> None:
    x, blocks, starts, columns = block_sparse(device)
    w = torch.zeros(48, 64, device=device)
    for i, (row, column) in enumerate([(0, 3), (0, 0), (0, 0), (2, 1), (2, 2)]):
        w[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += blocks.detach()[i]
    y = ridgeline.block_sparse_matmul(x, blocks, starts, columns, impl=impl)
    torch.testing.assert_close(y, x @ w.T)
    dy = torch.randn_like(y)
    dx, db = torch.autograd.grad(y, (x, blocks), dy)
    torch.testing.assert_close(dx, dy @ w)
    dw = dy.T @ x
    torch.testing.assert_close(db[3], dw[32:48, 16:32])
    torch.testing.assert_close(db[1], db[2])
    assert not db[5].any()
    (only,) = torch.autograd.grad(ridgeline.block_sparse_matmul(x, blocks, starts, columns, impl=impl), blocks, dy)
    torch.testing.assert_close(only, db)


def test_blocks_are_those_of_torchs_layout(device: str) -> None:
    w = torch.randn(64, 96, device=device) * torch.randint(2, (4, 6), device=device).repeat_interleave(
        16, 0
    ).repeat_interleave(16, 1)
    bsr, x = w.to_sparse_bsr((16, 16)), torch.randn(7, 96, device=device)
    y = ridgeline.block_sparse_matmul(x, bsr.values(), bsr.crow_indices(), bsr.col_indices(), impl="naive")
    torch.testing.assert_close(y, x @ w.T)


@pytest.mark.parametrize("impl", ["naive", "dense", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("one", [False, True])
def test_int8(one: bool, impl: str, device: str) -> None:
    x, values = (torch.randint(-128, 128, s, dtype=torch.int8, device=device) for s in ((20, 96), (24, 48)))
    metadata, bias = _sparse.Metadata(24, 96).make(torch.int8, device, None), torch.randn(24, device=device)
    scales = [torch.rand(1 if one else n, device=device) for n in (20, 24)]
    y = ridgeline.int8_sparse_matmul(x, values, metadata, *scales, bias=bias, out_dtype=torch.float32, impl=impl)
    sums = x.double() @ _sparse.plain_densify(values, metadata).double().T
    torch.testing.assert_close(y, (sums.float() * scales[0].view(-1, 1) * scales[1] + bias))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda_mma", "cuda_wgmma"])
@pytest.mark.parametrize("size", [(16, 16, 64), (33, 40, 96), (300, 264, 160), (513, 1032, 1056), (2048, 2048, 2048)])
def test_int8_is_exact(size: tuple[int, int, int], impl: str, device: str) -> None:
    M, N, K = size
    x, values = (torch.randint(-3, 4, s, dtype=torch.int8, device=device) for s in ((M, K), (N, K // 2)))
    metadata, one = _sparse.Metadata(N, K).make(torch.int8, device, None), torch.ones(1, device=device)
    bias = torch.randint(-2, 3, (N,), device=device).to(torch.bfloat16)
    y = ridgeline.int8_sparse_matmul(x, values, metadata, one, 2 * one, bias=bias, impl=impl)
    exact = 2 * x.double() @ _sparse.plain_densify(values, metadata).double().T + bias.double()
    assert torch.equal(y, exact.to(torch.bfloat16))


def test_what_serves_on_hopper() -> None:
    """The sparse instruction takes many rows in half precision; the rest is multiplied by a dense copy."""
    served = []
    for rows, dtype in ((2048, torch.bfloat16), (2047, torch.bfloat16), (2048, torch.float32)):
        weight, launched = ridgeline.sparsify(torch.randn(256, 256, dtype=dtype)), list[Launch]()
        with devices.pretend("sm_90"), observe(launched.append):
            ridgeline.sparse_matmul(torch.empty(rows, 256, dtype=dtype), *weight)
        served.append("sparse_wgmma" in str(launched))
    assert served == [True, False, False]


def test_many_blocks_are_a_dense_product() -> None:
    """By the blocks' side and number, and by the rows, which make a dense weight pay. Gradients move the limit."""
    chosen = get("block_sparse_matmul").implementations["triton"]
    for side, share, rows, train, left in (
        (128, 0.5, 8192, False, False),
        (128, 0.7, 8192, False, True),
        (64, 0.5, 8192, True, False),
        (64, 0.57, 8192, True, True),
        (64, 0.57, 8192, False, False),
        (32, 0.25, 8192, False, False),
        (32, 0.25, 8192, True, True),
        (128, 1.0, 512, False, False),
        (32, 0.5, 256, True, False),
    ):
        count = round((8192 // side) ** 2 * share)
        x = torch.empty(rows, 8192, dtype=torch.bfloat16, device="meta", requires_grad=train)
        blocks = x.new_empty(count, side, side, requires_grad=False)
        starts = torch.empty(8192 // side + 1, dtype=torch.int32, device="meta")
        reason = chosen.left("fwd", x, blocks, starts, starts.new_empty(count))
        assert ("dense" in str(reason)) == left, (side, share, rows, train)
        assert chosen.left("fwd", x.float(), blocks.float(), starts) is None
