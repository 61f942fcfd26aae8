"""What Hopper's products decide without a GPU: which operands the copy engine takes, the order of tiles, the rule, and its machine code."""

import random
import subprocess
from types import FunctionType, SimpleNamespace

import pytest
import torch
import triton

from ridgeline import device as devices
from ridgeline.lab import inspect
from ridgeline.op import Case, Spec, get
from ridgeline.ops.matmul import _hopper
from ridgeline.ops.matmul._epilogue import add_up
from ridgeline.ops.matmul._hopper import aligned, whole

HALF = torch.bfloat16


def test_which_operands_the_copy_engine_takes() -> None:
    room = torch.empty(4096, dtype=HALF)
    taken = {
        "rows": room[:640].view(16, 40),
        "columns": room[:640].view(16, 40).mT,
        "a slice": room[:640].view(16, 40)[:, 8:21],
        "one row": room[:13].view(1, 13),
        "one column": room[:13].view(13, 1),
        "an odd row alone": torch.empty(1, 4097, dtype=HALF),
        "a batch of one matrix": room[:640].view(16, 40).expand(3, 16, 40),
    }
    refused = {
        "odd rows": room[: 16 * 41].view(16, 41),
        "an odd beginning": room[1:641].view(16, 40),
        "one row for all": room[:40].expand(16, 40),
        "every second": room[:1280].view(16, 80)[:, ::2],
        "an odd batch": torch.empty(2, 3, 5, dtype=HALF),
    }
    fine = room[:64].view(8, 8)
    for name, t in taken.items():
        assert _hopper.refusal(t, fine) is None, name
        assert _hopper.refusal(fine, t) is None, name
    for name, t in refused.items():
        assert "16 bytes" in str(_hopper.refusal(t, fine)), name
        assert str(_hopper.refusal(fine, t)).count("b must begin"), name
    assert "size 0" in str(_hopper.refusal(torch.empty(0, 8, dtype=HALF), fine))


def test_every_tile_is_computed_once() -> None:
    """`Tiles.place`, run by Python: all tiles of all matrices, and of each all steps of K, once."""
    python = SimpleNamespace(cdiv=triton.cdiv, minimum=min)
    place = FunctionType(_hopper.Tiles.place.fn.__code__, {"gl": python})
    dice = random.Random(0)
    for _ in range(100):
        M, N, steps, batch = (dice.randint(1, most) for most in (2000, 2000, 60, 3))
        BM, BN, GROUP = (dice.choice(of) for of in ((128, 256), (32, 64, 256), (1, 8, 16)))
        parts = dice.randint(1, min(7, steps))
        tiles = SimpleNamespace(M=M, N=N, steps=steps, batch=batch, parts=parts, BM=BM, BN=BN, GROUP=GROUP)
        count = triton.cdiv(M, BM) * triton.cdiv(N, BN) * parts * batch
        found = [place(tiles, t) for t in range(count)]
        wanted = {(m, n, b, p) for m in range(0, M, BM) for n in range(0, N, BN) for b in range(batch) for p in range(parts)}
        assert {f[:4] for f in found} == wanted
        for b in range(batch):
            ends = sorted({f[4:] for f in found if f[2] == b})
            assert [low for low, _ in ends] == [0, *[high for _, high in ends[:-1]]]
            assert ends[-1][1] == steps
            assert all(low < high for low, high in ends)


@pytest.mark.parametrize("more", [False, True])
def test_rules_fit_their_machine(more: bool) -> None:
    gpu = devices.KNOWN["sm_90"]
    for gated in (False, True):
        for choice in _hopper.space(gated, more, False) + [_hopper.rule(gpu, 1, m, 4096, 4096, gated, more, False) for m in (1, 500, 9000)]:
            rows, wide = choice["ROWS"], choice["BN"]
            shared = choice["STAGES"] * 128 * (2 * rows + wide) + 2 * choice["BOARDS"] * rows * 128
            assert shared + 1024 <= gpu.shared_memory, choice
            assert wide >= (128 if gated else 64), choice
            assert choice["LAG"] < choice["STAGES"] - 1, choice
    assert _hopper.rule(gpu, 1, 512, 512, 65536, False, more, False)["PARTS"] > 4
    assert _hopper.rule(gpu, 1, 8192, 8192, 8192, False, more, False)["PARTS"] == 1


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(33, 45), (2, 19, 130)])
def test_copies_that_the_copy_engine_takes(shape: tuple[int, ...], device: str) -> None:
    t = torch.randn(shape, device=device).half()
    kinds = [t, t.mT.contiguous().mT, torch.stack([t, t], -1)[..., 0], t[..., :1].expand(shape), t[..., :1, :].expand(shape)]
    for one in [*kinds, t[None, 0].expand(3, *t.shape[1:]) if t.dim() == 3 else t]:
        copy = aligned(one)
        assert whole(copy) or whole(copy.mT)
        assert torch.equal(copy.expand(one.shape) if copy.dim() == one.dim() else copy[0], one)
    fine = torch.randn(16, 24, device=device).half()
    assert aligned(fine) is fine


@pytest.mark.kernels
def test_parts_are_added_up(device: str) -> None:
    sums, bias = torch.randn(3, 2, 17, 28, device=device), torch.randn(26, device=device)
    residual = torch.randn(2, 17, 26, device=device)
    y, z = torch.empty_like(residual), torch.empty_like(residual)
    add_up(y, sums, z, bias, residual, "gelu")
    exact = sums.sum(0)[..., :26] + bias
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(y, torch.nn.functional.gelu(exact) + residual)


@pytest.mark.compiles
@pytest.mark.parametrize("shape", [(8, 17, 4096), (100, 12, 8192), (1, 5, 4096), (300, 136, 16384)])
def test_parts_are_written_by_the_copy_engine(shape: tuple[int, int, int]) -> None:
    """Their rows are padded, whatever N is; so the kernel must have a tensor map for them."""
    M, N, K = shape
    case = Case("", (Spec(M, K), Spec(N, K)), dtypes=("bfloat16",))
    made = [
        one for _, one in inspect.launches(get("linear"), get("linear").implementations["gluon"], case, "bfloat16", "sm_90", ("forward",))
    ]
    assert len(made) == 2
    sums, out = made[0].args[:2]
    assert sums.dtype == torch.float32
    assert out is not None
    assert list(out.block_shape)[-1] == 32


@pytest.mark.compiles
def test_products_are_not_serialized(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """ptxas lets products run while the next are started, and moves no sums: it says where it cannot."""
    ops = [("matmul", Case("", (Spec(512, 512), Spec(512, 2048)), dtypes=("bfloat16",)))]
    ops += [(name, next(c for c in get(name).cases if c.use == "bench")) for name in ("linear", "gated_linear")]
    for name, case in ops:
        for r in inspect.resources(get(name), get(name).implementations["gluon"], case, "bfloat16", "sm_90"):
            if r.kind != "gluon":
                continue
            path = tmp_path / "kernel.ptx"
            path.write_text(r.texts["ptx"])
            ptxas = triton.knobs.nvidia.ptxas.path
            said = subprocess.run([ptxas, "-v", "-arch=sm_90a", path, "-o", "/dev/null"], capture_output=True, text=True, check=True).stderr
            assert "serial" not in said
            assert "C75" not in said
            assert not r.stack
