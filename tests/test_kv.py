"""concat_kv and repeat_kv: positions outside, caches that are views, integers, empty lengths."""

import pytest
import torch

import ridgeline
from ridgeline.op import RidgelineError, get

RUNGS = [i.name for i in get("concat_kv").implementations.values()]
# Each refuses this if named: 16-byte packs need whole packs, and copying both at once needs contiguous sequences.
REFUSED = {("strided", "cuda_both")} | {("odd", rung) for rung in ("cuda_packed", "cuda_both")}
FAR = [-3, 15, 400, -(1 << 62), 9, -7, (1 << 63) - 1]


def given(device: str, dtype: torch.dtype = torch.float32, size: int = 16) -> list[torch.Tensor]:
    many, kind = len(FAR), torch.float32 if not dtype.is_floating_point else dtype
    shapes = (many, 17, 2, size), (many, 17, 2, size), (many, 7, 2, size), (many, 7, 2, size)
    return [(torch.randn(shape, device=device, dtype=kind) * 50).to(dtype) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, *RUNGS])
@pytest.mark.parametrize("form", ["whole", "strided", "odd", "int8"])
def test_rows_outside_are_dropped(form: str, impl: str | None) -> None:
    caches = given("cuda", torch.int8 if form == "int8" else torch.bfloat16, 5 if form == "odd" else 16)
    if form == "strided":
        caches = [torch.stack([t, t], 3)[:, :, :, 0] for t in caches]
    positions = torch.tensor(FAR, device="cuda")
    expected = [t.clone() for t in caches]
    get("concat_kv").reference(*expected, positions)
    if (form, impl) in REFUSED:
        before = [t.clone() for t in caches]
        with pytest.raises(RidgelineError, match=f"impl='{impl}' cannot run this call: it copies"):
            ridgeline.concat_kv(*caches, positions, impl=impl)
        torch.testing.assert_close(caches, before, rtol=0, atol=0)
        return
    returned = ridgeline.concat_kv(*caches, positions, impl=impl)
    assert returned[0] is caches[0]
    assert returned[1] is caches[1]
    for one, other in zip(caches, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["cuda", "cuda_packed", "cuda_both", "nowhere"])
def test_a_rung_that_cannot_run_writes_nothing(impl: str) -> None:
    caches = given("cpu")
    before, version = [t.clone() for t in caches], caches[0]._version
    with pytest.raises(RidgelineError, match=impl):
        ridgeline.concat_kv(*caches, torch.zeros(len(FAR), dtype=torch.int64), impl=impl)
    torch.testing.assert_close(caches, before, rtol=0, atol=0)
    assert caches[0]._version == version


@pytest.mark.parametrize("impl", ["naive", "torch"])
def test_plain_pytorch_drops_them_too(impl: str) -> None:
    caches, expected = given("cpu"), given("cpu")
    expected = [t.clone() for t in caches]
    positions = torch.tensor(FAR)
    get("concat_kv").implementations[impl].call(*caches, positions)  # type: ignore[misc]
    for b, at in enumerate(FAR):
        for s in range(7):
            if 0 <= at + s < 17:
                expected[0][b, at + s], expected[1][b, at + s] = expected[2][b, s], expected[3][b, s]
    torch.testing.assert_close(caches, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "triton", "cuda", "cuda_packed", "cuda_once"])
def test_lengths_that_are_none(impl: str | None) -> None:
    x, lengths = (
        torch.randn(4, 2, 9, 8, device="cuda", requires_grad=True),
        torch.tensor([-5, 0, 400, 9], device="cuda"),
    )
    expected = get("repeat_kv").reference(x, 3, lengths=lengths)
    found = ridgeline.repeat_kv(x, 3, lengths=lengths, impl=impl)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    dy = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, expected)))
