"""Writes the Python functions on the quick path of a call: straight lines, without loops or packed arguments.

`looked` remembers what a public function found in its arguments (`select.by_kind`), `call` is the front of a registered
op (`boundary.kernel_op`), and `plan` repeats a launcher (`replay.Recorder`). Arguments are t0, t1, ... for tensors and
a0, a1, ... for the rest. A call whose tensors pass the guard of an earlier one (`replay.Guarded`) goes no further than
the loop; others are told apart by a key of all facts. For an op of one tensor and one number whose launcher allocates
its result and starts one kernel, the functions are:

    def looked(t0, a0):
        if compiling(): return look(t0, a0)
        try:
            near = t0.shape, t0.dtype, a0, (type(a0), *map(type, a0)) if isinstance(a0, tuple) else type(a0), autocast()
            some = quick(near, none)
        except (AttributeError, RuntimeError, TypeError):
            some = none
        if devices.stand_in is None:
            for fits, check, found in some:
                if fits(check, t0): return found
        if type(t0) not in own: return look(t0, a0)
        if not t0.is_cuda or devices.stand_in is not None: return look(t0, a0)
        try:
            key = (
                t0.shape, t0.dtype, t0.layout, t0.get_device(),
                a0, (type(a0), *map(type, a0)) if isinstance(a0, tuple) else type(a0),
                autocast(),
            )
            found = get(key)
        except (RuntimeError, TypeError):
            return look(t0, a0)
        if found is None: return learn(key, t0, a0)
        return remember(near, found, t0)

    def call(t0, a0, sure=None):
        seen = False
        near = t0.shape, t0.dtype, tuning.version, a0
        try:
            some = quick(near, none)
        except TypeError:
            some = none
        if not seen:
            for plan, check in some:
                m = plan(check, t0)
                if m is missed: continue
                if sure is not None: sure.keep((tuning.version, a0,), plan)
                return m
        i = t0.get_device()
        if i < 0 or i != current(): return launcher(t0, a0)
        k0 = t0.shape, t0.stride(), t0.dtype, t0.data_ptr() & 15, t0.get_device()
        key = k0, tuning.version, a0
        plan = found(key)
        if plan is None: return learn(key, t0, a0)
        remember(near, plan, t0)
        return plan(always, t0)

    def plan(check, t0):
        if not check(t0): return missed
        p0 = t0.data_ptr()
        if current() != 0 or p0 & 15: return missed
        m0 = empty(n8, n9, n10); p1 = m0.data_ptr()
        s = stream(0)
        n12(s, (p1, p0, n11,))
        return m0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ridgeline.cuda import MOVING
from ridgeline.op import OWN


class Loose(int):
    """An argument, such as a seed, that is not part of the kind of a call: a plan takes its value at each call."""

    name: str

    @classmethod
    def of(cls, value: int, name: str) -> Loose:
        loose = cls(value)
        loose.name = name
        return loose


class Seen(NamedTuple):
    """A tensor argument of a torch operation: the number of a known tensor or, with a shape, a view of that tensor."""

    number: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


class Step(NamedTuple):
    """One step of a launcher: a kernel's start by a `cuda.Starter`, or a torch operation (without a grid)."""

    function: Any
    grid: tuple[int, int, int] | None
    sources: list[Any]
    named: dict[str, Any]


def function(name: str, parameters: Sequence[str], lines: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function compiled from these lines, which are not indented, over these globals.

    Its attribute `source` is its text."""
    text = "\n".join([f"def {name}({', '.join(parameters)}):", *("    " + line for line in lines)])
    exec(text, names)
    made = names[name]
    made.source = text
    return made


def _told_apart(a: str, annotation: str) -> str:
    """Returns the parts of the key for an argument. 1, 1.0 and True are equal, but not of one kind.

    Only arguments that the annotation allows are remembered, so a string or a dtype is told from others by its value,
    and a number by its type, too. Any other argument may be a tuple of numbers."""
    allowed = {part.strip() for part in annotation.split("|")} - {"None"}
    if allowed and allowed <= {"str", "torch.dtype"}:
        return a
    if allowed and allowed <= {"str", "torch.dtype", "bool", "int", "float"}:
        return f"{a}, type({a})"
    return f"{a}, (type({a}), *map(type, {a})) if isinstance({a}, tuple) else type({a})"


def looked(
    leading: int, optional: int, others: Sequence[str], strides: bool, gradients: bool, names: dict[str, Any]
) -> Callable[..., Any]:
    """Returns the function that looks a call's kind up before its arguments are examined.

    optional: how many of the `leading` tensors, the last ones, may be None. others: the annotations of the other
    arguments, or "". strides: whether the tensors' are part of the kind. gradients: whether it is part of it, too,
    if gradients are on and which tensors require them.
    names: look, learn, get, quick, remember, own, devices, compiling, autocast and enabled."""
    tensors, rest = [f"t{n}" for n in range(leading)], [f"a{n}" for n in range(len(others))]
    args, required = ", ".join([*tensors, *rest]), leading - optional
    facts = "{t}.shape, {t}.dtype, {t}.layout, {t}.get_device()" + (", {t}.stride()" if strides else "")
    facts += ", {t}.requires_grad" if gradients else ""
    seen = [facts.format(t=t) for t in tensors[:required]]
    seen += [f"None if {t} is None else ({facts.format(t=t)})" for t in tensors[required:]]
    told = [
        *[_told_apart(a, annotation) for a, annotation in zip(rest, others, strict=True)],
        "autocast()",
    ]  # the GPU's
    told += ["enabled()"] if gradients else []
    odd = [f"type({t}) not in own" for t in tensors[:required]]
    odd += [f"({t} is not None and type({t}) not in own)" for t in tensors[required:]]
    lines = [
        f"if compiling(): return look({args})",
        "try:",
        f"    near = t0.shape, t0.dtype, {', '.join(told)}",
        "    some = quick(near, none)",
        "except (AttributeError, RuntimeError, TypeError):",  # nested tensors have no shape, lists no hash
        "    some = none",
        "if devices.stand_in is None:",
        "    for fits, check, found in some:",
        f"        if fits(check, {', '.join(tensors)}): return found",
        f"if {' or '.join(odd)}: return look({args})",
        f"if not t0.is_cuda or devices.stand_in is not None: return look({args})",
        "try:",
        "    key = (",
        *(f"        {part}," for part in [*seen, *told]),
        "    )",
        "    found = get(key)",
        "except (RuntimeError, TypeError):",
        f"    return look({args})",
        f"if found is None: return learn(key, {args})",
        f"return remember(near, found, {', '.join(tensors)})",
    ]
    return function("looked", [*tensors, *rest], lines, names | {"none": ()})


@cache
def fitting(there: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns a function of a guard's check and tensors: whether those that are `there` pass it, and no others are."""
    tensors = [f"t{n}" for n in range(len(there))]
    return function("fits", ["check", *tensors], [f"return {_fits(there)}"], {"own": OWN})


def _fits(there: Sequence[bool]) -> str:
    """A nested tensor, whose sizes torch's check would ask for and end the process, does not reach it; the first
    tensor's shape has been read."""
    first = [f"t{n} is None and " for n, given in enumerate(there) if not given]
    first += [f"t{n}.__class__ in own and not t{n}.is_nested and " for n, given in enumerate(there) if given and n]
    return f"{''.join(first)}check({', '.join(f't{n}' for n, given in enumerate(there) if given)})"


class Before(NamedTuple):
    """Lines of a front: those that come first, and those before a kind is looked up by all its facts; they may return.

    The first ones set `seen` if the launcher must run. straight: whether a call that has passed the guard of a public
    function may take its plan at once; without it, none may."""

    all: Sequence[str] = ()
    unknown: Sequence[str] = ()
    straight: str = ""


def interceptions(leading: int) -> Before:
    """Returns lines of a registered op's front: what hands a call to torch's dispatcher, or to the launcher.

    Their globals: compiling, registered, forward, no_tangents, own, modes, transforms, through, observers, devices and
    tuning."""
    # Something traces, intercepts or transforms torch's operations, or the dispatcher must resolve a lazy negation or
    # conjugation.
    odd = "(t{n} is not None and (type(t{n}) not in own or t{n}.is_meta or t{n}.is_neg() or t{n}.is_conj()))"
    watched = [odd.replace("{n}", str(n)) for n in range(leading)]
    first = [
        "if compiling(): return registered({args})",
        "if forward._current_level >= 0: no_tangents({args})",
        "if modes() or transforms(): return through({args})",
        "seen = observers or devices.stand_in is not None or tuning.current_listener is not None",
    ]
    unknown = [f"if {' or '.join(watched)}: return through({{args}})", "if seen: return launcher({args})"]
    odd = "modes() or transforms() or observers or tuning.current_listener is not None or forward._current_level >= 0"
    return Before(first, unknown, f"not ({odd} or devices.stand_in is not None)")


def front(
    leading: int,
    count: int,
    loose: Sequence[str],
    before: Before,
    failed: str | None,
    names: dict[str, Any],
) -> Callable[..., Any]:
    """Returns the function of an op's `count` arguments that repeats a plan or runs the launcher.

    loose: the arguments that are not part of the kind. The function also takes `sure`, a `replay.Sure` or None.
    failed: a line to run if anything after the first line raises a RuntimeError, before that is raised again.
    names: launcher, learn, found, quick, remember, tuning, current and what `before` and `failed` use."""
    tensors = [f"t{n}" for n in range(leading)]
    args = [*tensors, *(f"a{n}" for n in range(count - leading))]
    whole, kept = ", ".join(args), [a for a in args[leading:] if a not in loose]
    given, facts = ", ".join([*tensors, *loose]), ["tuning.version", *kept]
    lines = [line.format(args=whole) for line in before.all or ["seen = False"]]
    lines += [
        f"near = t0.shape, t0.dtype, {', '.join(facts)}",
        "try:",
        "    some = quick(near, none)",
        "except TypeError:",  # symbolic sizes have no hash
        "    some = none",
        "if not seen:",
        "    for plan, check in some:",
        f"        m = plan(check, {given})",
        "        if m is missed: continue",
        f"        if sure is not None: sure.keep(({', '.join(facts)},), plan)",
        "        return m",
    ]
    lines += [line.format(args=whole) for line in before.unknown]
    lines += ["i = t0.get_device()", f"if i < 0 or i != current(): return launcher({whole})"]
    for n, t in enumerate(tensors):
        kind = f"k{n} = {t}.shape, {t}.stride(), {t}.dtype, {t}.data_ptr() & 15, {t}.get_device()"
        lines += [f"k{n} = None if {t} is None else ({kind[5:]})" if n else kind]
    lines += [
        f"key = {', '.join([f'k{n}' for n in range(leading)] + facts)}",
        "plan = found(key)",
        f"if plan is None: return learn(key, {whole})",
        f"remember(near, plan, {', '.join(tensors)})",
        f"return plan(always, {given})",
    ]
    if failed is not None:
        last = failed.format(tensors=", ".join(tensors))
        lines[1:] = ["try:", *["    " + line for line in lines[1:]], "except RuntimeError:", "    " + last, "    raise"]
    if before.straight:
        lines[:0] = [
            "if sure is not None:",
            "    kept = sure.kept",  # read once: another thread may replace it
            f"    if kept[0] == ({', '.join(facts)},) and {before.straight}:",
            f"        m = kept[1]({given})",
            "        if m is not missed: return m",
        ]
    return function("call", [*args, "sure=None"], lines, names | {"none": (), "missed": MISSED, "always": always})


MISSED = object()  # what a plan returns for a call that is not of its kind


def always(*_: Any) -> bool:
    """The check of a plan for a call that is known to be of its kind."""
    return True


def _bytes(kind: tuple[Any, ...]) -> int:
    """Bytes from the first to the last element of an allocation: (shape, stride, dtype)."""
    shape, stride, dtype = kind
    return (sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)]) + 1) * dtype.itemsize if all(shape) else 0


class PlanWriter:
    """Writes the function that repeats recorded steps.

    given: for each of the known tensors that are arguments, its address modulo 16, or None if it is not there.
    index: of the GPU. kinds: shape, stride and dtype of each allocation after them.
    names: current, empty, stream, encoded, cleared and view."""

    SMALL, APART = 1 << 18, 512  # bytes of temporaries that share one allocation, and between them as in torch's

    def __init__(
        self,
        given: Sequence[int | None],
        index: int,
        kinds: Sequence[tuple[Any, ...]],
        loose: Sequence[str],
        names: dict[str, Any],
    ):
        self.aligned, self.given, self.index, self.kinds, self.loose = given, len(given), index, kinds, loose
        self.names = names | {"missed": MISSED, "own": OWN}
        self.views: dict[Seen, str] = {}
        self.lines: list[str] = []

    def plan(self, steps: Sequence[Step], results: Sequence[int], several: bool) -> Callable[..., Any]:
        """results: the numbers of the allocations that the launcher returned. several: whether as a tuple."""
        seen = [s for step in steps for s in (*step.sources, *step.named.values()) if isinstance(s, tuple)]
        used = {s[0] - self.given for s in seen} | set(results)  # not empty tensors
        clears = [self.clears(step) for step in steps]
        torchs = [step for step, size in zip(steps, clears, strict=True) if not (step.grid or size)]
        there = [at is not None for at in self.aligned]
        fits = _fits(there)
        self.lines = [f"if not {f'({fits})' if ' and ' in fits else fits}: return missed"]
        self.lines += [f"p{n} = t{n}.data_ptr()" for n, at in enumerate(self.aligned) if at is not None]
        odd = [f"p{n} & 15 != {at}" for n, at in enumerate(self.aligned) if at]
        even = [f"p{n}" for n, at in enumerate(self.aligned) if at == 0]
        odd += [f"({' | '.join(even)}) & 15" if len(even) > 1 else f"{even[0]} & 15"] if even else []
        self.lines += [f"if current() != {self.index} or {' or '.join(odd)}: return missed"]
        tensors = [s for step in torchs for s in (*step.sources, *step.named.values()) if type(s) is Seen]
        self.allocate(used, {s.number - self.given for s in tensors} | set(results))
        self.lines += [f"s = stream({self.index})"] if any(step.grid for step in steps) or any(clears) else []
        for step, size in zip(steps, clears, strict=True):
            if step.grid:
                self.lines.append(self.start(step))
                continue
            if size:
                self.lines.append(f"cleared(p{step.sources[0].number}, {size}, {self.index}, s)")
                continue
            named = [f"{k}={self.operand(v)}" for k, v in step.named.items()]
            taken = ", ".join([*map(self.operand, step.sources), *named])
            self.lines.append(f"{self.name(step.function)}({taken})")
        returned = ", ".join(f"m{n}" for n in results)
        self.lines.append(f"return ({returned},)" if several else f"return {returned}")
        parameters = [*[f"t{n}" for n in range(self.given)], *self.loose]
        made: Any = function("plan", ["check", *parameters], self.lines, self.names)
        made.sure = cache(lambda: function("sure", parameters, self.lines[1:], self.names))
        return made

    def allocate(self, used: set[int], whole: set[int]) -> None:
        """Writes the allocations that are used. Small ones that no torch operation and no caller sees share one."""
        sizes = [_bytes(kind) for kind in self.kinds]
        inner = [n for n, size in enumerate(sizes) if n in used - whole and 0 < size <= self.SMALL]
        places, total = {}, 0
        for n in inner if len(inner) > 1 else ():
            places[n] = total
            total += -(-sizes[n] // self.APART) * self.APART
        for n, kind in enumerate(self.kinds):
            if n in used and n not in places:
                taken = ", ".join(map(self.name, kind))
                self.lines.append(f"m{n} = empty({taken}); p{self.given + n} = m{n}.data_ptr()")
        if places:
            taken = ", ".join(map(self.name, ((total,), (1,), torch.uint8)))
            parts = [f"p{self.given + n} = w + {at}" for n, at in places.items()]
            self.lines.append(f"m = empty({taken}); w = m.data_ptr(); {'; '.join(parts)}")

    def clears(self, step: Step) -> int | None:
        """Returns the bytes of the allocation that a step fills with zeros, or None if it does something else."""
        if step.function is not torch.Tensor.fill_ or step.named or type(step.sources[0]) is not Seen:
            return None
        tensor, value = step.sources
        kind = self.kinds[tensor.number - self.given] if tensor.number >= self.given else None
        if kind is None or tensor.shape is not None or str(value) not in ("0", "0.0"):
            return None
        return _bytes(kind) if _bytes(kind) == math.prod(kind[0]) * kind[2].itemsize else None

    def start(self, step: Step) -> str:
        """Returns the line of a kernel's start, which gives the parameters that differ between calls."""
        moving = [self.parameter(s) if isinstance(s, tuple) or type(s) is Loose else None for s in step.sources]
        values = [s if m is None else MOVING for s, m in zip(step.sources, moving, strict=True)]
        bound, given = step.function.bound(step.grid, values), iter([m for m in moving if m is not None])
        taken = [next(given) if v is MOVING else self.name(v) for v in bound.fill]
        # Python calls a method sooner than an object.
        return f"{self.name(bound.__call__)}(s, ({', '.join(taken)}{',' * bool(taken)}))"

    def name(self, value: Any) -> str:
        """Returns a new global's name for a value."""
        name = f"n{len(self.names)}"
        self.names[name] = value
        return name

    def parameter(self, source: Any) -> str:
        """Returns a kernel's parameter: a pointer with an offset, perhaps in a tensor map, or a loose number."""
        if not isinstance(source, tuple):
            return source.name
        number, offset, *view = source
        pointer = f"p{number} + {offset}" if offset else f"p{number}"
        return f"encoded({pointer}, {self.name(view[0])})" if view else pointer

    def operand(self, value: Any) -> str:
        """Returns an operand of a torch operation: one name per distinct view, so that torch sees an in-place sum as
        such and copies nothing."""
        if type(value) is not Seen:
            return self.name(value)
        whole = f"t{value.number}" if value.number < self.given else f"m{value.number - self.given}"
        if value.shape is None:
            return whole
        if value not in self.views:
            view = self.views[value] = f"v{len(self.views)}"
            shape, stride = self.name(value.shape), self.name(value.stride)
            self.lines.append(f"{view} = view({whole}, {shape}, {stride}, {value.offset})")
        return self.views[value]
