"""The law of tolerance, the lab's check of results: an error may be at most about twice that of torch's own op.

There are no absolute tolerances. The oracle is the op's reference, run in float64. For each output and each gradient,

    error <= 2 x max(torch's error, change of the oracle when the inputs move half an ulp) + eps/2 x norm

must hold for the whole tensor, its worst row and its worst column. The scale of the result (its projection on the
oracle) may be off by at most twice as much as torch's or the moved oracle's, plus eps/16 + eps/sqrt(n). Non-finite
values must be in the same places. Rows are along the last dimension, columns run over all rows. With few elements the
error of one run is luck, so torch's error is then the largest of several runs, on inputs next to the given ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.op import Op, Piece, RidgelineError, tensors_of

CHUNK = 1 << 24
SLICED = 1 << 31
FEW = 16
SMALL, RUNS = 1 << 18, 4  # with at most SMALL elements in each tensor, torch runs RUNS times
HOPELESS = 1e12  # stands for infinity, which JSON lacks
Result = tuple[list[Tensor], list[Tensor | None]]


@dataclass(frozen=True)
class Finding:
    """The worst place of one tensor: its error and the allowed error there, in the tensor's own unit."""

    error: float
    allowed: float
    where: str

    @property
    def worst(self) -> float:
        """Returns the error divided by the allowed error: above 1 is wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.error < self.allowed * HOPELESS else HOPELESS

    def row(self) -> dict[str, Any]:
        return {"error": min(self.error, HOPELESS), "allowed": self.allowed, "worst": self.worst, "where": self.where}


@dataclass
class Verdict:
    """The findings on an implementation's outputs and gradients, by name."""

    outputs: dict[str, Finding] = field(default_factory=dict)
    grads: dict[str, Finding] = field(default_factory=dict)

    def findings(self, direction: str | None = None) -> dict[str, Finding]:
        """Returns the findings of a direction, "forward" or "backward" (default: both)."""
        return {"forward": self.outputs, "backward": self.grads}.get(direction or "", self.outputs | self.grads)

    def worst(self, direction: str | None = None) -> float:
        """Returns the largest ratio of error to allowed error."""
        return max((f.worst for f in self.findings(direction).values()), default=0.0)

    @property
    def ok(self) -> bool:
        return self.worst() <= 1

    def reason(self, direction: str | None = None) -> str | None:
        """Returns a sentence on the worst finding, or None if all errors are allowed."""
        if self.worst(direction) <= 1:
            return None
        name, finding = max(self.findings(direction).items(), key=lambda item: item[1].worst)
        places = f"in {finding.error:.0f} places"
        return {
            "form": f"{name} has another shape or dtype than torch's",
            "nonfinite": f"{name} is wrongly finite, or wrongly not finite, {places}",
            "unequal": f"{name} has a wrong value {places}",
        }.get(finding.where) or f"{name} has {finding.worst:.3g} times the allowed error ({finding.where})"


def _codes(x: Tensor) -> Tensor:
    """Returns a code for each element: 0 finite, 1 NaN, 2 infinity, 3 minus infinity."""
    return x.isnan().to(torch.int8) + 2 * x.isposinf().to(torch.int8) + 3 * x.isneginf().to(torch.int8)


def _plane(x: Tensor) -> Tensor:
    """Returns a tensor as a matrix: rows along the last dimension, all others flattened. A vector is one row."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of a matrix that are small enough for float64 copies."""
    width = max(1, min(columns, CHUNK))
    height = max(1, CHUNK // width)
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


@dataclass
class _Errors:
    """Norms of the difference to the oracle, per row and per column, and deviations of the scale.

    scale: the deviation of the projection on the oracle.
    wander: the scale deviation to expect if the rows' own deviations were independent. One rounding can move a whole
        row, such as that of the sum by which it is divided.
    along: the projection's difference, not yet divided by the oracle's square."""

    row: Tensor
    column: Tensor
    scale: float = 0.0
    wander: float = 0.0
    along: float = 0.0

    @property
    def whole(self) -> float:
        return self.row.square().sum().sqrt().item()

    def worst(self, other: _Errors) -> _Errors:
        row, column = torch.maximum(self.row, other.row), torch.maximum(self.column, other.column)
        return _Errors(row, column, max(self.scale, other.scale), max(self.wander, other.wander), self.along)


@dataclass
class _Projections:
    """What a tensor's scale and the deviation allowed to it are made of; those of its pieces add up."""

    found: float = 0.0
    along: tuple[float, ...] = (0.0, 0.0)  # torch's and the moved oracle's
    spread: tuple[float, ...] = (0.0, 0.0)  # the squares of their rows'
    square: float = 0.0
    count: int = 0

    def plus(self, other: _Projections) -> _Projections:
        along, spread = (
            tuple(map(sum, zip(*some, strict=True)))
            for some in ((self.along, other.along), (self.spread, other.spread))
        )
        return _Projections(
            self.found + other.found, along, spread, self.square + other.square, self.count + other.count
        )

    def finding(self, eps: float) -> Finding:
        square = self.square or 1.0
        drifts = [abs(a) / square for a in self.along] + [math.sqrt(s) / square for s in self.spread]
        return Finding(abs(self.found) / square, _allowed_scale(eps, self.count, *drifts), "scale")


def _allowed_scale(eps: float, count: int, *drifts: float) -> float:
    """drifts: of torch and of the half ulps. These are one draw, whose scale may be near 0 by luck; so `wander`, what
    another draw may have, is among them."""
    return 2 * max(drifts) + eps / 16 + eps / math.sqrt(max(count, 1))


class Standard:
    """One tensor of the oracle, and the errors allowed around it. projections: of the tensor that was judged last."""

    def __init__(self, oracle: Tensor, dtype: torch.dtype, residue: float = 0.0):
        self.given = dtype
        # 8-bit floats are codes: like integers, they must be equal.
        if dtype.itemsize == 1 and dtype.is_floating_point:
            oracle, dtype = oracle.to(dtype).view(torch.uint8), torch.uint8
        if dtype.is_floating_point and oracle.dtype != torch.float64:
            raise RidgelineError(f"the reference must return float64 for float64 inputs, but returned {oracle.dtype}")
        self.shape, self.dtype, self.oracle, self.residue = oracle.shape, dtype, _plane(oracle), residue
        self.theirs: Tensor | None = None
        self.projections = _Projections()
        if dtype.is_floating_point:
            self.eps = torch.finfo(dtype).eps
            self.norm = self._reduce(None)

    def _reduce(self, x: Tensor | None) -> _Errors:
        """Returns the norms of x minus the oracle, or of the oracle if x is None; non-finite elements count as 0."""
        rows, columns = self.oracle.shape
        precise = torch.float64 if max(rows, columns) < 1 << 26 else torch.float32
        row, column = (self.oracle.new_zeros(n, dtype=precise) for n in (rows, columns))
        along = self.oracle.new_zeros(rows, dtype=precise)
        for block in _blocks(rows, columns):
            oracle = self.oracle[block]
            difference = oracle if x is None else x[block].double() - oracle
            if not difference.isfinite().all():
                finite = difference.isfinite()
                difference, oracle = difference.where(finite, 0.0), oracle.where(finite, 0.0)
            square = difference.square()
            row[block[0]] += square.sum(1)
            column[block[1]] += square.sum(0)
            along[block[0]] += (difference * oracle).sum(1)
        errors = _Errors(row.sqrt_(), column.sqrt_())
        if x is not None and self.norm.whole:
            errors.along = along.sum().item()
            errors.scale = abs(errors.along) / self.norm.whole**2
            errors.wander = along.norm().item() / self.norm.whole**2
        return errors

    def allow(self, theirs: Tensor, moved: Tensor, nearby: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Sets the allowed errors, from torch's result and the oracle's on inputs moved by half an ulp.

        nearby: (torch's result, the oracle's) for other inputs."""
        if not self.dtype.is_floating_point or not self.oracle.numel():
            return
        own, change = self._reduce(_plane(theirs)), self._reduce(_plane(moved))
        for another, exact in nearby:
            own = own.worst(self._reduce(self.oracle + (_plane(another).double() - _plane(exact))))
        rows, columns = self.oracle.shape
        self.row = self._allowed(torch.maximum(own.row, change.row), self.norm.row, columns)
        self.column = self._allowed(torch.maximum(own.column, change.column), self.norm.column, rows)
        self.whole = 2 * max(own.whole, change.whole) + self.eps / 2 * self.norm.whole
        drifts, square = (own.scale, own.wander, change.scale, change.wander), self.norm.whole**2
        self.scale = _allowed_scale(self.eps, self.oracle.numel(), *drifts)
        spread = tuple([(e.wander * square) ** 2 for e in (own, change)])
        self.projections = _Projections(0.0, (own.along, change.along), spread, square, self.oracle.numel())
        if not theirs.isfinite().all():
            self.theirs = _codes(_plane(theirs))

    def _allowed(self, base: Tensor, norm: Tensor, length: int) -> Tensor:
        """Returns the allowed error of each row (or column).

        It comes from the worst deviation of torch and of the half ulp in any row, in size or relative to the row's
        norm. The smaller of both counts, so that neither one large row nor one that cancels excuses the others. Rows of
        few elements go by size alone, since the relative error of a single element is luck. A row that is zero or
        nearly so may hold the op's `residue`: what sums in float32 leave when they cancel.
        """
        floor = self.residue * norm.max()
        worst = base.max()
        if length >= FEW:
            worst = torch.minimum(worst, (base / norm).where(norm > 0, 0.0).max() * norm)
        allowed = 2 * torch.maximum(base, worst) + self.eps / 2 * norm
        return torch.where(norm <= floor, allowed.clamp(min=floor), allowed)

    def judge(self, x: Tensor) -> Finding:
        """Returns the worst finding on x."""
        if x.shape != self.shape or x.dtype != self.given:
            return Finding(1.0, 0.0, "form")
        x = x.view(self.dtype) if self.dtype == torch.uint8 else x
        if not x.numel():
            return Finding(0.0, 0.0, "whole")
        x = _plane(x.detach())
        if not self.dtype.is_floating_point:
            return Finding(float((x != self.oracle).sum()), 0.0, "unequal")
        if misplaced := self._misplaced(x):
            return Finding(float(misplaced), 0.0, "nonfinite")
        errors = self._reduce(x)
        self.projections.found = errors.along
        findings = [
            self._worst(errors.row, self.row, "row"),
            self._worst(errors.column, self.column, "column"),
            Finding(errors.whole, self.whole, "whole"),
            Finding(errors.scale, self.scale, "scale"),
        ]
        return max(findings, key=lambda f: f.worst)

    def _misplaced(self, x: Tensor) -> int:
        """Returns the number of elements that are (non-)finite unlike both the oracle, in this dtype, and torch."""
        count = 0
        for block in _blocks(*self.oracle.shape):
            mine = x[block]
            if self.theirs is None and mine.isfinite().all():
                continue
            codes = _codes(mine)
            wrong = codes != _codes(self.oracle[block].to(self.dtype))
            if self.theirs is not None:
                wrong &= codes != self.theirs[block]
            count += int(wrong.sum())
        return count

    @staticmethod
    def _worst(errors: Tensor, allowed: Tensor, where: str) -> Finding:
        index = (errors / allowed).where(errors > 0, 0.0).argmax()
        return Finding(errors[index].item(), allowed[index].item(), where)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def leaves(args: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among the arguments that require gradients."""
    return [a for a in tensors_of(args) if a.requires_grad]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns a floating-point argument cast to dtype, as a new leaf; an argument that is a dtype becomes this one.

    Dtypes of 8-bit numbers stay: they name codes."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return (
            value.detach()
            .to(dtype, copy=True, memory_format=torch.contiguous_format)
            .requires_grad_(value.requires_grad)
        )
    if isinstance(value, Tensor) and value.is_complex():
        return value.detach().to(dtype.to_complex(), copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, list):
        return [_cast(v, dtype) for v in value]
    wide = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1
    return dtype if wide else value


def real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as real numbers, real and imaginary parts alternating."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor


def _widen(value: Any) -> Any:
    """Returns a half-precision argument cast to float32."""
    if isinstance(value, list):
        return [_widen(v) for v in value]
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value


def _move(exact: Tensor, eps: float, dice: torch.Generator) -> None:
    """Moves each element of a float64 tensor up or down by half an ulp of the dtype with this eps, in place."""
    with torch.no_grad():
        for piece in exact.view(-1).split(CHUNK):
            half = piece.abs().log2_().floor_().exp2_().mul_(eps / 2)  # 2**floor(log2 0) is 0
            up = torch.empty_like(piece).bernoulli_(0.5, generator=dice)
            piece += torch.where(piece.isfinite(), half * (2 * up - 1), 0.0)


@contextmanager
def _full_products() -> Iterator[None]:
    """Lets cuDNN, whose own switch is on by default, use TF32 only if `torch.get_float32_matmul_precision` does."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before and torch.get_float32_matmul_precision() != "highest"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Law:
    """The oracle of one call, computed once; `judge` checks implementations against it.

    args, kwargs: the public arguments in the dtype under test. Those that require gradients get them, for a random
        incoming gradient.
    incoming: the incoming gradients, one for each output or None; made if not given.
    If a tensor has more than 2**31 elements, the pieces that the op says make up the call (`Op.pieces`) are checked,
        each by a law of its own, made when results are judged: then float64 copies of one piece alone are in memory.
        If the op says none, only three slices along the first dimension are checked, which the op must not mix.
    """

    def __init__(
        self, op: Op, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, seed: int = 1,
        incoming: list[Tensor | None] | None = None
    ):  # fmt: skip
        self.op, self.args, self.kwargs, self.seed = op, op.fresh(args), dict(kwargs or {}), seed
        self.dice = torch.Generator(tensors_of(args)[0].device).manual_seed(seed)
        self.names = list(inspect.signature(op.reference).parameters)
        self.grad_names = [
            f"grad_{name}"
            for name, a in zip(self.names, self.args, strict=False)
            if isinstance(a, Tensor) and a.requires_grad
        ]
        self.incoming: list[Tensor | None] = incoming or []
        self.rows: Tensor | None = None
        self.outputs: list[Standard] = []
        self.grads: list[Standard | None] = []
        self.pieces: list[Piece] | None = self._pieces()
        if self.pieces is not None:
            self.incoming = incoming or self._random_all()
        else:
            self._allow(incoming)

    def _allow(self, incoming: list[Tensor | None] | None) -> None:
        """Makes the oracle, and the errors allowed around it."""
        op, self.rows = self.op, self._slices()
        small = [self._narrow(a) for a in self.args]
        theirs = self._torch(small, incoming)
        exact = self._oracle(small)
        self.outputs = [Standard(e, t.dtype, op.residue) for e, t in zip(exact[0], theirs[0], strict=True)]
        self.grads = [
            None if e is None else Standard(e, a.dtype, op.residue)
            for e, a in zip(exact[1], leaves(small), strict=False)
        ]
        del exact
        moved = self._oracle(small, move=True)
        few = max(t.numel() for t in [*tensors_of(small), *theirs[0]]) <= SMALL
        nearby = [self._nearby(small) for _ in range(RUNS - 1 if few else 0)]
        standards, own, changed = self.outputs + self.grads, theirs[0] + theirs[1], moved[0] + moved[1]
        for k, (standard, one, change) in enumerate(zip(standards, own, changed, strict=True)):
            if standard is not None and one is not None and change is not None:
                standard.allow(one, change, [(another[k], exact[k]) for another, exact in nearby])
        self.shared = [
            self.rows is not None and a.shape == s.shape for a, s in zip(leaves(self.args), leaves(small), strict=True)
        ]

    @classmethod
    def of(cls, op: Op, case: str, dtype: str, device: str = "cpu", seed: int = 0) -> Law:
        """Returns the law for one of the op's cases."""
        return cls(op, *op.case(case).make(dtype, device, seed), seed=seed + 1)

    def _pieces(self) -> list[Piece] | None:
        """Returns the calls that make up this one if it is too large to check at once, and if the op says some."""
        if self.op.pieces is None or max(t.numel() for t in tensors_of(self.args)) <= SLICED:
            return None
        made = list(self.op.pieces(*self.args, **self.kwargs))
        return made if len(made) > 1 else None

    def _random_all(self) -> list[Tensor | None]:
        """Returns random incoming gradients for outputs whose shapes the reference tells without data."""

        def bare(value: Any) -> Any:
            return value.detach().to("meta") if isinstance(value, Tensor) else value

        given = [bare(a) for a in self.args], {k: bare(v) for k, v in self.kwargs.items()}
        like = as_tuple(self.op.reference(*given[0], **given[1]))
        device = tensors_of(self.args)[0].device
        made = [torch.randn(o.shape, device=device, generator=self.dice).to(o.dtype) for o in like]
        return list(made) if leaves(self.args) else [None for _ in made]

    def _piecewise(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Verdict:
        """Judges each piece of the results by a law of its own, and the scale over all of them; the worst finding of
        each tensor is the verdict's."""
        scales: dict[str, _Projections] = {}
        eps: dict[str, float] = {}
        verdict, wrong = Verdict(), Finding(1.0, 0.0, "form")
        wanted, given = [*self.incoming, *leaves(self.args)[: len(grads)]], [*outputs, *grads]
        if any([w is not None and g is not None and w.shape != g.shape for w, g in zip(wanted, given, strict=True)]):
            return Verdict({"out": wrong})
        for n, piece in enumerate(self.pieces or ()):

            def part(name: str, value: Any, piece: Piece = piece) -> Any:
                if name in piece.values:
                    return piece.values[name]
                if not isinstance(value, Tensor) or name not in piece.slices:
                    return value
                return value.detach()[piece.slices[name]].requires_grad_(value.requires_grad)

            args = [part(name, a) for name, a in zip(self.names, self.args, strict=False)]
            kwargs = {name: part(name, a) for name, a in self.kwargs.items()}
            law = Law(self.op, args, kwargs, seed=self.seed + n, incoming=[part("out", g) for g in self.incoming])
            theirs = [part(name.removeprefix("grad_"), g) for name, g in zip(self.grad_names, grads, strict=False)]
            found = law.judge([part("out", o) for o in outputs], theirs)
            for mine, one, standards in (
                (verdict.outputs, found.outputs, law.outputs),
                (verdict.grads, found.grads, law.grads),
            ):
                mine.update({k: max(f, mine.get(k, f), key=lambda f: f.worst) for k, f in one.items()})
                for name, standard in zip(one, standards, strict=False):
                    if standard is not None and standard.dtype.is_floating_point:
                        sums = scales.get(name, _Projections()).plus(standard.projections)
                        scales[name], eps[name] = sums, standard.eps
        for mine in (verdict.outputs, verdict.grads):
            for name in scales.keys() & mine.keys():
                mine[name] = max(mine[name], scales[name].finding(eps[name]), key=lambda f: f.worst)
        return verdict

    def _slices(self) -> Tensor | None:
        """Returns the indices of the rows to check if a tensor is too large to check whole, else None."""
        tensors = tensors_of(self.args)
        if max(t.numel() for t in tensors) <= SLICED:
            return None
        self.length = tensors[0].shape[0]
        some = max(1, min(self.length // 3, (1 << 22) * self.length // tensors[0].numel()))
        starts = (0, (self.length - some) // 2, self.length - some)
        return torch.cat([torch.arange(start, start + some, device=tensors[0].device) for start in starts])

    def _narrow(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._narrow(v) for v in value]
        if self.rows is None or not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.length:
            return value
        return value.detach()[self.rows].requires_grad_(value.requires_grad)

    def _nearby(self, small: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the outputs and gradients of torch and of the oracle, for inputs an ulp from the given ones."""
        near = [self._near(a) for a in small]
        theirs, exact = self._torch(near, [self._narrow(g) for g in self.incoming]), self._oracle(near)
        return theirs[0] + theirs[1], exact[0] + exact[1]

    def _near(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._near(v) for v in value]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.element_size() == 1:
            return value
        exact = value.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        _move(exact, 2 * torch.finfo(value.dtype).eps, self.dice)
        return torch.empty_like(value).copy_(exact).detach().requires_grad_(value.requires_grad)

    def _torch(self, small: list[Any], incoming: list[Any] | None = None) -> Result:
        """Returns torch's result in this dtype: that of the first of the op's `standards` that supports the call.

        If there is none, the reference runs with float32 inside. Incoming gradients are made if none are given."""
        for name in [n for n in self.op.standards if n in self.op.implementations]:
            try:
                return self._gradients(self.op.implementations[name], self.op.fresh(small), self.kwargs, incoming)
            except RidgelineError:  # the next one may support the call
                continue
        dtypes = [o.dtype for o in self._results(self.op.reference, self.op.fresh(small), self.kwargs)]

        def inside(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            found = self._results(self.op.reference, [_widen(a) for a in self.op.fresh(args)], kwargs)
            return tuple(o.to(d) for o, d in zip(found, dtypes, strict=True))

        return self._gradients(inside, small, self.kwargs, incoming, mutates=False)

    def _oracle(self, small: list[Any], move: bool = False) -> Result:
        """Returns the reference's result in float64. move: move all inputs and incoming gradients by half an ulp."""
        args = [_cast(a, torch.float64) for a in small]
        kwargs = {k: _cast(v, torch.float64) for k, v in self.kwargs.items()}
        incoming = [_cast(self._narrow(g), torch.float64) for g in self.incoming]
        if move:
            for exact, given in zip(tensors_of([*args, *incoming]), tensors_of([*small, *self.incoming]), strict=True):
                # 8-bit codes are exact.
                if (given.is_floating_point() or given.is_complex()) and given.element_size() > 1:
                    _move(real(exact.detach()), torch.finfo(given.dtype).eps, self.dice)
        return self._gradients(self.op.reference, args, kwargs, incoming)

    def _results(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], mutates: bool = True
    ) -> tuple[Tensor, ...]:
        """Returns the results of a call, followed by the arguments that it changed in place."""
        returned = call(*args, **kwargs)
        changed = tensors_of(args[n] for n in self.op.mutates) if mutates else []
        return tuple(map(real, (*as_tuple(returned), *changed)))

    def _gradients(
        self,
        call: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        incoming: list[Any] | None = None,
        mutates: bool = True,
    ) -> Result:
        """Returns outputs, and gradients of the arguments that require them. Makes missing incoming gradients."""
        with _full_products():
            return self._found(call, args, kwargs, incoming, mutates)

    def _found(
        self, call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], incoming: list[Any] | None,
        mutates: bool
    ) -> Result:  # fmt: skip
        outputs = self._results(call, args, kwargs, mutates)
        if incoming is None:
            differentiable = not self.op.mutates and bool(leaves(args))
            self.incoming = [self._random(o) if differentiable and o.is_floating_point() else None for o in outputs]
            incoming = [self._narrow(g) for g in self.incoming]
        pairs = [
            (o, g.to(o.dtype)) for o, g in zip(outputs, incoming, strict=True) if g is not None and o.requires_grad
        ]
        wanted = leaves(args)
        grads: list[Tensor | None] = []
        if pairs and wanted:
            grads = list(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return [o.detach() for o in outputs], grads

    def _random(self, output: Tensor) -> Tensor:
        """Returns a random incoming gradient for an output; for the whole tensor if the output holds slices only."""
        shape = list(output.shape)
        if self.rows is not None and shape and shape[0] == len(self.rows):
            shape[0] = self.length
        return torch.randn(shape, device=output.device, generator=self.dice).to(output.dtype)

    def run(self, call: Callable[..., Any], backward: bool = True) -> Result:
        """Calls an implementation on the arguments and returns its outputs and, with `backward`, gradients."""
        args = self.op.fresh(self.args)
        if backward:
            return self._gradients(call, args, self.kwargs, self.incoming)
        with torch.no_grad():
            return list(self._results(call, args, self.kwargs)), []

    def forget(self) -> None:
        """Frees the oracle's memory; arguments and incoming gradients stay."""
        self.outputs.clear()
        self.grads.clear()

    def judge(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] = ()) -> Verdict:
        """Checks outputs and gradients, and returns the findings."""
        if self.pieces is not None:
            return self._piecewise(outputs, grads)
        names = ["out"] if len(self.outputs) == 1 else [f"out{i}" for i in range(len(self.outputs))]
        verdict = Verdict({n: s.judge(self._narrow(o)) for n, s, o in zip(names, self.outputs, outputs, strict=True)})
        if grads:
            for name, standard, grad, shared in zip(self.grad_names, self.grads, grads, self.shared, strict=True):
                if shared:  # slices do not determine the gradient of an input that all rows share
                    continue
                if standard is None or grad is None:
                    missing = (standard is None) != (grad is None)
                    verdict.grads[name] = Finding(float(missing), 0.0, "form")
                else:
                    verdict.grads[name] = standard.judge(self._narrow(grad))
        return verdict
