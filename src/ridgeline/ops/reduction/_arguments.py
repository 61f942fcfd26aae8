"""What reductions take: dtypes, which dimensions are summed and where the elements lie; random data for their cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ridgeline.cuda import CTYPE
from ridgeline.op import RidgelineError, Spec

INTEGERS = {"int32": "int", "int64": "long long", "int16": "short", "int8": "signed char", "uint8": "unsigned char"}
KINDS = CTYPE | {getattr(torch, name): ctype for name, ctype in INTEGERS.items()}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def normal(x: Any, dim: Any, dtype: Any = None) -> tuple[int, ...]:
    """The dimensions of a sum, non-negative and sorted. Raises RidgelineError if an argument is invalid."""
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"reduce_sum: x must be a tensor, but is {type(x).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise RidgelineError(f"reduce_sum: dtype must be a dtype such as torch.float32, or None, but is {dtype!r}")
    most = max(1, x.dim())  # a scalar has dimensions 0 and -1, as in PyTorch
    given = (dim,) if isinstance(dim, int) else dim
    if given is None or (isinstance(given, tuple | list) and not given):
        return tuple(range(x.dim()))
    if not isinstance(given, tuple | list) or any([type(d) is not int or not -most <= d < most for d in given]):
        wanted = f"an int from {-most} to {most - 1}, several of them, or None"
        raise RidgelineError(f"reduce_sum: dim must be {wanted}, but is {dim!r}")
    found = sorted({d % most for d in given})
    if len(found) < len(given):
        raise RidgelineError(f"reduce_sum: dim must name each dimension once, but is {dim!r}")
    return tuple(found) if x.dim() else ()


def result_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum, or of prefix sums."""
    if dtype is not None:
        return dtype
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda"):
        return torch.float32  # as torch's sum and cumsum return there
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def left_to_torch(x: torch.Tensor, out: torch.dtype) -> str | None:
    """Why kernels cannot take these dtypes, or None."""
    if (x.dtype in FLOATS and out in FLOATS) or (x.dtype in (*WHOLE, torch.bool) and out in WHOLE):
        return None
    kinds = "floating point (float32, float16, bfloat16) or integers (int64 to int8, uint8)"
    given = f"{str(x.dtype)[6:]} in {str(out)[6:]}"
    return f"kernels sum {kinds} in a dtype of the same kind, but this sum is of {given}"


def tiny(x: torch.Tensor, dim: Any = None, *_: Any) -> str | None:
    """Why PyTorch is faster, or None: very many outer slices, each with few elements to sum."""
    dims, last = normal(x, dim), -2
    kept: list[int] = []
    for d, size in enumerate(x.shape):
        if d not in dims:
            if d == last + 1:
                kept[-1] *= size
            else:
                kept.append(size)
            last = d
    if len(kept) == 2 and kept[0] > 1 << 16 and x.numel() < 256 * kept[0]:
        return "its outer slices are very many and small, so one program for each takes longer than PyTorch's kernel"
    return None


def takes_dtypes(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> str | None:
    return left_to_torch(x, result_dtype(x, dtype))


def side_by_side(x: torch.Tensor) -> bool:
    """Whether the elements are contiguous in memory, with dimensions in any order."""
    room = 1
    for stride, size in sorted([(s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1]):
        if stride != room:
            return False
        room *= size
    return True


Group = tuple[int, ...]  # a size, then the stride in x and, for kept dimensions, in y


def _merged(found: list[Group]) -> list[Group]:
    """Merges adjacent dimensions that can be walked as one."""
    made: list[Group] = []
    for size, *steps in found:
        if size == 1:
            continue
        if made and all([last == step * size for last, step in zip(made[-1][1:], steps, strict=True)]):
            made[-1] = (made[-1][0] * size, *steps)
        else:
            made.append((size, *steps))
    return made


def groups(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[list[Group], Group, list[Group], Group]:
    """The groups of kept dimensions and of summed ones; of each, the one with the smallest stride comes apart, last.

    Both lists have at least one group. y is contiguous.
    """
    kept: list[Group] = []
    room = 1
    for d in reversed(range(x.dim())):
        if d not in dims:
            kept.insert(0, (x.shape[d], x.stride(d), room))
            room *= x.shape[d]
    added: list[Group] = [(x.shape[d], x.stride(d)) for d in dims]
    kept, added = _merged(kept), _merged(sorted(added, key=lambda group: -group[1]))
    kept.sort(key=lambda group: -group[1])
    kept = [(1, 0, 0)] * (2 - len(kept)) + kept
    added = [(1, 0)] * (2 - len(added)) + added
    return kept[:-1], kept[-1], added[:-1], added[-1]


def axes(given: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of x that are summed."""
    lead = len(given) - len(shape)
    return (*range(lead), *[d for d in range(lead, len(given)) if shape[d - lead] == 1 != given[d]])


def letters(x: torch.Tensor, shape: Sequence[int], **_: Any) -> str:
    """A summed dimension that stays, with size 1, is whole in the result."""
    names, summed = "abcdefghijklmnopqrstuvwxyz"[: x.dim()], axes(x.shape, shape)
    kept = range(x.dim() - len(shape), x.dim())
    return f"x {names} -> {''.join([names[d].upper() if d in summed else names[d] for d in kept])}"


class Positive(Spec):
    """Uniform numbers from 0 to 1; integers from their dtype's whole range.

    Sums of normal numbers cancel, and one rounding more may then matter much or little, by luck.
    """

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if self.dtype else dtype
        if dtype.is_floating_point:
            base = torch.float64 if dtype == torch.float64 else torch.float32
            made = torch.rand(self.shape, dtype=base, device=device, generator=generator)
            return made.to(dtype).requires_grad_(self.grad)
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max, self.shape, dtype=dtype, device=device, generator=generator)


class Signs(Spec):
    """-1 or 1 in about one element of `high`; 0 in the others."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        signs = torch.randint(0, 2, self.shape, dtype=torch.int8, device=device, generator=generator) * 2 - 1
        if self.high > 1:
            signs *= torch.randint(0, self.high, self.shape, dtype=torch.int16, device=device, generator=generator) == 0
        return signs.to(dtype).requires_grad_(self.grad)


class Strided(Positive):
    """Every second element of a tensor twice as long."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args).detach()
        return torch.stack([made, made], -1)[..., 0].requires_grad_(self.grad)
