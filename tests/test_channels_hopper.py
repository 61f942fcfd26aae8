"""The Gluon kernels for Hopper for a gate per channel, run as Python (warps.py): finds deadlocks and places given back
too early. On a GPU their results and bits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import boundary, tuning
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.common import calls
from ridgeline.ops.recurrent.common.calls import Given, recurrence
from ridgeline.ops.recurrent.hopper import channel_chains as kernels
from ridgeline.ops.recurrent.hopper import channel_gradients as gradients
from ridgeline.ops.recurrent.hopper import channels as channel_hopper
from ridgeline.ops.recurrent.triton import chunks
from ridgeline.tiles import warpgroup
from warps import Barrier, Pointer, Shared, Turns, define, language, registers

C = 64


class Map(SimpleNamespace):
    """A tensor map of rows (B, heads, T, columns), or of packed ones."""

    def __init__(self, t: torch.Tensor, width: int, packed: bool):
        self.fill(t.transpose(1, 2), [*[1] * (2 + packed), C, width])

    @classmethod
    def of(cls, t: torch.Tensor, box: list[int]) -> Map:
        """That of a matrix."""
        made = cls.__new__(cls)
        made.fill(t, box)
        return made

    def fill(self, t: torch.Tensor, box: list[int]) -> None:
        kind = SimpleNamespace(shape=box, nbytes=C * box[-1] * t.element_size())
        self.base, self.dtype, self.layout, self.shape, self.strides = t, t.dtype, None, t.shape, t.stride()
        self.block_shape, self.block_type = box, kind


def chosen(c: Any, x: Any, y: Any) -> Any:
    if isinstance(c, bool):
        return x if c else y
    found = torch.where(torch.as_tensor(c), torch.as_tensor(x), torch.as_tensor(y))
    return registers(found) if found.dim() else found.item()


def names_of(turns: Turns, program: int, programs: int = 1, *more: Any) -> dict[str, Any]:
    """The names that the kernels' sources use."""
    names = language(turns)
    define(names, warpgroup, kernels, *more)
    facts = "C", "HALF", "SPAN", "LOG2E"
    names |= {n: getattr(kernels, n).value for n in facts} | {"FAR": TensorMap.FAR}

    def put(to: Pointer, x: Any, mask: Any = None) -> None:
        at, x = torch.broadcast_tensors(torch.as_tensor(to.at), torch.as_tensor(x))
        to.t[at] = x.to(to.t.dtype)

    def read(p: Pointer, mask: Any = None, other: Any = None) -> Any:
        found = p.t[p.at]
        return registers(found) if found.dim() else found.item()

    gl = names["gl"]
    gl.where, gl.load, gl.store = chosen, read, put
    gl.program_id = lambda axis: program
    gl.num_programs = lambda axis: programs
    gl.max_contiguous = gl.multiple_of = lambda x, numbers: x
    gl.allocate_shared_memory = lambda dtype, shape, layout: Shared(torch.full(shape, torch.nan).to(dtype))
    gl.warp_specialize = lambda works, *_: turns.run([lambda f=f, args=args: f(*args) for f, args in works])
    names |= {
        "make_barriers": lambda size, count: Shared([Barrier(count) for _ in range(size)]),
        "barrier": lambda: turns.until(lambda: True),
        "operand_layout": lambda x: None,
        "sums_layout": lambda x: None,
        "power": torch.exp2,
        "column_chunks": lambda x, count: x.chunk(count, 1),
        "upper_half": lambda x: x,
    }
    return names


def inputs(B: int, T: int, H: int, HV: int, D: int, dice: torch.Generator) -> list[torch.Tensor]:
    q, k, v = (torch.randn(B, T, h, D, generator=dice) for h in (H, H, HV))
    return [q, k, v, torch.nn.functional.logsigmoid(torch.randn(B, T, H, D, generator=dice) + 2)]


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "whole chunks": ((1, 320, 1, 1, 128), {}),
    "tokens left over, states": ((2, 200, 1, 2, 128), {"states": True}),
    "packed": ((1, 330, 1, 1, 128), {"ends": [0, 0, 130, 130, 131, 330], "states": True}),
    "rwkv6": ((1, 330, 1, 2, 64), {"bonus": True, "states": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_forward_as_python(case: str, seed: int) -> None:
    """o and the last states in the order of any turns; a chain with strong gates is marked and the others are not."""
    (B, T, H, HV, D), given = CASES[case]
    dice = torch.Generator().manual_seed(seed)
    q, k, v, g = inputs(B, T, H, HV, D, dice)
    ends = given.get("ends")
    N = B if ends is None else len(ends) - 1
    bonus = torch.randn(H, D, generator=dice) if given.get("bonus") else None
    first = torch.randn(N, HV, D, D, generator=dice) if given.get("states") else None
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    if seed == 2:
        g[-1, -10, 0] = -60.0
    options = Given(first, True, cu_seqlens, False, 0.5)
    o, last = recurrence(*(t.double() for t in (q, k, v, g)), bonus, options, 0.5)
    found, state = torch.zeros_like(v), torch.zeros(N, HV, D, D)
    left, packed = torch.zeros(N, HV, dtype=torch.int32), ends is not None
    maps = kernels.ChainMaps(*(Map(t, w, packed) for t, w in ((q, D), (k, D), (v, 64), (g, D), (found, 64))))
    pointer = lambda t: None if t is None else Pointer(t)  # noqa: E731
    chains = kernels.Chains(
        Pointer(left), Pointer(torch.zeros_like(left)), pointer(first), Pointer(state), pointer(bonus),
        pointer(cu_seqlens), T, HV, HV // H,
    )  # fmt: skip
    for program in range(N * HV):
        turns = Turns(random.Random(100 * seed + program))
        names_of(turns, program)["forward_chains"](chains, maps, 0.5, D // 64, 3 if D == 128 else 2)
    expected = torch.zeros_like(left)
    if seed == 2:
        expected[-1, : HV // H] = 1
    assert torch.equal(left, expected)
    if seed < 2:
        assert error(found, o) < 1e-5
        assert error(state, last) < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_backward_as_python(case: str, seed: int) -> None:
    """All gradients in the order of any turns; with 2 as the seed, the last chain's gates are too strong."""
    (B, T, H, HV, D), given = CASES[case]
    H = HV
    dice = torch.Generator().manual_seed(seed)
    q, k, v, g = inputs(B, T, H, HV, D, dice)
    ends = given.get("ends")
    N = B if ends is None else len(ends) - 1
    bonus = torch.randn(H, D, generator=dice) if given.get("bonus") else None
    first = torch.randn(N, HV, D, D, generator=dice) if given.get("states") else None
    dlast = None if first is None else torch.randn(N, HV, D, D, generator=dice)
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    do = torch.randn(v.shape, generator=dice)
    if seed == 2:
        g[-1, -10, -1] = -60.0
    tensors = [t if t is None else t.double().requires_grad_() for t in (q, k, v, g, first, bonus)]
    wide = [t for t in tensors if t is not None]
    options = Given(tensors[4], True, cu_seqlens, False, 0.5)
    o, last = recurrence(*tensors[:4], tensors[5], options, 0.5)
    outs, incoming = ([o], [do.double()]) if dlast is None else ([o, last], [do.double(), dlast.double()])
    true = dict(zip([n for n, t in zip("qkvgsu", tensors) if t is not None], torch.autograd.grad(outs, wide, incoming)))
    found = {n: torch.zeros(t.shape) for n, t in zip("qkvgs", (q, k, v, g, torch.zeros(N, HV, D, D)))}
    packed, parts = ends is not None, D // 64
    chunks = -(-T // C) if ends is None else T // C + N
    kept = HV * chunks if packed else N * HV * chunks
    found["u"] = torch.zeros(kept, D)
    left, strong = torch.zeros(N, HV, dtype=torch.int32), torch.zeros(N, HV, dtype=torch.int32)
    marked, states = torch.zeros(parts, N, HV, dtype=torch.int32), torch.zeros(kept, D, D)
    rows, flat = (q, k, v, g, do, *(found[n] for n in "qkvg")), states.view(-1, D)
    maps = gradients.GradientMaps(*(Map(t, 64, packed) for t in rows), Map.of(flat, [C, C]))
    whole = maps._replace(v=Map(v, D, packed))
    pointer = lambda t: None if t is None else Pointer(t)  # noqa: E731
    marks = gradients.Backward(
        Pointer(marked), Pointer(strong), Pointer(states), pointer(first), None, None, None, pointer(cu_seqlens), T,
        HV, 1, chunks,
    )  # fmt: skip
    chains = marks._replace(
        left=Pointer(left), strong=Pointer(marked), first=pointer(dlast), last=Pointer(found["s"]),
        bonus=pointer(bonus), of_bonus=Pointer(found["u"]),
    )  # fmt: skip
    for program in range(N * HV):
        turns = Turns(random.Random(100 * seed + program))
        names_of(turns, program, N * HV, gradients)["mark_states"](marks, whole, parts, 4 if D == 128 else 3)
    for program in range(N * HV):
        turns = Turns(random.Random(100 * seed + program))
        names_of(turns, program, N * HV, gradients)["gradient_chains"](chains, maps, 0.5, parts, 2)
    expected = torch.zeros_like(left)
    if seed == 2:
        expected[-1, -1] = 1
    assert torch.equal(left, expected)
    if seed < 2:
        found["u"] = found["u"].view(-1, HV, chunks, D).sum((0, 2))
        for name in true:
            assert error(found[name], true[name]) < 2e-5, name


def started(card: str, D: int = 128, kind: torch.dtype = torch.bfloat16, gate: torch.dtype | None = None,
            step: int = 0, heads: int = 16) -> set[str]:  # fmt: skip
    """The names of the kernels of a forward pass on that card; rows of v are `step` elements longer than D."""
    q, k, o = (torch.empty((8, 4096, heads, D), dtype=kind, device="meta") for _ in range(3))
    v = torch.empty((8, 4096, heads, D + step), dtype=kind, device="meta")[..., :D]
    g = torch.empty_like(q, dtype=gate or kind)
    last = torch.empty((8, heads, D, D), device="meta")
    seen: list[boundary.Launch] = []
    with devices.pretend(card), boundary.observe(seen.append):
        calls.KERNEL["fwd"](o, last, q, k, v, g, None, None, None, 1.0, "ieee")
    return {launch.kernel.__name__ for launch in seen}


@pytest.mark.kernels
def test_calls_that_they_serve() -> None:
    """bfloat16 with 64 or 128 channels and columns, enough chains, and rows that TMA takes, on Hopper."""
    ours, others = {"find_strong", "forward_chains"}, {"own_pairs_at_once"}
    for card in ("h100", "h200"):
        for D in (64, 128):
            assert ours <= started(card, D)
    assert ours <= started("h200", step=8)
    assert others <= started("h200", step=4)
    assert others <= started("h200", heads=4)
    assert others <= started("h200", gate=torch.float32)
    assert not started("h200", 256) & ours
    assert not started("h200", kind=torch.float16) & ours
    assert not started("b200") & ours


@pytest.mark.kernels
def test_calls_whose_backward_they_serve() -> None:
    """All that forward serves, but for RWKV-6's u with 128 channels."""

    def names(T: int = 4096, D: int = 128, **given: Any) -> set[str]:
        q, k, v, g, do, *made = (torch.empty((8, T, 16, D), dtype=torch.bfloat16, device="meta") for _ in range(9))
        first, dlast = given.get("first"), given.get("dlast")
        u = torch.empty((16, D), dtype=torch.bfloat16, device="meta") if given.get("u") else None
        inputs = q, k, v, g, u, first, given.get("ends"), 1.0, "ieee"
        grads = *made, None if u is None else torch.empty_like(u), None if first is None else torch.empty_like(first)
        seen: list[boundary.Launch] = []
        with devices.pretend("h200"), boundary.observe(seen.append):
            calls.KERNEL["bwd"](*grads, do, dlast, *inputs)
        return {launch.kernel.__name__ for launch in seen} & {"mark_states", "gradient_chains"}

    state = torch.empty((8, 16, 128, 128), device="meta")
    for given in ({}, {"T": 4095}, {"first": state}, {"dlast": state}, {"u": True, "D": 64}):
        assert names(**given) == {"mark_states", "gradient_chains"}, given
    assert not names(u=True)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU chains are left by their gates")
def test_other_kernels_keep_off_finished_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where few heads would have their sequences cut into segments."""
    q, k, v, do, gate = (torch.randn(2, 40, 2, 16).half() for _ in range(5))
    g, first = torch.nn.functional.logsigmoid(gate + 2), torch.randn(2, 2, 16, 16)
    inputs, left = (q, k, v, g, None, first, None, 1.0, "ieee"), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)

    def results() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rows, states = [torch.full_like(q, 7.0) for _ in range(5)], [torch.full_like(first, 7.0) for _ in range(2)]
        calls.KERNEL["fwd"](rows[0], states[0], *inputs)
        calls.KERNEL["bwd"](*rows[1:], None, states[1], do, None, *inputs)
        return rows, states

    expected = results()
    monkeypatch.setattr(chunks, "segments", lambda gpu, programs, tokens, unit: (-(-tokens // unit), unit))
    for name, serves in (("forward", "serves"), ("backward", "serves_backward")):
        monkeypatch.setattr(channel_hopper, serves, lambda *_: True)
        monkeypatch.setattr(channel_hopper, name, lambda *_: left)
    rows, states = results()
    for found, alone in zip(rows, expected[0], strict=True):
        assert (found.transpose(1, 2)[left == 0] == 7).all()
        assert torch.equal(found.transpose(1, 2)[left == 1], alone.transpose(1, 2)[left == 1])
    for found, alone in zip(states, expected[1], strict=True):
        assert (found[left == 0] == 7).all()
        assert torch.equal(found[left == 1], alone[left == 1])


def test_constants() -> None:
    assert (channel_hopper.SPAN, channel_hopper.ROWS) == (kernels.SPAN.value, kernels.C.value)
    assert channel_hopper.HALF == kernels.HALF.value


STRONG = {"strong gates": ((2, 200, 2, 2, 128), {"states": True}), "strong, whole chunks": ((2, 192, 2, 2, 128), {})}


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *STRONG])
@pytest.mark.parametrize("name", ["gated_linear_attention", "rwkv6"])
def test_results_and_bits(case: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs and gradients against the recurrence in float64; a rerun gives the same bits. Without states, o alone
    has a gradient."""
    (B, T, H, HV, _), given = (CASES | STRONG)[case]
    D = 64 if name == "rwkv6" else 128
    dice = torch.Generator().manual_seed(0)
    args = inputs(B, T, H, HV, D, dice)
    if case in STRONG:
        args[3][0, 70, 1, 3], args[3][1, T - 1, 0], args[3][1, 3:9, 1] = -60.0, -80.0, -5.0
    if name == "rwkv6":
        args.append(torch.randn(H, D, generator=dice))
    ends = given.get("ends")
    N = B if ends is None else len(ends) - 1
    if given.get("states"):
        args.append(torch.randn(N, HV, D, D, generator=dice))
    packed = {} if ends is None else {"cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=device)}
    incoming, change = torch.randn(args[2].shape, generator=dice), torch.randn(N, HV, D, D, generator=dice)
    monkeypatch.setattr(channel_hopper, "enough", lambda *_: True)
    monkeypatch.setattr(tuning, "version", -60 - [*CASES, *STRONG].index(case))

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        wide = torch.promote_types(kind, torch.float32)
        leaves = [a.to(device, wide if a.shape[1:] == (HV, D, D) else torch.bfloat16) for a in args]
        leaves = [a.to(wide if a.dtype == wide else kind).requires_grad_() for a in leaves]
        more: dict[str, Any] = {"initial_state": leaves[-1]} if given.get("states") else {}
        rows = leaves[:-1] if more else leaves
        found = getattr(ridgeline, name)(*rows, impl=impl, return_state=True, **more, **packed)
        back = [incoming.to(device, torch.bfloat16).to(kind), change.to(device, found[1].dtype)]
        outputs = 2 if more else 1
        grads = torch.autograd.grad(found[:outputs], leaves, back[:outputs])
        return [*(t.detach() for t in found), *grads]

    found = run("triton", torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(found, run("triton", torch.bfloat16), strict=True))
    for n, (one, other) in enumerate(zip(found, run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        assert error(one, other) < 6e-3, n
