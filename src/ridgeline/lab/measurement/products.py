"""Matrix products to time: their operands, and the functions that multiply them, by dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ridgeline.lab.measurement.clock import Function
from ridgeline.lab.measurement.limits import CODES
from ridgeline.op import Implementation, registry
from ridgeline.select import why_not


def rungs(roof: str, *args: Tensor) -> list[Implementation]:
    """Returns the kernels, of ops whose `roof` is this one, that support the call."""
    ops = [op for op in registry().values() if op.roof == roof]
    return [i for op in ops for i in op.implementations.values() if i.is_kernel and why_not(i, *args) is None]


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Computes float32 matrix products inside the context in float32 or, for "tf32", in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def codes(device: str) -> tuple[str, ...]:
    """Returns the 8-bit dtypes that the device's matrix units support."""
    if not device.startswith("cuda") or torch.version.hip:
        return ()
    return CODES if torch.cuda.get_device_capability() >= (8, 9) else CODES[:1]


def products(name: str, m: int, n: int, k: int, dice: torch.Generator) -> tuple[dict[str, Function], int]:
    """Returns functions that multiply random (m, k) by (k, n), and the bytes that each writes.

    name: a dtype, or "tf32" for float32. The second operand lies row by row ("nn") or column by column ("nt", as the
    weight of a linear layer). Products of 8-bit numbers are torch's, and those of the op with this roof.
    """
    dtype = torch.float32 if name == "tf32" else torch.bfloat16 if name in CODES else getattr(torch, name)
    a, b = (torch.randn(*s, dtype=dtype, device=dice.device, generator=dice) for s in ((m, k), (k, n)))
    c = torch.empty(m, n, dtype=dtype, device=dice.device)
    if name in CODES:
        return _coded(name, a, b), c.nbytes
    t = b.T.contiguous().T
    return {"nn": partial(torch.mm, a, b, out=c), "nt": partial(torch.mm, a, t, out=c)}, c.nbytes


def _coded(name: str, a: Tensor, b: Tensor) -> dict[str, Function]:
    one, whole = torch.ones((), device=a.device), name == "int8"
    given = [(16 * t if whole else t).to(getattr(torch, name)) for t in (a, b.mT.contiguous())]
    call = given[0], given[1].mT, one, one
    torchs = (
        partial(torch._int_mm, *call[:2])
        if whole
        else partial(torch._scaled_mm, *call, out_dtype=torch.bfloat16, use_fast_accum=True)
    )
    return {"torch": torchs} | {rung.name: partial(rung, *call) for rung in rungs(name, *call)}
