"""linear_cross_entropy beyond the law: how calls are split, with equal results however split, and ownership of
gradients.

Also bad targets, infinity, loss scales and autocast.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from graphs import captured
from ridgeline import tuning
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.op import RidgelineError, get

kernels = pytest.mark.kernels
IMPL = "triton"
OP = get("linear_cross_entropy")
MODULE: Any = sys.modules[OP.function.__module__]
ROWS, HIDDEN, CLASSES = 14, 16, 700  # four groups of at most 4 rows; slabs of 128 classes and more
# bytes in float32: all at once; groups of whole rows; slabs; slabs that sum dx in float32
MEMORY = {"whole": None, "groups": 4 * CLASSES * 4, "slabs": 4 * 256 * 4, "sums": 4 * (128 + HIDDEN) * 4}
memories = pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
UNUSED = itertools.count(1 << 20)  # versions of the configurations for which no call has a plan yet
ALL = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}


def make(device: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[list[Any], torch.Tensor]:
    dice = torch.Generator(device).manual_seed(5)
    shapes = (ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    x, weight, b = (torch.randn(s, device=device, generator=dice).to(dtype).requires_grad_() for s in shapes)
    return [x, weight, b if bias else None], torch.randint(CLASSES, (ROWS,), device=device, generator=dice)


def ours(leaves: list[Any], target: torch.Tensor, **options: Any) -> torch.Tensor:
    x, weight, bias = leaves
    return ridgeline.linear_cross_entropy(x, weight, target, bias, impl=IMPL, **options)


def theirs(leaves: list[Any], target: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns cross_entropy's reference over all logits, in float64."""
    x, weight, bias = [t if t is None else t.double() for t in leaves]
    return get("cross_entropy").reference(F.linear(x, weight, bias), target, **options)


def grads(
    loss: torch.Tensor, leaves: list[Any], *upstream: torch.Tensor, keep: bool = False
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, [t for t in leaves if t is not None], *upstream, retain_graph=keep)


def same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-6)


PLANS = {
    "a fourth of the logits": ((8192, 128256, 4096, 2, 0), (2048, 128256, False)),
    "little logits": ((4096, 8192, 512, 2, 0), (4096, 8192, False)),
    "LEAST, where it is a fifth": ((16384, 32000, 2048, 2, 0), (4096, 27648, False)),
    "two groups": ((1000, 50000, 512, 2, 50 << 20), (500, 50000, False)),
    "slabs": ((8192, 128256, 4096, 2, 208 << 20), (2048, 53248, False)),
    "sums": ((8192, 128256, 4096, 2, 64 << 20), (2048, 8192, True)),
    "the least": ((8192, 128256, 4096, 2, 1), (2048, 128, True)),
    "fewer classes than a slab's least": ((8, 100, 16, 4, 1), (2, 100, False)),
    "no rows": ((0, 10, 16, 4, 0), (1, 10, False)),
    "no rows and no memory": ((0, 10, 16, 4, 1), (1, 10, False)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str) -> None:
    given, expected = PLANS[name]
    assert MODULE.plan(*given) == expected


@pytest.mark.parametrize("rows", [1, 7, 1000, 8192, 131072])
@pytest.mark.parametrize("classes", [100, 32000, 128256, 262144])
@pytest.mark.parametrize("share", [2, 3, 4, 5, 9, 16, 17, 40])
def test_a_plan_keeps_its_promises(rows: int, classes: int, share: int) -> None:
    """At most four groups; dx has at most four roundings or is summed; memory stays within the limit."""
    hidden, size = 2048, 2
    memory = -(-rows * classes * size // share)
    cut = MODULE.plan(rows, classes, hidden, size, memory)
    assert -(-rows // cut.rows) <= 4
    assert cut.sums or -(-classes // cut.classes) <= 4
    if cut.classes > MODULE.SLAB and cut.rows > 1:
        assert cut.rows * (cut.classes * size + 4 * hidden * cut.sums) <= memory


@kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@memories
def test_every_way_of_cutting(memory: int | None, reduction: str, device: str) -> None:
    leaves, target = make(device)
    target[::3] = -100
    loss = ours(leaves, target, reduction=reduction, chunk_memory=memory, **ALL)
    expected = theirs(leaves, target, reduction=reduction, **ALL)
    upstream = torch.randn(loss.shape, device=device)
    same([loss], [expected])
    same(grads(loss, leaves, upstream), grads(expected, leaves, upstream.double()))
    with torch.no_grad():
        same([ours(leaves, target, reduction=reduction, chunk_memory=memory, **ALL)], [expected])


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@memories
def test_logit_scale(memory: int | None, softcap: float | None, dtype: torch.dtype, device: str) -> None:
    """Scaled logits are those of a scaled weight and bias; the softcap comes after."""
    leaves, target = make(device, dtype)
    options = {"softcap": softcap, "reduction": "sum"}
    loss = ours(leaves, target, logit_scale=0.375, chunk_memory=memory, **options)
    x, weight, bias = leaves
    expected = theirs([x, weight.double() * 0.375, bias.double() * 0.375], target, **options)
    exact = grads(expected, leaves)
    if dtype == torch.float32:
        same([loss], [expected])
        same(grads(loss, leaves), exact)
        return
    for one, other in zip([loss, *grads(loss, leaves)], [expected, *exact], strict=True):
        assert (one.double() - other).norm() < 2e-3 * other.double().norm()


@kernels
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
@pytest.mark.parametrize("memory", [MEMORY["slabs"], MEMORY["sums"]])
def test_some_gradients(memory: int, wanted: tuple[int, ...], device: str) -> None:
    leaves, target = make(device)
    for t, w in zip(leaves, wanted, strict=True):
        t.requires_grad_(bool(w))
    some = [t for t in leaves if t.requires_grad]
    same(grads(ours(leaves, target, chunk_memory=memory), some), grads(theirs(leaves, target), some))


@kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory", [None, MEMORY["slabs"]])
def test_backward_again_and_again(memory: int | None, reduction: str, device: str) -> None:
    """Every backward over a retained graph gives gradients in their own memory, which the caller may overwrite."""
    leaves, target = make(device)
    loss = ours(leaves, target, reduction=reduction, chunk_memory=memory)
    first = grads(loss.sum(), leaves, keep=True)
    expected = [g.clone() for g in first]
    for g in first:
        g.mul_(3)
    same(grads(loss.sum(), leaves, keep=True), expected)
    same(grads(loss.sum() / 8, leaves, keep=True), [g / 8 for g in expected])
    same(first, [g * 3 for g in expected])


@kernels
@memories
def test_the_same_bits_each_time(memory: int | None, device: str) -> None:
    """On a GPU compares launcher runs with replays on other tensors, with and without bias."""
    for bias in (True, False):
        found = []
        for _ in range(4 if device == "cuda" else 2):
            leaves, target = make(device, bias=bias)
            some = [t for t in leaves if t is not None]
            loss = ours(leaves, target, chunk_memory=memory)
            found.append([loss, *grads(loss * 1.5, some, keep=True), *grads(loss, some)])
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@memories
def test_a_third_call_is_replayed(
    memory: int | None, reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a call is split, its third run recomputes no plan; on other data it gives the bits of a first call."""
    monkeypatch.setattr(tuning, "version", next(UNUSED))
    worked: list[Any] = []
    init = MODULE._Work.__init__
    monkeypatch.setattr(MODULE._Work, "__init__", lambda self, *args: (worked.append(args), init(self, *args))[1])

    def step(scale: float) -> tuple[list[torch.Tensor], int]:
        leaves, target = make("cuda", dtype)
        leaves = [(t.detach() * scale).requires_grad_() for t in leaves]
        before = len(worked)
        loss = ours(leaves, target, reduction=reduction, chunk_memory=memory)
        return [loss, *grads(loss.sum() * 1.5, leaves)], len(worked) - before

    each = 2 if reduction == "none" else 1
    found = [step(scale) for scale in (1.0, 2.0, 3.0, 0.5)]
    assert [n for _, n in found] == [each, each, 0, 0]
    monkeypatch.setattr(tuning, "version", next(UNUSED))
    assert all(torch.equal(a, b) for a, b in zip(found[-1][0], step(0.5)[0], strict=True))


@kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
@memories
def test_replays_of_a_graph(memory: int | None, reduction: str, device: str) -> None:
    """Forward and backward in a CUDA graph, replayed on new data. Without a GPU the calls are repeated."""
    leaves, target = make(device)

    def work() -> list[torch.Tensor]:
        loss = ours(leaves, target, reduction=reduction, chunk_memory=memory)
        return [loss.detach(), *grads(loss.sum() * 1.5, leaves)]

    replay = captured(work, 3) if device == "cuda" else work
    for seed in range(1 if INTERPRETED else 3):
        dice = torch.Generator(device).manual_seed(seed)
        for t in leaves:
            t.detach().normal_(generator=dice)
        target.random_(CLASSES, generator=dice)[seed] = -100
        expected = theirs(leaves, target, reduction=reduction)
        same(replay(), [expected, *grads(expected.sum() * 1.5, leaves)])


@kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory", [MEMORY["groups"], MEMORY["slabs"]])
def test_a_target_that_is_no_class(memory: int, reduction: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel an invalid target makes its row NaN, and the host does not look.

    Tensors of the interpreter are on a CPU, where it would raise."""
    monkeypatch.setattr(MODULE._arguments, "readable", lambda target: False)
    leaves, target = make(device)
    target[1], target[9] = CLASSES, -(2**40)
    loss = ours(leaves, target, reduction=reduction, chunk_memory=memory)
    wrong = [row in (1, 9) for row in range(ROWS)]
    assert loss.isnan().tolist() == (wrong if reduction == "none" else True)
    dx, dw, db = grads(loss.sum(), leaves)
    assert dx.isnan().all(1).tolist() == dx.isnan().any(1).tolist() == wrong
    assert dw.isnan().all()
    assert db.isnan().all()


@kernels
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1], ids=["x", "weight"])
@memories
def test_infinities_and_nan(memory: int | None, place: int, value: float, device: str) -> None:
    """Infinity in x affects its row, in a weight every row's logits: losses and gradients are non-finite where the
    formula's are."""
    leaves, target = make(device)
    target[:] = torch.where(target == 600, 5, target)
    with torch.no_grad():
        leaves[place][(3, 600)[place], 7] = value
    loss = ours(leaves, target, reduction="none", chunk_memory=memory)
    expected = theirs(leaves, target, reduction="none")
    assert expected.isfinite().any() == (value == value or not place)
    mine, exact = grads(loss.sum(), leaves), grads(expected.sum(), leaves)
    for one, other in zip([loss, *mine], [expected, *exact], strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.equal(one.isnan(), other.isnan())
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


@kernels
@pytest.mark.parametrize("memory", [None, MEMORY["slabs"], MEMORY["sums"]])
def test_classes_that_are_ruled_out(memory: int | None, device: str) -> None:
    """A bias is -inf in whole slabs, the first ones or the last."""
    for out in (slice(0, 300), slice(400, CLASSES)):
        leaves, target = make(device)
        target[:] = 350
        target[::5] = -100
        with torch.no_grad():
            leaves[2][out] = float("-inf")
            leaves[2][:3] = float("-inf")
        loss, expected = ours(leaves, target, z_loss=1e-3, chunk_memory=memory), theirs(leaves, target, z_loss=1e-3)
        same([loss], [expected])
        same(grads(loss, leaves), grads(expected, leaves))


@kernels
@pytest.mark.parametrize("memory", [None, MEMORY["slabs"]])
def test_large_logits_all_alike(memory: int | None, device: str) -> None:
    """Sums of differences stay small where the sum of logits would not."""
    leaves, target = make(device)
    with torch.no_grad():
        leaves[2] += 1000
    loss = ours(leaves, target, label_smoothing=0.5, chunk_memory=memory)
    expected = theirs([leaves[0], leaves[1], leaves[2] - 1000], target, label_smoothing=0.5)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)


@kernels
@pytest.mark.parametrize("memory", [None, MEMORY["slabs"] // 2])
def test_a_scaled_loss_in_half_precision(memory: int | None, device: str) -> None:
    """With a scaled loss, as in float16 training, gradients survive that would be 0 in float16 without the scale."""
    leaves, target = make(device, torch.float16)
    with torch.no_grad():
        leaves[0] *= 2.0**-12
    wide = [t.detach().float().requires_grad_() for t in leaves]
    with torch.autocast(device, dtype=torch.float16):
        loss = ours(leaves, target, chunk_memory=memory)
    assert loss.dtype == torch.float32
    mine, expected = grads(loss * 2.0**16, leaves), grads(theirs(wide, target) * 2.0**16, wide)
    assert ((expected[1] / 2**16).abs() < 2**-25).sum() > expected[1].numel() / 4
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == torch.float16
        assert (one.float() - other).norm() < 1e-3 * other.norm()


@kernels
def test_autocast_casts(device: str) -> None:
    """Casts x, weight and bias as F.linear does; gradients have the dtypes of the leaves."""
    leaves, target = make(device)
    leaves[0] = leaves[0].detach().half().requires_grad_()
    with torch.autocast(device, dtype=torch.float16):
        loss = ours(leaves, target)
    assert loss.dtype == torch.float32
    expected = theirs([t.half() for t in leaves], target)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0)
    assert [g.dtype for g in grads(loss, leaves)] == [torch.float16, torch.float32, torch.float32]


@kernels
@pytest.mark.parametrize("sizes", [(0, 16, 40), (5, 0, 40), (3, 4, 1), (1, 1, 1)])
def test_sizes_of_zero_and_one(sizes: tuple[int, int, int], device: str) -> None:
    rows, hidden, classes = sizes
    leaves = [torch.randn(s, device=device).requires_grad_() for s in ((rows, hidden), (classes, hidden), (classes,))]
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    loss, expected = ours(leaves, target, reduction="sum"), theirs(leaves, target, reduction="sum")
    same([loss], [expected])
    same(grads(loss, leaves), grads(expected, leaves))


def strided(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t.detach(), t.detach()], -1)[..., 0]


@kernels
@pytest.mark.parametrize("bend", [strided, lambda t: t.detach().mT.contiguous().mT if t.dim() > 1 else strided(t)])
@pytest.mark.parametrize("memory", [MEMORY["groups"], MEMORY["slabs"]])
def test_layouts(memory: int, bend: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    leaves, target = make(device)
    bent = [bend(t).requires_grad_() for t in leaves]
    for options in ({"reduction": "none"}, {}):
        loss, expected = (ours(some, bend(target), chunk_memory=memory, **options) for some in (bent, leaves))
        upstream = torch.randn((), device=device).expand(loss.shape)
        same([loss], [expected])
        same(grads(loss, bent, upstream), grads(expected, leaves, upstream))


@kernels
def test_no_more_products_than_needed(device: str) -> None:
    """With slabs, the last one's logits are not recomputed: forward runs kernels over 3 slabs a group, 2 of them
    twice."""
    leaves, target = make(device)
    started: list[str] = []

    def note(launch: Launch) -> None:
        started.append(launch.kernel.__name__)

    with observe(note):
        loss = ours(leaves, target, chunk_memory=MEMORY["slabs"])
        forward = len(started)
        loss.backward()
    assert (started.count("_fold"), started[:forward].count("_bwd"), started[forward:].count("_bwd")) == (12, 8, 0)


BAD = {
    "inner sizes": (lambda x, w, y: (x, w[:, :4], y), {}, ["(..., H)", "(2, 3, 5)", "(7, 4)"]),
    "shapes of targets": (lambda x, w, y: (x, w, y[0]), {}, ["(2, 3, 7)", "(3,)"]),
    "a weight of one dimension": (lambda x, w, y: (x, w[0], y), {}, ["(V, H)", "(5,)"]),
    "two dtypes": (lambda x, w, y: (x, w.half(), y), {}, ["weight", "float16", "float32"]),
    "integers": (lambda x, w, y: (x.int(), w.int(), y), {}, ["floating", "int32"]),
    "two devices": (lambda x, w, y: (x, w.to("meta"), y), {}, ["weight", "cpu", "meta"]),
    "targets elsewhere": (lambda x, w, y: (x, w, y.to("meta")), {}, ["cpu", "meta"]),
    "a bias of another length": (lambda x, w, y: (x, w, y, w[0]), {}, ["bias", "(7,)", "(5,)"]),
    "no tensor": (lambda x, w, y: (x, None, y), {}, ["weight", "tensor", "NoneType"]),
    "no classes": (lambda x, w, y: (x, w[:0], y), {}, ["weight", "class", "(0, 5)"]),
    "8 bits": (
        lambda x, w, y: (x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), y),
        {},
        ["x", "float8_e4m3fn", "float32"],
    ),
    "two lengths in one": (
        lambda x, w, y: (torch.nested.nested_tensor([x[0], x[1, :2]]), w, y),
        {},
        ["nested", "dense"],
    ),
    "targets in int32": (lambda x, w, y: (x, w, y.int()), {}, ["int64", "int32"]),
    "a class too many": (lambda x, w, y: (x, w, y + 7), {}, ["0 to 6", "-100"]),
    "no memory": (lambda x, w, y: (x, w, y), {"chunk_memory": 0}, ["chunk_memory", "above 0", "0"]),
    "memory in words": (lambda x, w, y: (x, w, y), {"chunk_memory": "1 GiB"}, ["chunk_memory", "'1 GiB'"]),
    "memory as a truth": (lambda x, w, y: (x, w, y), {"chunk_memory": True}, ["chunk_memory", "True"]),
    "another reduction": (lambda x, w, y: (x, w, y), {"reduction": "max"}, ["max", "mean"]),
    "too smooth": (lambda x, w, y: (x, w, y), {"label_smoothing": 1.5}, ["1.5", "between 0 and 1"]),
    "a negative scale": (lambda x, w, y: (x, w, y), {"logit_scale": -2.0}, ["logit_scale", "-2.0", "above 0"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    change, options, named = BAD[name]
    with pytest.raises(RidgelineError) as error:
        ridgeline.linear_cross_entropy(
            *change(torch.ones(2, 3, 5), torch.ones(7, 5), torch.zeros(2, 3, dtype=torch.int64)), **options
        )
    said = str(error.value)
    assert said.startswith("linear_cross_entropy: ")
    assert "\n" not in said
    assert not [word for word in named if word not in said], said


@pytest.mark.gpu
def test_more_than_two_to_the_31() -> None:
    """The logits of a group, and of a slab, have more than 2^31 elements."""
    rows, hidden, classes = 65536 + 8, 64, 131072 + 128
    torch.manual_seed(0)
    x, weight = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (rows, classes))
    x, weight = (
        x.requires_grad_(),
        (weight / 8).requires_grad_(),
    )  # logits differ by about 1, so that no row's gradient cancels
    target = torch.randint(classes, (rows,), device="cuda")
    for memory in (None, 5 << 29):
        loss = ridgeline.linear_cross_entropy(x, weight, target, reduction="none", chunk_memory=memory, impl=IMPL)
        dx = torch.autograd.grad(loss.float().sum(), x)[0]
        for piece in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
            few = x.detach()[piece].float().requires_grad_()
            expected = F.cross_entropy(F.linear(few, weight.detach().float()), target[piece], reduction="none")
            torch.testing.assert_close(loss[piece].float(), expected, rtol=2e-2, atol=2e-2)
            exact = torch.autograd.grad(expected.sum(), few)[0]
            assert (dx[piece].float() - exact).norm() < 2e-2 * exact.norm()
