"""Every kernel of every op, compiled for every target without a GPU: no spills, shared memory that fits, wide loads where promised.

A kernel that may spill is listed in SPILLS with the most bytes it may move and why.
"""

from pathlib import Path

import pytest
import triton

from ridgeline import device, op
from ridgeline.lab import inspect
from ridgeline.op import Implementation, RidgelineError

# {(op, implementation, kernel, arch): (bytes per thread in and out, why)}
SPILLS: dict[tuple[str, str, str, str], tuple[int, str]] = {
    ("softmax", "cuda_cluster", "softmax_bwd", "sm_90"): (
        8,
        "one register at 65536 columns, for a third block a multiprocessor: 2991 GB/s against 2925",
    ),
    ("adamw", "triton", "_step", "sm_100"): (8, "one register of four tensors in half precision; the kernel waits for memory"),
    ("log_softmax", "triton", "_bwd", "sm_90"): (8, "one register at 33x129 in bfloat16, of a tile that the rule makes of short rows"),
    ("softmax", "triton", "_bwd", "sm_80"): (8, "one register at 8192 columns in bfloat16"),
    ("add_layer_norm", "triton", "_fwd", "sm_80"): (16, "two registers at 1024 columns in bfloat16, of tiles that an H100 is best with"),
    ("attention", "triton", "_fwd", "sm_80"): (276, "a window's third loop at D 128; 36 to 156 without: to be timed on such a GPU"),
    ("attention", "triton", "_bwd", "sm_80"): (104, "D 96: two parts of two sums"),
    ("attention", "triton", "_bwd_dq", "sm_80"): (36, "a causal call's second loop at D 64"),
    ("attention", "triton", "_fwd", "sm_90"): (80, "a window's third loop at D 128"),
    ("attention", "triton", "_bwd", "sm_90"): (
        448,
        "at D 128 dK and dV are 128 registers; 96 without a mask: 32 x 128 tiles spill none, to be timed",
    ),
    ("attention", "triton", "_bwd_dq", "sm_90"): (32, "a window's third loop at D 128"),
    ("attention", "triton", "_fwd", "sm_100"): (16, "D 256"),
    ("attention", "triton", "_bwd_dq", "sm_100"): (16, "a causal call's second loop at D 128"),
    ("attention_varlen", "triton", "_fwd", "sm_80"): (156, "as attention's"),
    ("attention_varlen", "triton", "_bwd", "sm_90"): (296, "as attention's"),
}
OWN = "3.7.1"  # the Triton of requirements.lock; the others' compilers may move a few registers more
ELSEWHERE = 0 if triton.__version__ == OWN else 64
CHECKS = 2  # of an op's small cases, beside its benchmarks

pytestmark = pytest.mark.compiles

RUNGS = [
    pytest.param(i, arch, id=f"{i.op.name}-{i.name}-{arch}")
    for o in op.registry().values()
    for i in o.implementations.values()
    for arch in inspect.ARCHES
    if i.is_kernel and not (i.kind in ("cuda", "gluon") and arch == "gfx942")
    if i.arch <= (device.KNOWN[arch].capability or 10**9) <= (i.newest or 10**9)
]


def kernels(implementation: Implementation, arch: str) -> list[inspect.Resources]:
    """The different kernels of an implementation, over its benchmarks, a few small cases and its dtypes; forward and backward."""
    o = implementation.op
    bench = [case for case in o.cases if case.use == "bench"]
    cases = bench + [case for case in o.cases if case.use != "bench"][:CHECKS]
    found = {}
    for case in cases:
        for dtype in case.dtypes:
            try:
                for r in inspect.resources(o, implementation, case, dtype, arch):
                    found[r.kernel, r.direction, dtype, tuple(r.constants.items()), r.registers, r.widest_load] = r
            except RidgelineError:
                continue  # a case or dtype that this rung refuses, which test_ops holds it to
    return list(found.values())


@pytest.mark.parametrize(("implementation", "arch"), RUNGS)
def test_kernels_fit(implementation: Implementation, arch: str) -> None:
    found = kernels(implementation, arch)
    assert found, f"{implementation.op.name} {implementation.name} supports none of its op's cases on {arch}"
    faults = []
    for r in found:
        allowed = max(ELSEWHERE, SPILLS.get((r.op, r.implementation, r.kernel, arch), (0, ""))[0])
        what = f"{r.kernel} ({r.case} {r.dtype} {r.direction}, {r.constants})"
        if r.stack and r.spill_loads + r.spill_stores > allowed:
            faults.append(f"{what} spills {r.spill_stores} bytes out and {r.spill_loads} in; {allowed} allowed")
        if r.shared > device.KNOWN[arch].shared_memory:
            faults.append(f"{what} takes {r.shared:,} bytes of shared memory, and {arch} has {device.KNOWN[arch].shared_memory:,}")
        if r.threads > 1024:
            faults.append(f"{what} has {r.threads} threads per block; 1024 is the most")
        if "packed" in implementation.name and implementation.op.case(r.case).use == "bench" and r.widest_load < 16:
            faults.append(f"{what} has no load of 16 bytes")
    assert not faults, "\n".join(faults)


def test_no_allowance_for_the_triton_that_is_locked() -> None:
    lock = Path(__file__).parents[1] / "requirements.lock"
    assert f"triton=={OWN}\n" in lock.read_text()


def test_spill_allowances_name_kernels_that_exist() -> None:
    registry = op.registry()
    for name, implementation, _, arch in SPILLS:
        assert implementation in registry[name].implementations
        assert arch in inspect.ARCHES
