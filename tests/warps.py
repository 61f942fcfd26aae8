"""Runs Gluon's kernels for Hopper as Python: each group of warps is a thread, and they take turns at random.

Matrix instructions and the copy engine read their operands when their end is awaited, so that a tile released too
early is found. A deadlock is found too. Gluon's compilation, layouts and registers are not covered.
"""

import ast
import inspect
import random
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import triton

from ridgeline.cuda import TensorMap


class Turns:
    """Threads that run one at a time; `until` hands over to a random one whose wait is over."""

    def __init__(self, dice: random.Random):
        dice = random.Random(dice.random())  # other draws must not depend on the order of turns
        self.dice, self.change, self.waits, self.now, self.failed = dice, threading.Condition(), {}, -1, None  # type: ignore[var-annotated]
        self.me = threading.local()

    def run(self, works: list[Callable[[], None]]) -> None:
        self.waits = {n: lambda: True for n in range(len(works))}
        threads = [threading.Thread(target=self._one, args=(n, work), daemon=True) for n, work in enumerate(works)]
        for t in threads:
            t.start()
        with self.change:
            self._next()
        for t in threads:
            t.join()
        if self.failed is not None:
            raise self.failed

    def _next(self) -> None:
        able = [n for n, over in self.waits.items() if over()]
        if not able and self.waits:
            self.failed = self.failed or AssertionError("all wait for one another")
        self.now = self.dice.choice(able) if able else -1
        self.change.notify_all()

    def _enter(self, n: int) -> None:
        self.change.wait_for(lambda: self.now == n or self.failed)
        if self.failed:
            raise SystemExit

    def _one(self, n: int, work: Callable[[], None]) -> None:
        with self.change:
            try:
                self._enter(n)
                self.me.number, self.me.products, self.me.stores = n, [], []
                work()
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    self.failed = self.failed or error
            self.waits.pop(n, None)
            self._next()

    def until(self, over: Callable[[], bool]) -> None:
        n = self.me.number
        self.waits[n] = over
        self._next()
        self._enter(n)
        self.waits[n] = lambda: True


class Registers(torch.Tensor):
    """A tensor with the attributes that kernels use. It is a value: no other name's changes with it."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]
    __iadd__, __isub__, __imul__ = torch.Tensor.__add__, torch.Tensor.__sub__, torch.Tensor.__mul__  # type: ignore[assignment]


def registers(t: torch.Tensor) -> Registers:
    return t.as_subclass(Registers)


class Shared:
    """Shared memory: a view of a tensor, or of barriers."""

    def __init__(self, held: Any):
        self.held, self.dtype = held, getattr(held, "dtype", None)
        self.shape = list(held.shape) if isinstance(held, torch.Tensor) else [len(held)]
        self.type = SimpleNamespace(shape=self.shape)

    def index(self, n: int) -> Any:
        return type(self)(self.held[n]) if isinstance(self.held, torch.Tensor) else self.held[n]

    def reshape(self, shape: list[int]) -> "Shared":
        return type(self)(self.held.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return type(self)(self.held.permute(order))

    def slice(self, start: int, length: int, axis: int = 0) -> "Shared":
        return type(self)(self.held.narrow(axis, start, length))

    def store(self, x: torch.Tensor) -> None:
        self.held.copy_(x)

    def load(self, layout: Any) -> Any:
        return registers(self.held.clone())


class Barrier:
    def __init__(self, count: int):
        self.count, self.left, self.bytes, self.phase = count, count, 0, 0

    def come(self, n: int = 0, more: int = 0) -> None:
        self.left, self.bytes = self.left - n, self.bytes + more
        assert self.left >= 0, "more have come than were expected"
        if not self.left and not self.bytes:
            self.left, self.phase = self.count, self.phase + 1


class Product:
    """A matrix instruction in flight."""

    def __init__(self, a: Any, b: Any, c: Any, use_acc: bool = True, is_async: bool = True):
        self.given, self.made = (a, b, c if use_acc else None), None

    def end(self) -> torch.Tensor:
        if self.made is None:
            a, b, c = self.given
            a, b = (x.held if isinstance(x, Shared) else x for x in (a, b))
            c = c.end() if isinstance(c, Product) else c
            self.made = registers(a.float() @ b.float() + (0 if c is None else c))
        return self.made


class Pointer:
    def __init__(self, t: torch.Tensor, at: Any = 0):
        self.t, self.at = t.view(-1), at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.t, self.at + more)


def box(desc: Any, at: Any) -> torch.Tensor:
    """Returns the part of a tensor map's tensor that a box covers; of a ragged map, it ends with the sequence."""
    if len(at) < 5 or not getattr(desc, "ragged", True):
        t, ends = desc.base.as_strided(desc.shape, desc.strides), [i + n for i, n in zip(at, desc.block_shape)]
        return t[tuple([slice(i, end) for i, end in zip(at, ends)])]
    _, end, head, last, column = at  # see TensorMap
    row, left = end + last - TensorMap.FAR, max(0, min(desc.block_shape[3], TensorMap.FAR - last))
    return desc.base[None, :, head : head + 1, row : row + left, column : column + desc.block_shape[4]]


def list_of(mine: list[int], others: list[int], size: int, dice: random.Random) -> torch.Tensor:
    """Returns `list_tiles`'s list for tiles of so many rows; mine, others: cu_seqlens. Sequences come in any order."""
    tiles = []
    order = list(range(len(mine) - 1))
    dice.shuffle(order)
    for n in order:
        count = -(-(mine[n + 1] - mine[n]) // size)
        facts = count, mine[n], mine[n + 1] - mine[n], others[n], others[n + 1] - others[n], n, 0
        tiles += [(len(tiles), *facts)] * count
    return torch.tensor([0, len(tiles), *[0] * 6, *[x for fields in tiles for x in fields]], dtype=torch.int32)


def nbytes(desc: Any) -> int:
    size = desc.base.element_size()
    for n in desc.block_shape:
        size *= n
    return size


class _Plain(ast.NodeTransformer):
    """Removes decorators, annotations and whatever only tensors have."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            if argument:
                argument.annotation = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        node.body = [one for one in node.body if not isinstance(one, ast.AnnAssign)]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        wide = (
            isinstance(node.func, ast.Attribute) and node.func.attr == "to" and ast.unparse(node.args[0]) == "gl.int64"
        )
        return node.func.value if wide else node  # type: ignore[union-attr,attr-defined]


def _bundle(node: ast.AST) -> bool:
    """Whether this is the class of a NamedTuple, which is Python already."""
    return isinstance(node, ast.ClassDef) and "NamedTuple" in [ast.unparse(base) for base in node.bases]


@cache
def _code(module: Any) -> CodeType:
    kept = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not _bundle(node)
    ]
    return compile(ast.fix_missing_locations(_Plain().visit(ast.Module(kept, []))), str(module.__file__), "exec")


def define(names: dict[str, Any], *modules: Any) -> None:
    """Puts the functions and classes of modules into a namespace as Python; add models afterwards, since names are
    looked up there."""
    for module in modules:
        exec(_code(module), names)
        bundles = [node.name for node in ast.parse(inspect.getsource(module)).body if _bundle(node)]  # type: ignore[attr-defined]
        names |= {name: getattr(module, name) for name in bundles}


def language(turns: Turns) -> dict[str, Any]:
    """The names that kernels' sources use, apart from a kernel's own."""

    def wait(count: int, deps: tuple[Any, ...]) -> Any:
        under_way = turns.me.products
        while len(under_way) > count:
            under_way.pop(0).end()
        found = [x.made if isinstance(x, Product) else x for x in deps]
        assert not any(x is None for x in found), "what is under way is used"
        return found[0] if len(found) == 1 else tuple(found)

    def start(*args: Any, **facts: Any) -> Product:
        turns.me.products.append(Product(*args, **facts))
        return turns.me.products[-1]

    def load(source: Any, at: list[int], ready: Barrier, tile: Shared) -> None:
        tile.held.zero_()
        here = box(source, at)
        tile.held[tuple([slice(n) for n in here.shape])] = here
        turns.until(lambda: True)
        ready.come(0, -nbytes(source))

    def put(target: Any, at: list[int], tile: Shared) -> None:
        there = box(target, at)
        held = tile.held.view(target.block_shape)
        turns.me.stores.append(lambda: there.copy_(held[tuple([slice(n) for n in there.shape])]))

    def stored(count: int) -> None:
        turns.until(lambda: True)
        while len(turns.me.stores) > count:
            turns.me.stores.pop(0)()

    def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.come(count)
            turns.until(lambda: True)

    def either(f: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, b: (
            whole(a, b) if isinstance(a, int) and isinstance(b, int) else f(*map(torch.as_tensor, (a, b)))
        )

    def where(c: Any, x: Any, y: Any) -> Any:
        if isinstance(c, bool):
            return x if c else y
        return torch.where(c, *(torch.as_tensor(v, dtype=torch.float32) for v in (x, y)))

    nobody = lambda *_, **__: None  # noqa: E731
    nobody.get_default_for = nobody  # type: ignore[attr-defined]
    dtypes = {name: getattr(torch, name) for name in ("float32", "int32", "int64")}
    gl = SimpleNamespace(
        **dtypes,
        constexpr=lambda x: x,
        static_range=range,
        cdiv=triton.cdiv,
        where=where,
        exp2=torch.exp2,
        abs=torch.abs,
        log2=torch.log2,
        minimum=either(torch.minimum, min),
        maximum=either(torch.maximum, max),
        reshape=lambda x, shape: x.reshape(shape),
        zeros=lambda shape, dtype, layout: registers(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout: registers(torch.full(shape, x, dtype=dtype)),
        arange=lambda a, b, layout: registers(torch.arange(a, b)),
        convert_layout=lambda x, layout: x,
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        NVMMADistributedLayout=nobody,
        DotOperandLayout=nobody,
        SliceLayout=nobody,
        BlockedLayout=nobody,
        SwizzledSharedLayout=nobody,
        NVMMASharedLayout=nobody,
    )
    mbarrier = SimpleNamespace(
        wait=lambda b, parity, pred=True: pred and turns.until(lambda: b.phase & 1 != parity),
        expect=lambda b, size: b.come(1, size), arrive=arrive, MBarrierLayout=nobody,
    )  # fmt: skip
    return {
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": SimpleNamespace(store_wait=stored),
        "ROWS": 64,
        "_load": load,
        "load": load,
        "_store": put,
        "store": put,
        "log2_of": lambda size: size.bit_length() - 1,
        "warpgroup_mma": start,
        "warpgroup_mma_wait": wait,
        "fence_async_shared": nobody,
    }
