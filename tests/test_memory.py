"""Peak memory of forward plus backward: results, gradients, two statistics a row, partial sums of weight gradients.

It counts the bytes that tensors requested; the allocator rounds each up, by up to 1 MiB.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline import device
from ridgeline.lab.measurement.law import as_tuple, leaves
from ridgeline.op import Case, Op, nbytes, registry, tensors_of

pytestmark = pytest.mark.gpu

OPS = registry()
SLACK = 64 << 10  # scalars such as a loss, a seed, counts of rows
NARROW, WIDE = "16384x4096", "1024x262144"


def bench(op: Op) -> list[Case]:
    return [case for case in op.cases if case.use == "bench"]


def dtype(case: Case) -> str:
    return "bfloat16" if "bfloat16" in case.dtypes else case.dtypes[-1]


def chosen(op: Op) -> Case:
    """Returns rows that are many times as long together as the partial sums of their columns; else the op's largest
    case."""
    named = [case for case in bench(op) if case.name == NARROW]
    return (
        named[0] if named else max(bench(op), key=lambda case: nbytes(*tensors_of(case.make(dtype(case), "meta")[0])))
    )


LINEAR = OPS["linear_cross_entropy"]
# Of each case: the logits in memory at a time, in tensors of x's size, 64 MiB; and GiB of all beyond the inputs.
LOGITS = {
    "8192x4096x128256": (128256 / 4 / 4096, 1.6),
    "8192x4096x128256 in 1.25 GiB": (208 / 64, 1.25),
    "8192x4096x128256 none": (128256 / 4 / 4096, 1.6),
    "16384x2048x32000": (216 / 64, 0.4),
}
CALLS: list[tuple[Op, Case, dict[str, Any], float]]
MORE = {"gated_linear": 4 * 14336 / 4096}  # both products, saved, and their gradients
CALLS = [(op, chosen(op), {}, MORE.get(op.name, 0)) for op in OPS.values() if not op.mutates and op is not LINEAR]
CALLS += [
    (OPS[name], OPS[name].case(WIDE), {}, 0) for name in ("softmax", "layer_norm")
]  # other ops on rows allocate as these do
CALLS += [  # options that change what is saved; the last number: tensors of x's size beyond the line at the top
    (OPS["rms_norm"], OPS["rms_norm"].case(NARROW), {"memory_efficient": True}, 0),
    (OPS["cross_entropy"], chosen(OPS["cross_entropy"]), {"reduction": "none"}, 0),
    *[(LINEAR, LINEAR.case(name), {}, share) for name, (share, _) in LOGITS.items()],
    (
        OPS["masked_softmax"],
        chosen(OPS["masked_softmax"]),
        {"dropout_p": 0.1, "seed": 1},
        1,
    ),  # probabilities, which dropout hides
]


def requested(which: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def allowed(op: Op, args: list[Any], wanted: list[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> int:
    """dropout draws its mask again in backward, and so may save none. A row of group_norm is a group."""
    x = args[0]
    rows = x.shape[0] * args[1] if op.name == "group_norm" else x.numel() // x.shape[-1]
    statistics = 40 * rows if op is LINEAR else 2 * 4 * rows if op.family in ("rowwise", "loss") else 0
    weights = sum(t.numel() for t in wanted if t.dim() == 1 and t.numel() < x.numel())
    if (
        op.family == "attention"
    ):  # Hopper's kernels accumulate dQ in float32, and number each packed sequence's blocks of 64 rows
        length = x.shape[0] if op.name == "attention_varlen" else x.shape[2]
        more = 64 * args[3].numel() if op.name == "attention_varlen" else -length % 64  # sequences, plus one
        statistics = (4 * x.numel() + 3 * 4 * rows) * (length + more) // length
    if op.name == "gemv":
        statistics = 4 << 20  # parts along K, whatever the sizes
    if op.name in ("reduce_sum", "dot"):
        statistics = 8 * 128 * device.here().multiprocessors  # one part per block
    if op.name == "cumsum":
        tiles = x.numel() // 5120
        statistics = 16 * (tiles + tiles // 32 + 3)  # two words per tile, and per 32 tiles
    if op.name == "radix_sort":
        statistics = 10 * x.numel()  # keys and values between passes, and words for the digits of 6144 keys
    if op.name == "index_add":
        statistics = 40 * args[2].numel()  # the sorted index, by torch.sort, and its own copies
    return nbytes(*outputs, *wanted) + statistics + 4 * weights * device.here().multiprocessors + SLACK


def peak(op: Op, call: Callable[..., Any], case: Case, options: dict[str, Any]) -> tuple[int, int]:
    """Returns the peak bytes, beyond those allocated before, of a call and its backward while the results live; and
    the limit."""
    args, kwargs = case.make(dtype(case), "cuda")
    wanted, incoming, found, limit = leaves([*args, *kwargs.values()]), [], [], 0
    for _ in range(4):  # the first call allocates cuBLAS's workspace; a launcher runs, then is recorded, then replayed
        for t in wanted:
            t.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        outputs = as_tuple(call(*args, **kwargs, **options))
        made = [o for o in outputs if o.requires_grad]
        incoming = incoming or [torch.randn_like(o) for o in made]
        if made:
            torch.autograd.backward(made, incoming)
        found.append(requested("peak") - before)
        limit = allowed(op, args, wanted, outputs)
        del outputs, made
    return max(found[1:]), limit


@pytest.mark.parametrize(
    ("op", "case", "options", "more"),
    [pytest.param(*c, id=" ".join([c[0].name, c[1].name, dtype(c[1]), *c[2]])) for c in CALLS],
)
def test_forward_and_backward(op: Op, case: Case, options: dict[str, Any], more: float) -> None:
    found, limit = peak(op, op.function, case, options)
    limit += more * nbytes(case.make(dtype(case), "meta")[0][0])
    assert found <= limit, f"{found / 2**20:.2f} MiB, and {limit / 2**20:.2f} are allowed"


@pytest.mark.parametrize("case", bench(LINEAR), ids=lambda case: case.name)
def test_linear_cross_entropy_in_all(case: Case) -> None:
    found, _ = peak(LINEAR, LINEAR.function, case, {})
    assert found <= LOGITS[case.name][1] * 2**30, f"{found / 2**30:.3f} GiB"


WASTEFUL = {
    "softmax": OPS["softmax"].reference,
    "rms_norm": lambda x, weight: OPS["rms_norm"].function(x.clone(), weight),  # one tensor too many
}


@pytest.mark.parametrize("name", WASTEFUL)
def test_waste_is_seen(name: str) -> None:
    found, limit = peak(OPS[name], WASTEFUL[name], OPS[name].case(NARROW), {})
    assert found > limit


@pytest.mark.parametrize(
    ("op", "case"), [pytest.param(o, c, id=f"{o.name} {c.name}") for o in OPS.values() if o.mutates for c in bench(o)]
)
def test_in_place(op: Op, case: Case) -> None:
    """A chunk of 8192 elements takes 4 bytes of a table and 4 of a partial sum, also the first time."""
    args, kwargs = case.make(dtype(case), "cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        op.function(*args, **kwargs)
        found = requested("peak") - before
        assert found <= SLACK + sum(t.numel() for t in tensors_of(args[:1])) // 1024, f"{found / 2**10:.1f} KiB"
