"""radix_sort beyond its cases: negative numbers, NaN, zeros of both signs; values of any dtype move unchanged."""

import pytest
import torch

import ridgeline
from ridgeline.ops.movement._radix_sort import DTYPES
from ridgeline.ops.movement.radix_sort import RADIX_SORT
from ridgeline.select import why_not

pytestmark = pytest.mark.kernels
N = 50021  # several tiles


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]).cpu()


def keys_of(dtype: torch.dtype, n: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(n)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (n,), generator=dice, dtype=dtype)
    keys = torch.randn(n, generator=dice, dtype=torch.float64).to(dtype)
    keys[::17], keys[1::19], keys[2::23], keys[3::29], keys[5::31] = (
        float("nan"),
        -0.0,
        0.0,
        float("inf"),
        -float("inf"),
    )
    keys[::34] = keys[::34].copysign(torch.tensor(-1.0, dtype=dtype))
    return keys


@pytest.mark.parametrize("impl", [i.name for i in RADIX_SORT.implementations.values()])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact(dtype: str, descending: bool, impl: str, device: str) -> None:
    keys = keys_of(getattr(torch, dtype), N)
    if impl == "torch" and device != "cpu" and keys.is_floating_point():
        keys = keys.nan_to_num(1.0)  # on a GPU torch may order NaNs by sign
    if reason := why_not(RADIX_SORT.implementations[impl], keys.to(device), None, descending):
        pytest.skip(reason)
    expected, order = torch.sort(keys, stable=True, descending=descending)
    for values in (None, torch.arange(N, dtype=torch.float32), torch.arange(N, dtype=torch.float64) / 3):
        given = None if values is None else values.to(device)
        made, moved = ridgeline.radix_sort(keys.to(device), given, descending=descending, impl=impl)
        assert torch.equal(bits(made), bits(expected))
        assert torch.equal(bits(moved), bits(order if values is None else values[order]))


def test_no_gradient(device: str) -> None:
    keys = torch.randn(9, device=device, requires_grad=True)
    assert not any(t.requires_grad for t in ridgeline.radix_sort(keys, keys))
