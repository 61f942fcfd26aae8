"""nms beyond its cases: a literal greedy oracle, ties, chains across steps, classes, odd boxes, graphs, refusals."""

import pytest
import torch

import ridgeline
from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels
IMPL = "triton" if INTERPRETED or torch.cuda.is_available() else None


def greedy(
    boxes: torch.Tensor, scores: torch.Tensor, threshold: float, classes: torch.Tensor | None = None
) -> list[int]:
    """The rule itself: one box after the other, each against those kept before it."""
    boxes, kept = boxes.float().cpu(), []
    for i in scores.cpu().sort(stable=True, descending=True).indices.tolist():
        rivals = [k for k in kept if classes is None or classes[k] == classes[i]]
        a, b = boxes[i], boxes[rivals]
        sides = (torch.minimum(a[2:], b[:, 2:]) - torch.maximum(a[:2], b[:, :2])).clamp(min=0)
        common = sides[:, 0] * sides[:, 1]
        areas = [(t[..., 2] - t[..., 0]) * (t[..., 3] - t[..., 1]) for t in (a, b)]
        if not (common / (areas[0] + areas[1] - common) > threshold).any():
            kept.append(i)
    return kept


def check(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, classes: torch.Tensor | None = None) -> int:
    kept, count = ridgeline.nms(boxes, scores, threshold, classes=classes, impl=IMPL)
    wanted = greedy(boxes, scores, threshold, classes)
    assert (kept.dtype, kept.shape, count.shape) == (torch.int64, scores.shape, ())
    assert kept[:count].tolist() == wanted
    assert (kept[count:] == -1).all()
    return len(wanted)


def some(n: int, side: float, device: str) -> torch.Tensor:
    corner = torch.rand(n, 2, device=device) * side
    return torch.cat([corner, corner + 10 + 50 * torch.rand(n, 2, device=device)], 1)


@pytest.mark.parametrize(
    ("n", "threshold"), [(1, 0.3), (31, 0.0), (31, -1.0), (200, 0.7), (256, 0.3), (257, 0.3), (300, 1.0), (600, 0.2)]
)
def test_the_rule(n: int, threshold: float, device: str) -> None:
    kept = check(some(n, 100, device), torch.rand(n, device=device), threshold)
    assert kept == n or threshold < 1
    assert kept == 1 or threshold >= 0


def test_equal_scores_keep_their_order(device: str) -> None:
    boxes = some(70, 40, device)
    check(boxes, torch.ones(70, device=device), 0.4)
    check(boxes, torch.randint(0, 3, (70,), device=device).float(), 0.4)
    twins = boxes[:1].expand(40, 4)
    kept, count = ridgeline.nms(twins, torch.ones(40, device=device), 0.5, impl=IMPL)
    assert (int(count), int(kept[0])) == (1, 0)


def test_chains(device: str) -> None:
    """Each box suppresses the next one alone, so every second stays, also across steps of 256: the longest chain."""
    n = 40 if device == "cpu" else 2000
    left = torch.arange(n, device=device) * 4.0
    boxes = torch.stack([left, left * 0, left + 10, left * 0 + 10], 1)
    scores = torch.linspace(1, 0, n, device=device)
    kept, count = ridgeline.nms(boxes, scores, 0.3, impl=IMPL)
    assert kept[:count].tolist() == list(range(0, n, 2))


def test_classes(device: str) -> None:
    """Boxes of two classes never suppress each other; int32 and int64 classes, strided ones too."""
    boxes, scores = some(90, 30, device), torch.rand(90, device=device)
    classes = torch.randint(-2, 3, (90,), device=device)
    alone = check(boxes, scores, 0.3)
    for given in (classes, classes.int(), torch.stack([classes, classes], 1)[:, 1]):
        assert check(boxes, scores, 0.3, given) > alone


def test_boxes_without_area_and_at_the_threshold(device: str) -> None:
    """A quotient of 0 by 0 suppresses nothing; an overlap of just the threshold neither."""
    boxes = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 5, 5], [5, 5, 5, 5], [9, 9, 8, 8.0]], device=device)
    scores = torch.linspace(1, 0, 5, device=device)
    assert check(boxes, scores, 0.5) == 5
    assert check(boxes, scores, 0.49) == 4


@pytest.mark.parametrize("layout", ["transposed", "columns of a larger tensor"])
def test_layouts(layout: str, device: str) -> None:
    boxes, scores = some(100, 60, device), torch.rand(100, 2, device=device)[:, 1]
    given = boxes.T.contiguous().T if layout == "transposed" else torch.cat([boxes, boxes], 1)[:, 2:6]
    check(given, scores, 0.4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_many_boxes(dtype: torch.dtype) -> None:
    for n, side in ((10000, 2000), (5000, 300), (20011, 800)):
        boxes, scores = some(n, side, "cuda").to(dtype), torch.rand(n, device="cuda", dtype=dtype)
        classes = torch.randint(0, 80, (n,), device="cuda")
        for kinds in (None, classes):
            ours, theirs = (ridgeline.nms(boxes, scores, 0.5, classes=kinds, impl=i) for i in ("triton", "torch"))
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@pytest.mark.gpu
def test_the_host_reads_nothing() -> None:
    """A CUDA graph holds a call, and follows other data."""
    boxes, scores = some(3000, 300, "cuda"), torch.rand(3000, device="cuda")
    for _ in range(3):
        ridgeline.nms(boxes, scores, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept, count = ridgeline.nms(boxes, scores, 0.5)
    for _ in range(2):
        boxes.copy_(some(3000, 300, "cuda"))
        scores.uniform_()
        graph.replay()
        wanted = ridgeline.nms(boxes, scores, 0.5, impl="torch")
        assert torch.equal(kept, wanted[0])
        assert torch.equal(count, wanted[1])


def test_nothing_has_a_gradient(device: str) -> None:
    boxes = some(20, 30, device).requires_grad_()
    kept, count = ridgeline.nms(boxes, torch.rand(20, device=device, requires_grad=True), 0.5, impl=IMPL)
    assert not kept.requires_grad
    assert not count.requires_grad


def test_refusals(device: str) -> None:
    boxes, scores = some(5, 30, device), torch.rand(5, device=device)
    for args, classes, sentence in (
        ((boxes[:, :3], scores, 0.5), None, r"boxes must have shape \(N, 4\)"),
        ((boxes, scores[:4], 0.5), None, r"scores must have shape \(5,\)"),
        ((boxes, scores.long(), 0.5), None, "scores must be floating point"),
        ((boxes, scores, "0.5"), None, "threshold must be a number"),
        ((boxes, scores, float("nan")), None, "threshold must be a number"),
        ((boxes, scores, 0.5), scores, "classes must be int64 or int32"),
        ((boxes, scores, 0.5), [1] * 5, "classes must be a tensor, but is list"),
    ):
        with pytest.raises(RidgelineError, match=sentence):
            ridgeline.nms(*args, classes=classes, impl=IMPL)
