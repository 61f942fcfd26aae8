"""The delta rule's Gluon kernels for Hopper, run as Python (warps.py) between Triton's, which are interpreted.

Shared memory is bytes here, so tiles lie in one another's places as on a GPU."""

from __future__ import annotations

import random
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ridgeline
import warps
from ridgeline import tuning
from ridgeline.boundary import INTERPRETED
from ridgeline.cuda import TensorMap
from ridgeline.ops.recurrent.hopper import delta as delta_hopper
from ridgeline.ops.recurrent.hopper import delta_chains as chains
from ridgeline.ops.recurrent.hopper import delta_channels as channels
from ridgeline.ops.recurrent.hopper import delta_gradients as gradients
from ridgeline.ops.recurrent.triton import delta_chunks
from ridgeline.tiles import warpgroup
from warps import Barrier, Shared, Turns, define, language, registers

pytestmark = pytest.mark.kernels
KIND = torch.float16
ROW = 128  # bytes of a row of a tile that NVMMASharedLayout keeps together
MODULES = {"walk_chunks": chains, "chunk_gradients": gradients, "channel_gradients": channels}


class Place(Shared):
    """A tile: `held` is what it holds, a copy. Its parts and other tiles share its bytes."""

    def __init__(self, view: torch.Tensor, raw: torch.Tensor, blocked: bool, turned: bool = False):
        self.view, self.raw, self.blocked, self.turned, self.dtype = view, raw, blocked, turned, view.dtype
        self.shape = [*view.shape[:-2], view.shape[-2] * view.shape[-1]]
        self.type = SimpleNamespace(shape=self.shape, layout=blocked)

    @classmethod
    def of(cls, raw: torch.Tensor, dtype: torch.dtype, shape: list[int], blocked: bool) -> Place:
        *outer, rows, columns = shape
        width = min(columns, ROW // dtype.itemsize) if blocked else columns
        typed = raw.view(dtype)[: prod(shape)].view(*outer, columns // width, rows, width)
        return cls(typed.transpose(-3, -2), raw, blocked)

    @property
    def held(self) -> torch.Tensor:  # type: ignore[override]
        found = self.view.flatten(-2)
        return found.mT if self.turned else found

    def index(self, n: int) -> Place:
        size = self.raw.numel() // self.shape[0]
        return Place(self.view[n], self.raw[n * size : (n + 1) * size], self.blocked)

    def reshape(self, shape: list[int]) -> Place:
        view = self.view
        while view.dim() > 3:
            view = view[0]
        return Place(view, self.raw, self.blocked)

    def permute(self, order: tuple[int, ...]) -> Place:
        return Place(self.view, self.raw, self.blocked, not self.turned)

    def slice(self, start: int, length: int, axis: int = 0) -> Place:
        return Place(self.view.narrow(axis, start, length), self.raw, self.blocked)

    def store(self, x: torch.Tensor) -> None:
        assert x.dtype == self.dtype
        self.view.copy_((x.mT if self.turned else x).reshape(self.view.shape))

    def load(self, layout: Any) -> Any:
        return registers(self.held.clone())

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: bool) -> Place:
        return Place.of(self.raw, dtype, shape, layout)

    def _keep_alive(self) -> None:
        pass


class Arrivals(Barrier):
    """A barrier. late: copies that end when somebody waits for them, and not before."""

    def __init__(self, count: int):
        super().__init__(count)
        self.late: list[Any] = []

    def over(self, parity: int) -> bool:
        while self.late:
            self.late.pop(0)()
        return self.phase & 1 != parity


class Barriers(Shared):
    def _keep_alive(self) -> None:
        assert all(b.left == b.count and not b.bytes and not b.late for b in self.held), "a barrier still waits"


class Map:
    """A tensor map."""

    def __init__(self, given: TensorMap):
        given.view_as(given.box, given.swizzle)  # raises where the copy engine does not take the tensor
        self.tensor, self.ragged, self.box = given.tensor.detach(), given.ragged, [*given.box]
        self.dtype = self.tensor.dtype
        self.layout = given.swizzle == ROW
        self.block_type = SimpleNamespace(shape=self.box, nbytes=prod(self.box) * self.dtype.itemsize)

    def part(self, at: Any) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """What a box covers of the tensor, and where that is in the box."""
        tensor, at, sizes = self.tensor, list(at), list(self.tensor.shape)
        if self.ragged:
            far, end, head, last, column = at
            assert far == TensorMap.FAR
            at, sizes[2] = [0, head, end + last - far, column], min(end, sizes[2])
            if last >= far:
                sizes[2] = at[2]
        assert all(i >= 0 for i in at)
        box = self.box[-len(sizes) :]
        here = [max(0, min(n, size - i)) for i, n, size in zip(at, box, sizes, strict=True)]
        covered = tensor[tuple([slice(i, i + n) for i, n in zip(at, here, strict=True)])]
        return covered, tuple([slice(n) for n in here])


class Pointer:
    def __init__(self, t: torch.Tensor, at: Any = 0):
        self.t, self.at = t, at

    @classmethod
    def of(cls, t: torch.Tensor) -> Pointer:
        size = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
        return cls(t.detach().as_strided((size,), (1,)))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.t, self.at + more)


def given_as(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*map(given_as, x))
    return Map(x) if isinstance(x, TensorMap) else Pointer.of(x) if isinstance(x, torch.Tensor) else x


def chosen(c: Any, x: Any, y: Any) -> Any:
    if isinstance(c, bool):
        return x if c else y
    return registers(torch.where(c, torch.as_tensor(x), torch.as_tensor(y)))


def read(p: Pointer) -> Any:
    found = p.t[p.at]
    return registers(found) if found.dim() else found.item()


def put(to: Pointer, x: Any, mask: Any = True) -> None:
    at, x, mask = torch.broadcast_tensors(to.at, x, torch.as_tensor(mask))
    to.t[at[mask]] = x[mask].to(to.t.dtype)


def names_of(turns: Turns, kernel: str, program: tuple[int, int], grid: tuple[int, ...]) -> dict[str, Any]:
    """The names that the kernels' sources use. Copies to shared memory end at once, or as late as they may."""
    names, dice = language(turns), random.Random(sum(program))
    define(names, warpgroup, gradients, MODULES[kernel])

    def load(source: Map, at: Any, ready: Arrivals, tile: Place) -> None:
        covered, where = source.part(at)
        assert tile.shape == source.box

        def arrive() -> None:
            whole = torch.zeros(source.box[-covered.dim() :], dtype=source.dtype)
            whole[where] = covered
            tile.store(whole.view(source.box))
            ready.come(0, -source.block_type.nbytes)

        if dice.random() < 0.5:
            arrive()
        else:
            ready.late.append(arrive)

    def store(target: Map, at: Any, tile: Place) -> None:
        covered, where = target.part(at)
        box = target.box[-covered.dim() :]
        turns.me.stores.append(lambda: covered.copy_(tile.held.reshape(box)[where]))

    names["mbarrier"].wait = lambda b, parity: turns.until(lambda: b.over(parity))
    gl = names["gl"]
    gl.where, gl.load, gl.store = chosen, read, put
    gl.min = lambda x, axis: x.amin(axis)
    gl.program_id, gl.num_programs = (lambda axis: program[axis]), (lambda axis: grid[axis])
    gl.NVMMASharedLayout, gl.SwizzledSharedLayout = (lambda *_: True), (lambda *_: False)
    gl.allocate_shared_memory = lambda dtype, shape, layout: Place.of(
        torch.full((prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8), dtype, shape, layout
    )
    gl.warp_specialize = lambda works, *_: turns.run([lambda f=f, args=args: f(*args) for f, args in works])
    names |= {"load": load, "store": store, "barrier": lambda: turns.until(lambda: True)}
    names |= {
        "make_barriers": lambda size, count: Barriers([Arrivals(count) for _ in range(size)]),
        "operand_layout": lambda x: None,
        "sums_layout": lambda x: None,
        "wide_layout": lambda columns: SimpleNamespace(instr_shape=[16, columns, 16]),
        "column_chunks": lambda x, count: x.chunk(count, 1),
        "uniform": lambda x: x,
        "_pairs_of": lambda words, dtype: words.contiguous().view(dtype).float().unflatten(-1, (-1, 2)).unbind(-1),
        "_rounded": lambda x: x.to(KIND),
        "_exp2": torch.exp2,
        "_inverse": torch.reciprocal,
    }
    names |= {n: getattr(channels, n).value for n in ("C", "HALF", "WIDTH", "SOME")} | {"FAR": TensorMap.FAR}
    return names


def start(kernel: Any, grid: tuple[int, ...], *args: Any, **facts: Any) -> None:
    """In place of `launch`."""
    name, options = kernel.__name__, {k: v for k, v in facts.items() if k.isupper()}
    for n in range(prod(grid)):
        turns, program = Turns(random.Random(n)), (n % grid[0], n // grid[0])
        work = names_of(turns, name, program, grid)[name]
        given = map(given_as, args)
        if name == "walk_chunks":
            work(*given, **options)
        else:
            turns.run([lambda work=work, given=given: work(*given, **options)])


CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "whole chunks": ((1, 256, 1, 1), {"strong": 2}),
    "tokens left over, states": ((2, 70, 1, 1), {"states": True}),
    "heads that share q and k": ((1, 80, 1, 2), {"states": True}),
    "one token": ((1, 1, 1, 1), {}),
    "any length, a gradient that TMA does not take": ((1, 70, 1, 1), {"normalize": False, "offset": 1}),
    "packed": ((1, 129, 1, 1), {"ends": [0, 0, 65, 65, 129], "states": True}),
    "segments": ((1, 250, 1, 1), {"states": True, "span": 1}),
    "packed segments": ((1, 194, 1, 1), {"ends": [0, 0, 130, 130, 194], "span": 1}),
    "parts": ((1, 250, 1, 1), {"states": True, "part": 2}),
}


def on_hopper(case: str, by_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are served as on Hopper, in float16 with gates per channel, too."""
    given = CASES[case][1]
    monkeypatch.setattr(tuning, "version", -200 - 100 * by_channel - list(CASES).index(case))
    monkeypatch.setattr(delta_chunks, "span", lambda *_: given.get("span", 0))
    monkeypatch.setattr(delta_chunks, "part", lambda *_: given.get("part", 0))
    tiles = delta_chunks.Tiles(64, 128, 64, 32 if by_channel else 128, (4, 4, 4), (1, 1))
    monkeypatch.setattr(delta_chunks, "delta_tiles", lambda *_: tiles)
    monkeypatch.setattr(delta_chunks, "most_halvings", lambda _: 12)
    monkeypatch.setattr(delta_hopper, "serves", lambda *_: True)
    monkeypatch.setattr(delta_hopper, "serves_channels", lambda call, grads: grads.q.dtype == KIND)
    monkeypatch.setattr(delta_hopper, "launch", start)
    monkeypatch.setattr(warps.Registers, "type", SimpleNamespace(layout=SimpleNamespace(instr_shape=[16, 32, 16])))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the kernels themselves")
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # chunks with strong gates, which others make
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gate", ["per head", "per channel"])
def test_results(case: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs and gradients against the recurrence in float64."""
    (B, T, H, HV), given = CASES[case]
    dice = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice)

    by_channel, normalize = gate == "per channel", given.get("normalize", True)
    on_hopper(case, by_channel, monkeypatch)
    ends = given.get("ends")
    cu_seqlens = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    N = B if ends is None else len(ends) - 1
    gates = torch.nn.functional.logsigmoid(normal(B, T, HV, *([128] if by_channel else [])) + 3)
    if by_channel and "strong" in given:
        gates[:, 64 * given["strong"] + 5, :, 3] = -30.0
    rows = [(1.0 if normalize else 0.08) * normal(B, T, H, 128) for _ in range(2)]
    args = [*rows, normal(B, T, HV, 128), gates, 2 * normal(B, T, HV).sigmoid()]
    state = normal(N, HV, 128, 128) if given.get("states") else None
    incoming = normal(B * T * HV * 128 + 1).to(KIND)[given.get("offset", 0) :][: B * T * HV * 128].view(B, T, HV, 128)

    def run(impl: str, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [a.to(KIND).to(kind).requires_grad_() for a in args]
        first = None if state is None else state.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        o = ridgeline.gated_delta_rule(
            *leaves, normalize=normalize, impl=impl, initial_state=first, cu_seqlens=cu_seqlens, return_state=True
        )
        wanted = leaves if first is None else [*leaves, first]
        grads = torch.autograd.grad([o[0], o[1]], wanted, [incoming.to(kind), torch.ones_like(o[1])])
        return [o[0].detach(), o[1].detach(), *grads]

    for n, (one, other) in enumerate(zip(run("triton", KIND), run("naive", torch.float64), strict=True)):
        assert one.isfinite().all(), n
        assert (one.double() - other).norm() <= 1.5e-3 * other.norm(), n
