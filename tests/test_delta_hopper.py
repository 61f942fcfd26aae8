"""The delta rule's Gluon kernels for Hopper: which calls they serve, and on a GPU their results and bits."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import boundary, tuning
from ridgeline import device as devices
from ridgeline.lab.analysis import inspect
from ridgeline.op import get
from ridgeline.ops.recurrent.hopper import delta as delta_hopper
from ridgeline.ops.recurrent.triton import delta_chunks
from ridgeline.replay import Recorder

FACTOR = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def started(
    card: str, dtype: torch.dtype = torch.bfloat16, D: int = 128, gate: int = 1, step: int = 0, T: int = 4096
) -> set[str]:  # fmt: skip
    """The names of the kernels of a backward pass on that card; rows of v are `step` elements longer than D."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    q, k, do, dq, dk, dv = (empty(8, T, 16, D) for _ in range(6))
    v = empty(8, T, 16, D + step)[..., :D]
    g, beta = empty(8, T, 16, *([D] if gate == 2 else [])), empty(8, T, 16)
    dg, dbeta = empty(*g.shape, kind=dtype if gate == 2 else torch.float32), empty(*beta.shape, kind=torch.float32)
    seen: list[boundary.Launch] = []
    with devices.pretend(card), boundary.observe(seen.append):
        made = dq, dk, dv, dg, dbeta, None, None, None
        delta_chunks.delta_bwd(*made, do, None, q, k, v, g, beta, None, None, None, None, True, 1.0, "ieee")
    return {launch.kernel.__name__ for launch in seen}


@pytest.mark.kernels
def test_calls_that_they_serve() -> None:
    """Half precision with 128 channels and columns, and rows that TMA takes, on Hopper."""
    ours = {"pairs_by_token", "walk_chunks", "chunk_gradients"}
    for card in ("h100", "h200"):
        assert started(card) == ours
    assert started("h200", torch.float16) == ours
    assert started("h200", step=8) == ours
    others = {"pairs_by_token", "chain_states", "chain_gradients", "gradients_by_token"}
    assert started("h200", step=4) == others
    assert started("h200", torch.float32) == others
    assert started("h200", D=64) == others
    assert started("h200", T=0) == others
    assert started("b200") == others
    rest = {"write_block_masks", "half_pairs_by_channel", "half_gradients_by_channel"}
    assert started("h200", gate=2) == rest | {"pairs_at_once", "walk_chunks", "channel_gradients"}
    assert started("h200", torch.float16, gate=2) == rest | {"walk_chunks"}
    assert not started("b200", gate=2) & {"walk_chunks", "channel_gradients"}
    assert not started("h200", D=64, gate=2) & {"walk_chunks", "channel_gradients"}


@pytest.mark.kernels
@pytest.mark.parametrize("dense", [True, False])
def test_backward_is_repeated(dense: bool) -> None:
    """`replay.py` knows all that the launcher does beside kernels, too where TMA does not take do's rows."""
    q, k, v, dq, dk, dv = (torch.zeros(1, 70, 1, 128, dtype=torch.bfloat16) for _ in range(6))
    g, beta, dg, dbeta = (torch.zeros(1, 70, 1) for _ in range(4))
    do = torch.zeros_like(v) if dense else torch.zeros(1, dtype=torch.bfloat16).expand(v.shape)
    tensors = dq, dk, dv, dg, dbeta, None, None, None, do, None, q, k, v, g, beta, None, None, None, None
    with devices.pretend("h200"), Recorder(tensors) as watch:
        delta_chunks.delta_bwd(*tensors, True, 1.0, "ieee")
    assert watch.repeatable


BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8}


def overlaps(ttgir: str, folder: Path) -> list[str]:
    """Where in a kernel's shared memory numbers on their way between threads lie in the place of a tile or barrier."""
    from triton._C.libtriton import ir, nvidia, passes

    path, context = folder / "kernel.ttgir", ir.context()
    path.write_text(ttgir)
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    module, manager = ir.parse_mlir_module(str(path), context), ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "places")
    tiles, others = {}, []
    for line in str(module).splitlines():
        if found := re.search(r"allocation\.offset = (\d+)", line):
            first = int(found[1])
            if shape := re.search(r"local_alloc .*memdesc<([\dx]+)x(\w+),", line):
                tiles[line.split()[0]] = range(first, first + prod(map(int, shape[1].split("x"))) * BYTES[shape[2]])
            else:
                others.append((first, line.strip()[:80]))
    assert tiles
    assert others
    return [f"{line} in {name}" for first, line in others for name, place in tiles.items() if first in place]


@pytest.mark.compiles
@pytest.mark.parametrize(
    "case", ["8x4096x16x128 per head", "4x8192x16/32x128 per head, packed", "8x4096x16x128 per channel"]
)
def test_nothing_overlaps_a_tile(case: str, tmp_path: Path) -> None:
    """Triton gives a tile's place away after the last instruction that names it, while products and copies may still
    read it. A sum between threads once lay in the gradient of the state, which a product was reading."""
    op = get("gated_delta_rule")
    started = inspect.launches(op, op.implementations["triton"], op.case(case), "bfloat16", "sm_90")
    names = {"walk_chunks", "channel_gradients" if "channel" in case else "chunk_gradients"}
    ours = {inspect.signature(one): one for _, one in started if one.kernel.__name__ in names}
    assert {one.kernel.__name__ for one in ours.values()} == names
    for one in ours.values():
        assert not overlaps(inspect.of_launch(one).texts["ttgir"], tmp_path), one.kernel.__name__


CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "whole chunks": ((2, 512, 2, 2), {}),
    "tokens left over, states": ((1, 500, 2, 2), {"states": True}),
    "heads that share q and k": ((1, 200, 2, 4), {"states": True}),
    "packed": ((1, 500, 2, 2), {"ends": [0, 0, 150, 150, 151, 500], "states": True}),
    "segments": ((1, 500, 2, 2), {"states": True, "span": 2}),
    "packed segments": ((1, 500, 1, 2), {"ends": [0, 0, 300, 300, 301, 500], "span": 2}),
}


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", FACTOR)
@pytest.mark.parametrize("gate", ["per head", "per channel", "strong per channel"])
def test_results_and_bits(
    case: str, dtype: torch.dtype, gate: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs and gradients against the recurrence in float64; a rerun gives the same bits."""
    (B, T, H, HV), given = CASES[case]
    dice = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=dice)

    monkeypatch.setattr(tuning, "version", -40 - 100 * len(gate) - list(CASES).index(case))
    monkeypatch.setattr(delta_chunks, "span", lambda *_: given.get("span", 0))
    ends = given.get("ends")
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    N = B if ends is None else len(ends) - 1
    gates = normal(B, T, HV, *([] if gate == "per head" else [128])) + (3 if gate[0] == "p" else 0)
    gates = torch.nn.functional.logsigmoid(gates)
    args = [normal(B, T, H, 128), normal(B, T, H, 128), normal(B, T, HV, 128), gates, 2 * normal(B, T, HV).sigmoid()]
    state = normal(N, HV, 128, 128) if given.get("states") else None
    incoming = normal(B, T, HV, 128).to(dtype)

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [a.to(dtype).to(kind).requires_grad_() for a in args]
        first = None if state is None else state.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        o = ridgeline.gated_delta_rule(
            *leaves, normalize=True, impl=impl, initial_state=first, cu_seqlens=cu_seqlens, return_state=True
        )
        wanted = leaves if first is None else [*leaves, first]
        grads = torch.autograd.grad([o[0], o[1]], wanted, [incoming.to(kind), torch.ones_like(o[1])])
        return [o[0].detach(), o[1].detach(), *grads]

    found = run("triton", dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, run("triton", dtype), strict=True))
    for n, (one, other) in enumerate(zip(found, run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        error = (one.double() - other).norm() / other.norm()
        assert error < FACTOR[dtype], f"result {n} is off by {error:.2e}"


@pytest.mark.kernels
@pytest.mark.gpu
def test_near_the_other_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that serve every other call give the same numbers but for a rounding."""
    dice = torch.Generator(device).manual_seed(0)
    args = [torch.randn(2, 300, 2, 128, device=device, generator=dice).half() for _ in range(3)]
    args += [-torch.rand(2, 300, 2, device=device, generator=dice) / 8, torch.rand(2, 300, 2, device=device)]

    def run() -> list[torch.Tensor]:
        leaves = [a.clone().requires_grad_() for a in args]
        o: Any = ridgeline.gated_delta_rule(*leaves, normalize=True, impl="triton")
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    ours = run()
    monkeypatch.setattr(tuning, "version", -50)
    monkeypatch.setattr(delta_hopper, "serves", lambda *_: False)
    for one, other in zip(ours, run(), strict=True):
        assert (one.double() - other.double()).norm() < 1e-3 * other.double().norm()
