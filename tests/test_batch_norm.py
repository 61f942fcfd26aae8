"""batch_norm beyond its cases: running statistics, memory formats, gradients of some inputs, modules, refusals."""

import pytest
import torch
from torch.nn import functional as F

import ridgeline
from ridgeline import device as devices
from ridgeline import nn
from ridgeline.boundary import INTERPRETED, Launch, observe
from ridgeline.op import RidgelineError
from ridgeline.ops.rowwise import _batch

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else None
LAST = torch.channels_last
LAYOUTS = {
    "channels of a larger tensor": lambda x: torch.cat([x, x, x], 1)[:, 8:16],
    "channels of a larger tensor, channels last": lambda x: torch.cat([x, x, x], 1).to(memory_format=LAST)[:, 8:16],
    "rows and columns exchanged": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1).flatten(3)[..., ::2],
    "one image, expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, device: str) -> None:
    x, w = LAYOUTS[layout](torch.randn(3, 8, 6, 5, device=device)), torch.randn(8, device=device)
    found = []
    for impl, given in ((IMPL, x.detach()), ("torch", x.detach().contiguous())):
        leaf = given.requires_grad_()
        y = ridgeline.batch_norm(leaf, weight=w, training=True, activation="relu", impl=impl)
        found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y).cumsum(1))))
    torch.testing.assert_close(*[(y.contiguous(), g.contiguous()) for y, g in found], rtol=1e-4, atol=1e-4)


def test_division_by_a_product() -> None:
    """Exact for all numbers of 31 bits: at the ends of each quotient, where it errs first."""
    for by in (*range(2, 200), 392, 1568, 12544, 65535, 65536, 65537, (1 << 30) - 1, 1 << 30, (1 << 31) - 1):
        times, shift = _batch._divided(by)
        assert times < 1 << 32
        for quotient in {0, 1, 2, 1000, (1 << 31) // by // 2, ((1 << 31) - 1) // by}:
            for n in (quotient * by - 1, quotient * by, quotient * by + by - 1):
                if 0 <= n < 1 << 31:
                    assert (n * times >> 32) >> shift == n // by


@pytest.mark.parametrize("channels_last", [False, True])
def test_running_statistics(channels_last: bool, device: str) -> None:
    """They move as torch's do, by the unbiased variance, in the dtype that they have; their version counts."""
    x = (torch.randn(10, 6, 7, 5, device=device) * 3 + 100).requires_grad_()
    given = x.to(memory_format=LAST) if channels_last else x
    ours, theirs = ([torch.ones(6, device=device), torch.ones(6, device=device)] for _ in range(2))
    for _ in range(2):
        ridgeline.batch_norm(given, *ours, training=True, momentum=0.3, impl=IMPL)
        F.batch_norm(given, *theirs, training=True, momentum=0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if IMPL:
        assert ours[0]._version == 2
        with torch.no_grad():
            ridgeline.batch_norm(given, ours[0], None, training=True, impl=IMPL)
        assert ours[0]._version == 3


def test_many_numbers_with_a_large_mean(device: str) -> None:
    """Parts are merged around their own means: a mean of 1000 standard deviations costs no digits of the variance."""
    x = torch.randn(16, 2, 20, 20, device=device) + 1000
    y = ridgeline.batch_norm(x, training=True, impl=IMPL)
    exact = ridgeline.batch_norm(x.double(), training=True, impl="naive")
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_first_image_unlike_the_others(channels_last: bool, device: str) -> None:
    """Sums are taken around the first tile's mean, which may be far from all other numbers."""
    x = torch.randn(40, 2, 16, 20, device=device)
    x[:7] += 1000
    x = x.to(memory_format=LAST) if channels_last else x
    y = ridgeline.batch_norm(x, training=True, impl=IMPL)
    exact = ridgeline.batch_norm(x.double(), training=True, impl="naive")
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_some_gradients(training: bool, device: str) -> None:
    """Each gradient alone is that of all together."""
    running = torch.randn(6, device=device), torch.rand(6, device=device) + 0.5
    inputs = [torch.randn(s, device=device) for s in ((4, 6, 5), (6,), (6,), (4, 6, 5))]

    def grads(which: list[int]) -> list[torch.Tensor]:
        x, w, b, add = given = [t.clone().requires_grad_(n in which) for n, t in enumerate(inputs)]
        statistics = [t.clone() for t in running]
        options = {"training": training, "add": add, "activation": "relu", "impl": IMPL}
        y = ridgeline.batch_norm(x, *statistics, w, b, **options)
        return list(torch.autograd.grad(y, [given[n] for n in which], torch.ones_like(y)))

    together = grads([0, 1, 2, 3])
    for n in range(4):
        assert torch.equal(grads([n])[0], together[n])


def test_nan_passes_relu(device: str) -> None:
    x = torch.randn(4, 2, 3, device=device)
    x[0, 0, 0] = float("nan")
    y = ridgeline.batch_norm(x, training=True, activation="relu", impl=IMPL)
    assert y[:, 0].isnan().all()
    assert not y[:, 1].isnan().any()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_modules(momentum: float | None, device: str) -> None:
    """State dicts are torch's, and so are results and statistics, in training and in evaluation."""
    for ours, theirs, shape in (
        (nn.BatchNorm1d, torch.nn.BatchNorm1d, (7, 6)),
        (nn.BatchNorm2d, torch.nn.BatchNorm2d, (3, 6, 5, 4)),
        (nn.BatchNorm3d, torch.nn.BatchNorm3d, (2, 6, 3, 2, 2)),
    ):
        a, b = ours(6, momentum=momentum).to(device), theirs(6, momentum=momentum).to(device)
        b.load_state_dict(a.state_dict())
        for _ in range(2):
            x = torch.randn(shape, device=device)
            torch.testing.assert_close(a(x), b(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.state_dict(), b.state_dict())
        torch.testing.assert_close(a.eval()(x), b.eval()(x), rtol=1e-4, atol=1e-5)
    fused = nn.BatchNorm2d(6, activation="relu").to(device)
    x, add = torch.randn(2, 3, 6, 5, 4, device=device)
    wanted = torch.relu(torch.nn.BatchNorm2d(6).to(device)(x) + add)
    torch.testing.assert_close(fused(x, add), wanted, rtol=1e-4, atol=1e-5)
    assert nn.BatchNorm2d(6, track_running_stats=False).to(device).eval()(x).shape == x.shape


@pytest.mark.parametrize(("images", "started"), [(3, ["_sums", "_spread"]), (900, ["_sums", "_total", "_spread"])])
def test_a_single_parts_sums_need_no_second_kernel(images: int, started: list[str]) -> None:
    x, w, b, mean = (torch.randn(n, device="meta") for n in ((images, 12, 7, 9), 12, 12, 12))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    seen: list[Launch] = []
    with devices.pretend("h200"), observe(seen.append):
        y = ridgeline.batch_norm(x, mean, mean, w, b)
        torch.autograd.grad(y, leaves, torch.empty_like(y))
    assert [launch.kernel.__name__ for launch in seen] == ["_apply", *started]


def test_evaluation_takes_statistics_that_a_graph_may_not_change() -> None:
    """The registered op of evaluation changes none of its arguments, so torch.compile copies none."""
    schema = torch.ops.ridgeline.batch_norm_eval.default._schema
    assert not schema.is_mutable
    assert torch.ops.ridgeline.batch_norm_fwd.default._schema.is_mutable


def test_refusals(device: str) -> None:
    x = torch.randn(3, 6, 5, device=device)
    with pytest.raises(RidgelineError, match="needs running_mean and running_var"):
        ridgeline.batch_norm(x)
    with pytest.raises(RidgelineError, match="more than one number per channel"):
        ridgeline.batch_norm(x[:1, :, :1], training=True)
    with pytest.raises(RidgelineError, match="momentum"):
        ridgeline.batch_norm(x, training=True, momentum=None)


@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 1), (1, 131, 3), (2, 65, 1, 33), (0, 3, 4)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_odd_sizes_in_training(shape: tuple[int, ...], channels_last: bool, device: str) -> None:
    x = torch.randn(shape, device=device)
    x = x.to(memory_format=LAST) if channels_last and x.dim() == 4 else x
    found = []
    for impl in (IMPL, "naive"):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = ridgeline.batch_norm(leaf, training=True, impl=impl)
        found.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y).cumsum(0))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", [IMPL, "naive", "torch"])
def test_an_empty_batch_leaves_the_statistics(impl: str | None, device: str) -> None:
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    x = torch.empty(0, 4, 3, device=device, requires_grad=True)
    weight = torch.ones(4, device=device, requires_grad=True)
    y = ridgeline.batch_norm(x, mean, var, weight, training=True, impl=impl)
    assert not torch.autograd.grad(y, weight, torch.empty_like(y))[0].any()
    assert not mean.any()
    assert (var == 1).all()


def test_a_mean_whose_square_is_no_float32(device: str) -> None:
    """Three parts, which the merging kernel loads with a fourth that is not there."""
    x = 1e20 + 1e15 * torch.randn(1, 2, 3 * 1024, device=device)
    y = ridgeline.batch_norm(x, training=True, impl=IMPL)
    exact = ridgeline.batch_norm(x.double(), training=True, impl="naive")
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "wide"), [(2**31 - 2**22, False), (2**31 - 10000, True), (2**31, True)])
def test_rows_near_the_end_of_32_bits(rows: int, wide: bool) -> None:
    """A part's end is counted in whole tiles, and may pass the last row by a part's length."""
    with devices.pretend("h200"):
        x = torch.empty(rows, 1, 1, device="meta", dtype=torch.bfloat16).expand(rows, 3, 1)
        assert _batch.plan(x).read.WIDE == wide
        two = torch.empty(2, 1, 2**31 + 8, device="meta", dtype=torch.bfloat16)
        assert _batch.plan(two).read.WIDE


def test_compiled_training_moves_statistics(device: str) -> None:
    """One graph, forward and backward; the running statistics move as without torch.compile."""
    x = torch.randn(4, 6, 5, 3, device=device)
    w, b = torch.randn(2, 6, device=device)

    def step(x, mean, var, w, b):
        y = ridgeline.batch_norm(x, mean, var, w, b, training=True, activation="relu", impl=IMPL)
        return y.square().sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        statistics = [torch.zeros(6, device=device), torch.ones(6, device=device)]
        loss = run(leaves[0], *statistics, *leaves[1:])
        found.append((loss, *torch.autograd.grad(loss, leaves), *statistics))
    torch.testing.assert_close(*found)
