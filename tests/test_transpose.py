"""transpose beyond its cases: every permutation, strides, dtypes, gradients, and which rung serves what."""

from itertools import permutations

import pytest
import torch

import ridgeline
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError, registry
from ridgeline.select import select

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else None
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1)[..., 0],
    "rows of a larger tensor": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "one image, expanded": lambda x: x[:1].expand_as(x),
    "one column, expanded": lambda x: x[..., :1].expand_as(x),
    "first outermost last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_order_of_four(layout: str, device: str) -> None:
    for shape in ((3, 5, 2, 16), (2, 33, 3, 9)):
        x = LAYOUTS[layout](torch.randn(shape, device=device))
        for dims in permutations(range(4)):
            y = ridgeline.transpose(x, dims, impl=IMPL)
            assert y.is_contiguous()
            assert torch.equal(y, x.permute(dims)), (shape, dims)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((), ()),
        ((7,), (0,)),
        ((7,), (-1,)),
        ((1, 1, 1), (2, 0, 1)),
        ((0, 3, 2), (1, 0, 2)),
        ((4, 0), (1, 0)),
        ((2, 3, 1, 4, 5, 2, 3), (6, 2, 0, 4, 1, 5, 3)),
        ((3, 4, 5), [-1, -3, -2]),
        ((5000, 2, 2), (0, 2, 1)),
        ((2, 5000, 3), (2, 1, 0)),
    ],
)
def test_nothing_that_permute_takes_is_refused(shape: tuple[int, ...], dims: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device)
    for impl in (IMPL, None):
        assert torch.equal(ridgeline.transpose(x, dims, impl=impl), x.permute(dims))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.complex64,
                                   torch.float8_e4m3fn])  # fmt: skip
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    x = torch.randint(0, 2, (9, 6, 20), device=device).to(dtype)
    y = ridgeline.transpose(x, (1, 0, 2), impl=None if dtype.is_complex else IMPL)
    assert y.dtype == dtype
    assert torch.equal(y.to(torch.complex64), x.permute(1, 0, 2).to(torch.complex64))


@pytest.mark.parametrize("columns", [1, 3, 4, 8])
@pytest.mark.parametrize(
    ("sizes", "dims"), [((70, 37), (1, 0)), ((3, 40, 2, 33), (3, 2, 0, 1)), ((2, 5, 66), (1, 2, 0))]
)
def test_short_rows(sizes: tuple[int, ...], dims: tuple[int, ...], columns: int, device: str) -> None:
    """Rows that stay whole move in tiles of two directions, of which several fit each side, with ends."""
    x = torch.arange(torch.Size(sizes).numel() * columns, device=device).view(*sizes, columns).half()
    for given in (x, x[..., ::2] if columns > 4 else x[1:], x[:1].expand_as(x)):
        y = ridgeline.transpose(given, (*dims, len(sizes)), impl=IMPL)
        assert torch.equal(y, given.permute(*dims, len(sizes)))


@pytest.mark.parametrize("dims", [None, (1, 2, 0), (2, 0, 1), (2, 1, 0), (1, 0, 2)])
def test_gradients(dims: tuple[int, ...] | None, device: str) -> None:
    """The inverse permutation, of gradients with any strides."""
    x = torch.randn(4, 3, 6, device=device, requires_grad=True)
    y = ridgeline.transpose(x, dims, impl=IMPL)
    wanted = x.mT if dims is None else x.permute(dims)
    for dy in (torch.randn(y.shape, device=device), torch.ones((), device=device).expand(y.shape)):
        found, right = (torch.autograd.grad(v, x, dy, retain_graph=True)[0] for v in (y, wanted))
        assert torch.equal(found, right)


def test_what_serves_what() -> None:
    """Packs serve matrices, also where merged dimensions make them; strides and other orders are Triton's."""
    op = registry()["transpose"]

    def serves(shape: tuple[int, ...], dims: tuple[int, ...], strided: bool = False) -> str:
        x = torch.empty(shape, device="meta")
        x = torch.empty((*shape[:-1], 2 * shape[-1]), device="meta")[..., : shape[-1]] if strided else x
        return select(op, None, x, dims, kernels=True).name

    with devices.pretend("sm_90"):
        for shape, dims in (
            ((64, 32), (1, 0)),
            ((4, 64, 32), (0, 2, 1)),
            ((4, 8, 5, 32), (0, 3, 1, 2)),
            ((4, 8, 5, 32), (2, 3, 0, 1)),
            ((4, 8, 32), (0, 1, 2)),
        ):
            assert serves(shape, dims) == "cuda_packed"
            assert serves(shape, dims, strided=True) == "triton"
        assert serves((4, 8, 32), (1, 0, 2)) == serves((4, 8, 32), (2, 1, 0)) == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_rows_that_begin_anywhere(dtype: torch.dtype) -> None:
    """Odd sides, several matrices and an x that begins between multiples of 16 bytes."""
    for *shape, shift in ((131, 137, 1), (3, 270, 265, 3), (2, 35, 130, 0), (257, 3, 1), (5, 2, 301, 0)):
        x = torch.randint(100, (torch.Size(shape).numel() + shift,), device="cuda").to(dtype)[shift:].view(shape)
        assert torch.equal(ridgeline.transpose(x, impl="cuda_packed"), x.mT), shape


def test_refusals(device: str) -> None:
    x = torch.randn(2, 3, 4, device=device)
    for dims in ((0, 1), (0, 1, 1), (0, 1, 3), (0.0, 1, 2), 5, "abc", (0, 1, -3)):
        with pytest.raises(RidgelineError, match="must name each of the 3 dimensions of x once"):
            ridgeline.transpose(x, dims)
