"""Replays of launchers, on a CPU that emulates a GPU: pointers reach their kernels, and unrepeatable launchers run."""

import ctypes
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
from ridgeline import codegen, cuda, replay, tuning
from ridgeline.boundary import kernel_op, observe
from ridgeline.device import pretend
from ridgeline.op import RidgelineError, dense_only
from ridgeline.replay import Plans, recorder
from ridgeline.select import by_kind

Started = list[tuple[tuple[int, int, int], tuple[Any, ...]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(replay, "_empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return []


class Start:
    """As `cuda.Starter`, but it only notes what it is given."""

    def __init__(self, started: Started):
        self.started = started

    def __call__(self, x: int, y: int, z: int, stream: int, values: Any) -> None:
        self.started.append(((x, y, z), tuple(values)))

    def bound(self, grid: tuple[int, int, int], values: Any) -> Any:
        return Bound(self, grid, values)


class Bound:
    def __init__(self, start: Start, grid: tuple[int, int, int], values: Any):
        self.start, self.grid, self.fill = start, grid, values

    def __call__(self, stream: int, values: Any) -> None:
        self.start(*self.grid, stream, values)


def door(started: Started) -> Callable[..., None]:
    """Does what `launch` does if a kernel's parameters are pointers and numbers."""

    start = Start(started)

    def launch(grid: tuple[int, int, int], *args: Any) -> None:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        watching = recorder()
        if watching is not None:
            watching.started(start, grid, args, values)
        start(*grid, 0, values)

    return launch


def counted(
    launcher: Callable[..., Any], leading: int, count: int, loose: tuple[int, ...] = ()
) -> tuple[Callable[..., Any], list[int]]:
    runs: list[int] = []

    def counting(*args: Any) -> Any:
        runs.append(1)
        return launcher(*args)

    return Plans(counting, leading, loose).front(count), runs


def test_a_third_call_is_replayed(started: Started) -> None:
    launch = door(started)

    def launcher(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        y, partial = torch.empty_like(x), x.new_empty(4, x.shape[1], dtype=torch.float32)
        dw = torch.empty(x.shape[1], dtype=torch.float32)
        launch((x.shape[0], 1, 1), y, x, w if w is not None else 0, partial[1:], x.shape[1], eps)
        launch((1, 2, 3), dw, partial)
        return y, dw

    plans, runs = counted(launcher, 2, 3)
    for number in range(5):
        x, w = torch.randn(3, 8, dtype=torch.float16), torch.randn(8)
        y, dw = plans(x, w, 1e-5)
        (grid, first), (second_grid, second) = started[-2:]
        assert (grid, second_grid) == ((3, 1, 1), (1, 2, 3))
        assert first[:3] == (y.data_ptr(), x.data_ptr(), w.data_ptr())
        assert first[4:] == (8, 1e-5)
        assert second == (dw.data_ptr(), first[3] - 32)  # `partial` begins a row before its view
        assert (y.shape, y.dtype, dw.shape, dw.dtype) == ((3, 8), torch.float16, (8,), torch.float32)
        assert len(runs) == min(number + 1, 2)
    kinds = {
        "another shape": (torch.randn(4, 8).half(), w, 1e-5),
        "another dtype": (torch.randn(3, 8), w, 1e-5),
        "other strides": (torch.randn(8, 3).half().t(), w, 1e-5),
        "no alignment": (torch.randn(25).half()[1:].view(3, 8), w, 1e-5),
        "another number": (x, w, 1e-6),
        "no weight": (x, None, 1e-5),
    }
    for what, args in kinds.items():
        before = len(runs)
        plans(*args)
        assert len(runs) == before + 1, what


def test_loose_numbers_are_handed_on(started: Started) -> None:
    """A seed is not part of a call's kind. A launcher that computes something from it cannot be replayed, and runs."""
    launch = door(started)

    def launcher(x: torch.Tensor, seed: int, scale: int, *, change: int = 0) -> torch.Tensor:
        y = torch.empty_like(x)
        launch((1, 1, 1), y, x, scale, seed + change if change else seed)
        return y

    plans, runs = counted(launcher, 1, 3, loose=(1,))
    for seed in (5, 6, 7, -(1 << 31)):
        plans(torch.randn(8), seed, 5)
        assert started[-1][1][2:] == (5, seed)
    assert len(runs) == 2
    plans, runs = counted(lambda *args: launcher(*args, change=1), 1, 3, loose=(1,))
    for seed in (5, 6, 7, 8):
        plans(torch.randn(8), seed, 5)
        assert started[-1][1][2:] == (5, seed + 1)
    assert len(runs) == 4


def test_torch_operations_that_write_to_out_are_repeated(started: Started) -> None:
    """Products, sums, copies and fills on arguments, allocations and views, in their order among the kernels."""
    launch = door(started)

    def launcher(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, fault: str) -> tuple[torch.Tensor, ...]:
        memory, dw, db = torch.empty(40), torch.empty_like(w), torch.empty_like(bias)
        for rows in (slice(0, 4), slice(4, 7)):
            y = memory[: 5 * x[rows].shape[0]].view(-1, 5)
            torch.addmm(bias, x[rows], w.mT, out=y)
            launch((1, 1, 1), y)
            (torch.addmm if rows.start else torch.mm)(*[dw] * (rows.start > 0), y.mT, x[rows], out=dw)
            part = torch.sum(y, 0, dtype=torch.float32, out=torch.empty_like(db) if rows.start else db)
            if rows.start:
                torch.add(db, part, out=db)
        first = torch.empty((2, 8)).fill_(0.5)
        first[1] = x[6]
        launch((1, 1, 1), first)
        if fault == "a tensor of its own":
            torch.mm(torch.ones(5, 5), dw, out=torch.empty_like(dw))
        if fault == "no elements":
            torch.mm(x[:0], w.mT, out=torch.empty(0, 5))
        if fault == "another dtype":
            torch.add(db.view(torch.int32), 0, out=torch.empty(5, dtype=torch.int32))
        if fault == "a negated view":
            torch.empty_like(bias).copy_(torch._neg_view(bias))
        if fault == "too many steps":
            for _ in range(1001):
                db.fill_(1)
        return dw, db, first

    plans, runs = counted(launcher, 3, 4)
    wide = torch.randn(7, 16)
    for number in range(5):
        x = wide[:, 8:] if number % 2 else torch.randn(7, 16)[:, :8]
        w, bias = torch.randn(5, 8), torch.randn(5)
        dw, db, first = plans(x, w, bias, "")
        y = torch.nn.functional.linear(x, w, bias)
        torch.testing.assert_close(dw, y.mT @ x)
        torch.testing.assert_close(db, y.sum(0))
        assert len(started) == 3 * number + 3
        assert started[-2][1] == started[-3][1] != (0,)
        assert torch.equal(first, torch.stack([torch.full((8,), 0.5), x[6]]))
    assert len(runs) == 2
    for fault in ("a tensor of its own", "no elements", "another dtype", "a negated view", "too many steps"):
        before = len(runs)
        for _ in range(4):
            plans(x, w, bias, fault)
        assert len(runs) == before + 4, fault


def test_torch_operations_beside_loose_numbers_are_not_repeated(started: Started) -> None:
    """A value computed from it would hold for that call only."""

    def launcher(x: torch.Tensor, seed: int) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.add(x, x, alpha=seed, out=y)
        door(started)((1, 1, 1), y, seed)
        return y

    plans, runs = counted(launcher, 1, 2, loose=(1,))
    for seed in range(4):
        assert plans(torch.ones(3), seed).tolist() == [1.0 + seed] * 3
    assert len(runs) == 4


def test_questions_about_dtypes_are_no_operations(started: Started) -> None:
    launch = door(started)

    def launcher(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, w.dtype))
        launch((1, 1, 1), y, x, w)
        return y

    call, runs = counted(launcher, 2, 2)
    for _ in range(4):
        assert call(torch.ones(4).bfloat16(), torch.ones(4)).dtype == torch.float32
    assert len(runs) == 2
    assert len(started) == 4


def test_new_configurations_are_used(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = door(started)

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch((tuning.version, 1, 1), y, x)
        return y

    plans, runs = counted(launcher, 1, 1)
    for _ in range(4):
        plans(torch.randn(8))
    monkeypatch.setattr(tuning, "version", tuning.version + 1)
    plans(torch.randn(8))
    assert len(runs) == 3
    assert started[-1][0] == (tuning.version, 1, 1)


def test_one_tensor_given_twice(started: Started) -> None:
    """Its pointers could belong to either argument, so such a call is never recorded."""
    launch = door(started)

    def launcher(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(a)
        launch((1, 1, 1), y, a, b)
        return y

    plans, runs = counted(launcher, 2, 2)
    for _ in range(2):
        x = torch.randn(8)
        plans(x, x)
    for _ in range(4):
        a, b = torch.randn(8), torch.randn(8)
        y = plans(a, b)
        assert started[-1][1] == (y.data_ptr(), a.data_ptr(), b.data_ptr())
    assert len(runs) == 3
    y = plans(a, a)
    assert len(runs) == 3
    assert started[-1][1] == (y.data_ptr(), a.data_ptr(), a.data_ptr())


@pytest.mark.parametrize(
    "what", ["another operation", "a copy", "writes", "returns its argument", "a slow start", "a tensor map"]
)
def test_what_cannot_be_repeated_runs(started: Started, what: str) -> None:
    launch = door(started)

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        if what == "writes":
            y.zero_()
        launch((1, 1, 1), y, x.t().contiguous() if what == "a copy" else x)
        if what == "a tensor map":
            launch((1, 1, 1), y, bytes(128))
        if what == "a slow start" and recorder() is not None:
            recorder().started(None, (1, 1, 1), (), ())
        return y + 1 if what == "another operation" else x if what == "returns its argument" else y

    plans, runs = counted(launcher, 1, 1)
    for _ in range(5):
        plans(torch.randn(3, 8))
    assert len(runs) == 5
    assert recorder() is None


@kernel_op("toy_same(Tensor x, Tensor? w, bool fails) -> Tensor")
def same(x: torch.Tensor, w: torch.Tensor | None, fails: bool) -> torch.Tensor:
    if fails:
        raise RuntimeError("out of memory")
    return torch.empty_like(x)


STARTS: Started = []


@kernel_op("toy_inner(Tensor x, float f) -> Tensor")
def doubled(x: torch.Tensor, f: float) -> torch.Tensor:
    y = torch.empty_like(x)
    door(STARTS)((1, 1, 1), y, x, f)
    return y


@pytest.mark.parametrize("loose", [False, True])
def test_what_another_op_does_is_repeated(started: Started, monkeypatch: pytest.MonkeyPatch, loose: bool) -> None:
    """But for a launcher with loose numbers, which would be taken for numbers of the kind."""
    monkeypatch.setitem(doubled.__globals__, "current", lambda: 0)
    launch = door(started)

    def launcher(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        y, made = torch.empty_like(x), doubled(x[1:], 2.0)
        launch((1, 1, 1), y, made, seed)
        return y, made

    call, runs = counted(launcher, 1, 2, (1,) if loose else ())
    for n in range(5):
        x = torch.randn(3, 8)
        y, made = call(x, 7)
        assert STARTS[-1][1] == (made.data_ptr(), x.data_ptr() + 32, 2.0)
        assert started[-1][1] == (y.data_ptr(), made.data_ptr(), 7)
        assert made.shape == (2, 8)
        assert len(runs) == (n + 1 if loose else min(n + 1, 2))


OTHERS = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": torch.Tensor.to_sparse_csr,
    "_mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_that_are_not_dense(started: Started, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fast calls do not look for sparse tensors, yet none passes the boundary; other failures stay unchanged."""
    monkeypatch.setitem(same.__globals__, "current", lambda: 0)
    good, bad = torch.eye(3), OTHERS[kind](torch.eye(3))
    for x, w in ((bad, None), (good, bad), (bad, bad)):
        with pytest.raises(RidgelineError, match=f"^toy: it takes dense tensors, and one is {kind}; give its to_"):
            same(x, w, False)
    with pytest.raises(RuntimeError, match="out of memory"):
        same(good, good, True)
    assert same(good, None, False).shape == (3, 3)


def test_no_elements(started: Started) -> None:
    plans, runs = counted(lambda x, y: (torch.empty_like(x), torch.empty_like(y)), 2, 2)
    for _ in range(4):
        a, b = plans(torch.randn(0, 4), torch.randn(0, 4, dtype=torch.float64))
        assert (a.shape, a.dtype, b.dtype) == ((0, 4), torch.float32, torch.float64)
    assert len(runs) == 2


def test_matmul_replays_in_the_precision_of_the_call(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other precisions are other kinds of call: torch.set_float32_matmul_precision takes effect at once."""
    from ridgeline.ops.matmul import matmul

    launch = door(started)

    def run(op: Any, direction: str, impl: str | None, out: tuple[torch.Tensor], *inputs: Any) -> None:
        op.implementations["triton"].launchers["fwd"](*out, *inputs)

    monkeypatch.setattr(matmul, "run", run)
    monkeypatch.setattr(matmul, "_fwd_op", Plans(matmul._fwd_op.__globals__["launcher"], 2).front(4))
    monkeypatch.setattr(
        matmul, "launch", lambda kernel, grid, y, *args, PRECISION, **_: launch((1, 1, 1), y, int(PRECISION == "tf32"))
    )
    before = torch.get_float32_matmul_precision()
    try:
        for precision, rounded in (("highest", 0), ("high", 1), ("highest", 0), ("medium", 1)):
            torch.set_float32_matmul_precision(precision)
            for _ in range(4):
                matmul.product(torch.randn(4, 8), torch.randn(8, 4), "triton")
                assert started[-1][1][1] == rounded
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_call_like_one_before_is_not_looked_at_again(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    @by_kind(2)
    def look(x: torch.Tensor, w: torch.Tensor, dim: Any, alpha: float) -> tuple[str | None, int]:
        looks.append(dim)
        dense_only("toy", [x, w])
        if isinstance(dim, bool) or dim == 7:
            raise RidgelineError("toy: no such dim")
        return "plain" if alpha == 0 else None, len(looks)

    x, w = torch.randn(3, 4), torch.randn(4)
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.Tensor, "is_cuda", True)
        assert look(x, w, 1, 2.0) == look(x.clone(), w.clone(), 1, 2.0) == (None, 1)
        assert look(x, w, (0, 1), 2.0) == look(x, w, (0, 1), 2.0) == (None, 2)
        kinds = {
            "another shape": (x[:2], w, 1, 2.0),
            "another dtype": (x, w.half(), 1, 2.0),
            "another number": (x, w, 0, 2.0),
            "an int for a float": (x, w, 1, 2),
            "a bool in a tuple": (x, w, (False, 1), 2.0),
        }
        for what, given in kinds.items():
            before = len(looks)
            assert look(*given) == look(*given) == (None, before + 1), what
        every_time = {"a list": ([0, 1], 2.0), "left to PyTorch": (1, 0.0)}
        for what, rest in every_time.items():
            before = len(looks)
            assert look(x, w, *rest)[1] == before + 1 == look(x, w, *rest)[1] - 1, what
        for dim in (True, 7, 7):
            with pytest.raises(RidgelineError, match="no such dim"):
                look(x, w, dim, 2.0)
        for bad in (OTHERS["sparse_coo"](x), OTHERS["nested"](x)):
            with pytest.raises(RidgelineError, match="^toy: it takes dense tensors"):
                look(bad, w, 1, 2.0)
        before = len(looks)
        with pretend("sm_90"):
            assert look(x, w, 1, 2.0) == (None, before + 1)
        monkeypatch.setitem(look.__globals__, "autocast", lambda: True)
        assert look(x, w, 1, 2.0) == look(x, w, 1, 2.0) == (None, before + 2)
    few = x[:1]
    assert look(few, w, 1, 2.0) == (None, before + 3)  # on a CPU, where values are examined
    assert look(few, w, 1, 2.0) == (None, before + 4)


def test_a_kind_may_lack_tensors_and_have_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    @by_kind(2, optional=1, strides=True)
    def look(x: torch.Tensor, w: torch.Tensor | None, n: int, impl: str | None) -> tuple[None, int]:
        looks.append(x)
        return None, len(looks)

    @by_kind(2, others=("str | None",))
    def several(*args: Any) -> tuple[None, int]:
        return None, len(args)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, w = torch.randn(4, 4), torch.randn(4)
    kinds = [(x, None, 1, None), (x, w, 1, None), (x.T, w, 1, None), (x, None, True, None), (x, None, 1, "triton")]
    for n, given in enumerate(kinds, 1):
        assert look(*given) == look(*given) == (None, n)
    assert look(None, w, 1, None) == (None, len(kinds) + 1)  # examined, so that the op can raise
    assert several(x, w, None) == several(x, w, "triton") == (None, 3)


def test_gradients_are_part_of_a_kind_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are on, and which tensors require them, for a guard and for a key."""
    looks: list[int] = []

    @by_kind(2, optional=1, gradients=True)
    def look(x: torch.Tensor, w: torch.Tensor | None, n: int) -> tuple[None, int]:
        looks.append(n)
        return None, len(looks)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, w = torch.randn(4, 4), torch.randn(4)
    kinds = [
        (x, w),
        (x, w.clone().requires_grad_()),
        (x.clone().requires_grad_(), w),
        (x.clone().requires_grad_(), None),
    ]
    for n, given in enumerate(kinds, 1):
        assert [look(*given, 1)[1] for _ in range(4)] == [n] * 4
    with torch.no_grad():
        assert [look(*kinds[1], 1)[1] for _ in range(4)] == [5] * 4
    assert [look(*given, 1)[1] for given in kinds] == [1, 2, 3, 4]


def test_a_guard_finds_the_plan(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key of all facts; any other fact, and another GPU, sends the call on to the key."""
    launch, runs = door(started), []

    def launcher(x: torch.Tensor, w: torch.Tensor | None, eps: float) -> torch.Tensor:
        runs.append(eps)
        y = torch.empty_like(x)
        launch((1, 1, 1), y, x, w, eps)
        return y

    plans = Plans(launcher, 2)
    call = plans.front(3)
    x, w, odd = torch.randn(3, 8), torch.randn(8), torch.randn(9)[1:]
    for _ in range(3):
        call(x, w, 1.0)

    class NoKey(Exception):
        pass

    def keyed(key: Any) -> None:
        raise NoKey

    monkeypatch.setitem(call.__globals__, "found", keyed)
    for _ in range(3):
        x, w = torch.randn(3, 8), torch.randn(8)
        y = call(x, w, 1.0)
        assert started[-1][1] == (y.data_ptr(), x.data_ptr(), w.data_ptr(), 1.0)
    others = {
        "shape": (x, torch.randn(7)),
        "strides": (torch.randn(8, 3).t(), w),
        "dtype": (x, w.half()),
        "alignment": (x, odd),
        "none": (x, None),
        "gradients": (x, torch.randn(8).requires_grad_()),
        "class": (x, torch.nn.Parameter(w, requires_grad=False)),
        "one tensor": (x, x),
        "negated": (x, torch._neg_view(w)),
    }
    for what, given in others.items():
        with pytest.raises(NoKey):
            print(what, call(*given, 1.0))
    with pytest.raises(NoKey):
        call(x, w, 2.0)
    (plan,) = plans.found.values()
    for function in (call, plan):
        monkeypatch.setitem(function.__globals__, "current", lambda: 1)
    assert len(runs) == 2
    call(x, w, 1.0)  # the launcher sees to the device
    assert len(runs) == 3


def test_a_key_keeps_few_guards() -> None:
    known = replay.Guarded()
    tensors = [torch.randn(n + 1) for n in range(replay.Guarded.ADDED + 1)]

    def add(n: int, *others: torch.Tensor) -> None:
        known.add("near", (tensors[n], None, *others), lambda check: (check, n))

    for n in range(replay.Guarded.ADDED):
        add(n)
    kept = known.found["near"]
    assert [n for _, n in kept] == [replay.Guarded.ADDED - 1 - n for n in range(replay.Guarded.MOST)]
    assert [check(tensors[n]) for check, n in kept] == [True] * replay.Guarded.MOST
    assert not kept[0][0](tensors[0])
    add(0, tensors[0])  # would never pass
    assert known.found["near"] == kept
    add(-1)  # kinds without end: a look at guards would be in vain
    assert not known.found


def test_calls_left_to_pytorch_are_remembered_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    @by_kind(1, plain=True)
    def look(x: torch.Tensor, groups: int) -> tuple[str, int]:
        looks.append(groups)
        return "plain", groups

    x = torch.randn(3)
    look(x, 2)
    look(x, 2)
    assert looks == [2, 2]  # on a CPU, where values are examined
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert look(x, 2) == look(x, 2) == ("plain", 2)
    assert look(x, 1) == ("plain", 1)
    assert looks == [2, 2, 2, 1]


def test_the_docstring_of_codegen_shows_what_it_writes(started: Started) -> None:
    """Its example is what `by_kind`, the front of a registered op and a plan of one kernel are."""
    launch = door(started)

    def launcher(x: torch.Tensor, scale: float) -> torch.Tensor:
        y = torch.empty_like(x)
        launch((x.shape[0], 1, 1), y, x, scale)
        return y

    looked = by_kind(1)(lambda x, scale: (None, scale))
    plans = Plans(launcher, 1)
    call = plans.front(2)
    for _ in range(2):
        call(torch.ones(4), 2.0)
    (plan,) = plans.found.values()
    shown = [textwrap.indent(f.source, "    ") for f in (looked, call, plan)]
    print("\n\n".join(shown))
    assert "\n\n".join(shown) in codegen.__doc__


NESTED = """
import torch
import host_calls, ridgeline

host_calls.emulate()
x = torch.randn(2, 4).bfloat16()
y = torch.nested.nested_tensor([torch.randn(4), torch.randn(4)]).bfloat16()
for _ in range(6):
    ridgeline.mul(x, x.clone())
try:
    ridgeline.mul(x, y)
except ridgeline.RidgelineError as error:
    print(error)
"""


def test_a_nested_tensor_after_guarded_calls() -> None:
    """torch's check would end the process."""
    folder = Path(__file__).parent
    ran = subprocess.run([sys.executable, "-c", NESTED], cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "one is nested" in ran.stdout


def test_tensors_with_symbolic_sizes_outside_their_mode() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(5, 8), static_shapes=False)
    assert ridgeline.gelu(x, impl="triton").shape == x.shape


@pytest.mark.parametrize("name", ["softmax", "topk_gate"])
def test_gradients_of_a_map_over_a_kernel_raise(name: str) -> None:
    """Inside `vmap` a tensor does not say that gradients are wanted of it."""
    functions = {"softmax": ridgeline.softmax, "topk_gate": lambda x, impl: ridgeline.topk_gate(x, 2, impl=impl)[0]}

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: functions[name](row, impl="triton"))(x).sum()

    with pytest.raises(RidgelineError, match="torch.func"):
        torch.func.grad(total)(torch.randn(3, 4, 8))


class _Driver:
    """Notes the memory that a start hands over: parameters and configuration, in one buffer."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, _: Any, extra: Any) -> int:
        base, size = (ctypes.c_void_p * 5).from_address(extra.value)[1::2]
        length = config.value - base + cuda.Starter.CONFIG.size
        assert ctypes.c_size_t.from_address(size).value <= length
        self.seen.append(ctypes.string_at(base, length))
        return 0


@pytest.mark.parametrize("layout", ["PqiPf", "0xP0xi4xP0x?7xP8x8x", "i4xPP128sif", "iqf", "P144sP", "?3xfd"])
def test_a_bound_start_packs_as_any_other(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Whichever parameters change; new streams, too."""
    driver = _Driver()
    monkeypatch.setattr(cuda, "driver_library", lambda: driver)
    start = cuda.Starter(5, layout, 64, 9, 0, cluster=2, pdl=True)
    codes = re.findall(r"(\d*[a-wyzA-Z?])", layout)
    examples = {"P": (1 << 40, 3), "q": (-(1 << 35), 7), "i": (-5, 8), "f": (0.5, -2.0), "?": (True, False)}
    examples |= {"d": (1.25, 3.0), "s": (bytes(range(100, 200)), b"another")}
    for moving in itertools.product((False, True), repeat=len(codes)):
        values = [examples[c[-1]][0] for c in codes]
        bound = start.bound((3, 4, 5), [cuda.MOVING if moves else v for v, moves in zip(values, moving, strict=True)])
        for turn, stream in enumerate((7, 7, 8)):
            given = [examples[c[-1]][turn % 2 * moves] for c, moves in zip(codes, moving, strict=True)]
            left = iter([v for v, moves in zip(given, moving, strict=True) if moves])
            bound(stream, [next(left) if f is cuda.MOVING else f for f in bound.fill])
            start(3, 4, 5, stream, given)
            assert driver.seen[-1] == driver.seen[-2], (moving, turn)


def test_small_temporaries_share_an_allocation(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that only kernels see; results stay apart. Zeros are the driver's."""
    zeros: list[tuple[int, ...]] = []
    monkeypatch.setattr(replay, "cleared", lambda *given: zeros.append(given))
    launch = door(started)

    def launcher(x: torch.Tensor, value: float) -> tuple[torch.Tensor, torch.Tensor]:
        parts = torch.empty(33, dtype=torch.float64), torch.empty(3, 4), torch.empty(1 << 18)
        y, z = torch.empty_like(x), torch.empty(5, dtype=torch.int32)
        wide, seen = torch.empty(6, 8)[:, :4], torch.empty(7)
        for t in (parts[1], z, wide):
            t.fill_(value)
        seen.copy_(x[:7])
        launch((1, 1, 1), y, z, *parts, wide, seen)
        return y, z

    for value in (0.0, 1.0, -0.0):
        plans, runs = counted(launcher, 1, 2)
        for _ in range(4):
            zeros.clear()
            y, z = plans(torch.randn(9), value)
            places = started[-1][1]
            assert places[:2] == (y.data_ptr(), z.data_ptr())
            assert (y.untyped_storage().nbytes(), z.untyped_storage().nbytes()) == (36, 20)
            assert not value or (z == value).all()
        assert len(runs) == 2
        driver = str(value) == "0.0"
        assert (places[3] == places[2] + 512) == driver  # else torch fills it
        assert zeros == [(places[3], 48, 0, 7), (places[1], 20, 0, 7)] * driver


class Sparing:
    """A toy op behind a public function whose guard spares the op its own; `missed` notes where the op looks again."""

    def __init__(self, name: str, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        launch, self.missed = door(started), []  # type: ignore[var-annotated]

        @kernel_op(f"{name}(Tensor x, Tensor w, float f) -> Tensor")
        def op(x: torch.Tensor, w: torch.Tensor, f: float) -> torch.Tensor:
            y = torch.empty_like(x)
            launch((1, 1, 1), y, x, w, f)
            return y

        @by_kind(2, sure=True)
        def look(x: torch.Tensor, w: torch.Tensor, name: str) -> tuple[None, Any]:
            return None, None

        self.op, self.look = op, look
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setitem(op.__globals__, "current", lambda: 0)
        self.x, self.w = torch.randn(3, 8), torch.randn(8)
        for _ in range(6):
            self.public(self.x, self.w, 1.0)
        found = op.__globals__["quick"]

        def quick(*near: Any) -> Any:
            self.missed.append(near)
            return found(*near)

        monkeypatch.setitem(op.__globals__, "quick", quick)

    def sure(self) -> Any:
        return self.look(self.x, self.w, "name")[1]

    def public(self, x: torch.Tensor, w: torch.Tensor, f: float) -> torch.Tensor:
        y: torch.Tensor = self.op(x, w, f, self.look(x, w, "name")[1])
        return y

    def sent_on(self, times: int = 1) -> bool:
        there = len(self.missed) == times
        self.missed.clear()
        return there


def test_a_guarded_call_takes_its_plan_at_once(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Sure` spares the op's own guard, unless anything may have changed that the public function's does not see."""
    toy = Sparing("toy_sure", started, monkeypatch)
    odd = torch.randn(9)[1:]
    for _ in range(3):
        x, w = torch.randn(3, 8), torch.randn(8)
        y = toy.public(x, w, 1.0)
        assert started[-1][1] == (y.data_ptr(), x.data_ptr(), w.data_ptr(), 1.0)
    assert not toy.missed
    toy.public(x, w, 2.0)
    assert toy.sent_on()
    toy.public(x, odd, 1.0)
    assert toy.sent_on()
    for _ in range(3):
        toy.public(x, w, 1.0)
    toy.missed.clear()
    monkeypatch.setattr(tuning, "version", tuning.version + 1)
    for _ in range(6):
        toy.public(x, w, 1.0)
    assert toy.sent_on(4)  # run, recorded, found by its key, by a guard
    with forward_ad.dual_level():
        toy.public(x, w, 1.0)
        assert toy.sent_on()
        with pytest.raises(RidgelineError, match="forward-mode"):
            toy.op(forward_ad.make_dual(x, x), w, 1.0, toy.sure())
    toy.missed.clear()
    with observe(lambda _: None):
        toy.public(x, w, 1.0)
    assert toy.sent_on()
    toy.public(x, w, 1.0)
    assert not toy.missed
    for plan in toy.op.__globals__["found"].__self__.values():
        monkeypatch.setitem(plan.__globals__, "current", lambda: 1)
    monkeypatch.setitem(toy.op.__globals__, "current", lambda: 1)
    toy.public(x, w, 1.0)  # another GPU
    assert toy.sent_on()


def test_a_guarded_call_reaches_a_dispatch_mode(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, watched = Sparing("toy_watched", started, monkeypatch), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            watched.append(function)
            return function(*args, **(kwargs or {}))

    sure = toy.sure()
    for call in (lambda: toy.public(toy.x, toy.w, 1.0), lambda: toy.op(toy.x, toy.w, 1.0, sure)):
        watched.clear()
        with Watch():
            call()
        assert torch.ops.ridgeline.toy_watched.default in watched


def test_a_guarded_call_reads_once_what_another_thread_replaces(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Sparing("toy_replaced", started, monkeypatch)

    class Replaced:
        """What is left between two reads: first this call's plan, then another call's."""

        def __init__(self, *kept: Any) -> None:
            self.left = list(kept)

        kept = property(lambda self: self.left.pop(0))

    own = toy.sure().kept
    assert torch.is_tensor(toy.op(toy.x, toy.w, 1.0, Replaced(own, (own[0], lambda *_: "another's"))))
