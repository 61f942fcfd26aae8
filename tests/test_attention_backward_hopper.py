"""attention's backward kernels for Hopper, run as Python (warps.py), with several programs at a time.

What ordinary stores write to shared memory is there for products and the copy engine once the thread that wrote has come to a fence, so
that one too early or too late is found. Models here are the order in which memory holds dQ's sums, the registers of pairs, and the waits
for words in memory; not seen are packed sequences.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from ridgeline import device
from ridgeline.boundary import Launch, observe
from ridgeline.ops.attention import _hopper_backward, _hopper_backward_wide, _hopper_pieces, _hopper_rings
from ridgeline.ops.attention._attention import options, seen
from ridgeline.ops.attention._triton import LOG2E
from warps import Barrier, Pointer, Shared, Turns, define, language, nbytes, registers


class Fenced(Shared):
    """Shared memory of which products and the copy engine see what a thread stored after the thread's next fence."""

    turns: Turns

    def store(self, x: torch.Tensor) -> None:
        values = x.clone().to(self.held.dtype)
        self.turns.me.stored.append(lambda: self.held.copy_(values))


class Kernel:
    """One program of a launch."""

    def __init__(self, launch: Launch, program: int, turns: Turns):
        self.turns, self.works = turns, []  # type: ignore[var-annotated]
        names = language(turns)
        define(names, _hopper_rings, _hopper_pieces, _hopper_backward, _hopper_backward_wide)
        kind = type("Fenced", (Fenced,), {"turns": turns})

        def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
            if dtype == torch.int64:
                return Shared([Barrier(0) for _ in range(shape[0])])
            if dtype == torch.int32 and len(shape) < 3:
                return Shared(torch.full(shape, -9, dtype=dtype))
            if dtype == torch.int32:  # pairs of probabilities
                dtype, shape = torch.float32, [*shape[:2], 2 * shape[2]]
            return kind(torch.full(shape, float("nan"), dtype=dtype))

        def fence() -> None:
            for write in turns.me.stored:
                write()
            turns.me.stored.clear()

        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.left = count

        def await_word(place: Pointer, count: int, found: int) -> None:
            if found < count:
                turns.until(lambda: int(place.t[place.at]) >= count)

        def add_word(place: Pointer, n: int, sem: str, scope: str) -> int:
            turns.until(lambda: True)
            old = int(place.t[place.at])
            place.t[place.at] += n
            return old

        def add(dq: torch.Tensor, dq_sums: Any, at: list[int], room: Shared, before: int) -> None:
            """A column comes after the one before it, in memory as in the room."""
            (number, row, _), rows = at, 2 * dq.shape[1]
            there = dq_sums.base.as_strided(dq_sums.shape, dq_sums.strides)[number, row : row + rows]
            room.held.view(-1, 32)[:rows] = dq.T.reshape(rows, 32)
            held = room.held.view(-1, 32)[: len(there)]
            turns.me.stores.append(lambda: there.copy_(held) if before == 0 else there.add_(held))

        def finish(dq: torch.Tensor, dq_out: Any, at: tuple[int, ...], room: Shared) -> None:
            names["_store"](dq_out, at, Shared(dq.to(dq_out.dtype)))

        def held(sums: Pointer, rows: int, like: torch.Tensor) -> torch.Tensor:
            turns.until(lambda: True)
            found = torch.zeros(like.shape[1], 64).view(-1)
            found[: rows * 32] = sums.t[sums.at : sums.at + min(found.numel(), rows * 32)]
            return registers(found.view(-1, 64).T)

        def cell(x: torch.Tensor, axis: int) -> int:
            return int(x.max())

        gl = names["gl"]
        gl.split = lambda x: (x[..., 0], x[..., 1])
        gl.max, gl.program_id, gl.allocate_shared_memory, gl.atomic_add = cell, lambda _: program, allocate, add_word
        gl.warp_specialize = lambda works, *_: self.works.extend(works)
        names["mbarrier"].init = init
        names |= {
            "KEYS": 2, "_flat": lambda tile: tile.reshape(tile.shape[-2:]), "fence_async_shared": fence,
            "_pack": lambda p, dtype: p.to(dtype), "_halves": lambda p, *_: p, "_singles": lambda p, *_: p.float(),
            "_lain": lambda pairs: pairs, "_stood": lambda pairs, like: pairs,
            "_look": lambda place: int(place.t[place.at]), "_await": await_word, "_added": names["tma"].store_wait,
            "_add": add, "_finish": finish, "_held": held,
        }  # fmt: skip
        turns.me.stored = []
        args = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in launch.args]
        for desc in args:
            if hasattr(desc, "block_shape"):
                desc.block_type = SimpleNamespace(shape=desc.block_shape, nbytes=nbytes(desc))
                desc.dtype, desc.layout = desc.base.dtype, None
        facts = {n: x for n, x in launch.constants.items() if n.isupper()}
        names[launch.kernel.__name__](*args, **facts)

    def groups(self) -> list[Any]:
        def work(function: Any, args: tuple[Any, ...]) -> None:
            self.turns.me.stored = []
            function(*args)

        return [lambda f=f, a=a: work(f, a) for f, a in self.works]


def calls(dice: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    D = dice.choice((16, 40, 64, 72, 96, 128, 128, 200, 256))
    step = dice.choice((1, 64, 128))
    rows, columns = (step * dice.randint(1, 400 // step) for _ in range(2))
    given: dict[str, Any] = {"causal": dice.choice((False, True, "bottom_right"))}
    if dice.random() < 0.25:
        given["window"] = dice.choice(((100, None), (70, 64), (None, 128), (200, 3), (300, 0)))
    return (dice.choice((1, 2)), dice.choice((1, 2)), dice.choice((1, 1, 2)), rows, columns, D), given


@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_random_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq, dk and dv of calls of all kinds, in order and not, some programs at a time."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(5):
        (B, kv, group, rows, columns, D), given = calls(dice)
        dtype, deterministic = dice.choice((torch.bfloat16, torch.float16)), dice.random() < 0.5
        q, do = (torch.randn(B, kv * group, rows, D).to(dtype) for _ in range(2))
        k, v = (torch.randn(B, kv, columns, D).to(dtype) for _ in range(2))
        band = options(D, **given).band(rows, columns)
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        scores = exact[0] @ exact[1].repeat_interleave(group, 1).mT * D**-0.5
        if band is not None:
            scores = scores.masked_fill(~seen(rows, columns, band, torch.device("cpu")), -torch.inf)
        o = scores.softmax(-1).nan_to_num(0) @ exact[2].repeat_interleave(group, 1)
        expected = torch.autograd.grad(o, exact, do.double())
        lse, o = scores.logsumexp(-1).float().detach(), o.detach().to(dtype)

        launched: list[Launch] = []
        found = [torch.full_like(t, float("nan")) for t in (q, k, v)]
        few, section = dice.randint(1, 3), dice.randint(1, B * kv)
        down = deterministic and given["causal"] is not False and dice.random() < 0.7
        monkeypatch.setattr(_hopper_backward, "_section", lambda *_, s=section, down=down: (s, down))
        chosen = options(D, **given)
        with device.pretend("sm_90"), observe(launched.append):
            _hopper_backward.bwd(*found, do, None, q, k, v, o, lse, None, None, None, *chosen, 0, 0, "ieee", deterministic)
        (launch,) = [one for one in launched if one.kernel.__name__.startswith("_bwd")]
        order, sums, tops, deltas = launch.args[0], *(a.base for a in [a for a in launch.args if hasattr(a, "block_shape")][-3:])
        tiles = -(-rows // 64)
        beyond = (0, tiles * 64 - rows)
        tops.copy_(pad(lse.masked_fill(lse == -torch.inf, torch.inf) * LOG2E, beyond, value=torch.inf).view(-1, 64))
        deltas.copy_(pad((o.float() * do.float()).sum(-1), beyond).view(-1, 64))
        order.zero_(), sums.fill_(float("nan"))
        if launch.constants.get("FINISH"):
            found[0].zero_()  # of rows that see nothing, by the kernel before

        programs = few if launch.constants.get("STAY") else launch.grid[0]
        for first in range(0, programs, few):
            turns = Turns(dice)
            kernels = [Kernel(launch, program, turns) for program in range(first, min(first + few, programs))]
            turns.run([work for kernel in kernels for work in kernel.groups()])
        if not launch.constants.get("FINISH"):
            parts = torch.where((order[1:] > 0)[:, None, None], sums.view(-1, D, 64), 0.0).mT * D**-0.5
            found[0].copy_(parts.reshape(B, kv * group, -1, D)[:, :, :rows])
        what = f"{tuple(q.shape)} {columns} {given} {deterministic=} {few} programs, sections of {section}, {down=}"
        for name, one, other in zip("qkv", found, expected, strict=True):
            said = lambda m, what=f"{what}: d{name}": f"{what}: {m}"  # noqa: E731
            torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2, msg=said)
