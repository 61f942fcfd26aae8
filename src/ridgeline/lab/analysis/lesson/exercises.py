"""The exercises of the lessons: an op, small tests that common mistakes fail, and the call to compile and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Make = Callable[["torch.Generator"], list["torch.Tensor"]]


@dataclass(frozen=True)
class Probe:
    """A test of an exercise.

    make: f(generator) -> the tensors of the call. options: the learner's keyword arguments. hint: the key of the
    sentence that a failure shows.
    """

    name: str
    make: Make
    hint: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exercise:
    """What a learner writes: a function named as the op.

    tensors: how many tensors the function takes. options: its keyword arguments; other options of the op are dropped.
    fixed: arguments that the op takes behind the tensors, and the learner's function does not. case, dtype: the call to
    compile and to time. rungs: those of ours to compare with, the best one last. products: whether the limit is matrix
    products. stores: whether what is written counts beside what is read.
    """

    op: str
    signature: str
    probes: tuple[Probe, ...]
    case: str
    dtype: str
    rungs: tuple[str, ...]
    tensors: int = 1
    fixed: tuple[Any, ...] = ()
    options: tuple[str, ...] = ()
    products: bool = False
    stores: bool = True


def normal(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Make:
    """Returns a maker of one normally distributed tensor."""

    def make(dice: torch.Generator) -> list[torch.Tensor]:
        import torch

        return [(scale * torch.randn(shape, generator=dice)).to(getattr(torch, dtype))]

    return make


def several(*makes: Make) -> Make:
    """Returns a maker of the tensors of several makers."""
    return lambda dice: [tensor for make in makes for tensor in make(dice)]


def changed(make: Make, change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    """Returns a maker whose tensors are changed: a view, or other numbers."""
    return lambda dice: [change(tensor) for tensor in make(dice)]


def _ordered(keys: int, first: float) -> Make:
    """Returns a maker of a positive q, keys from `first` in equal steps to -first, and a normal v."""

    def make(dice: torch.Generator) -> list[torch.Tensor]:
        import torch

        k = torch.linspace(first, -first, keys)[None, None, :, None].repeat(1, 1, 1, 32)
        q = torch.rand((1, 1, 32, 32), generator=dice) + 0.5
        return [q, k, torch.randn((1, 1, keys, 32), generator=dice)]

    return make


def _low(queries: int, keys: int) -> Make:
    """Returns a maker of a positive q and negative k, whose scores are all far below 0, and a normal v."""
    positive = changed(normal(1, 1, queries, 32), lambda q: 5 + q.abs())
    negative = changed(normal(1, 1, keys, 32), lambda k: -5 - k.abs())
    return several(positive, negative, normal(1, 1, keys, 32))


def _whole(*shape: int) -> Make:
    """Returns a maker of a float16 matrix of small whole numbers, whose products have exact sums."""
    return changed(normal(*shape, dtype="float16"), lambda x: x.round())


def _heads_inside(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _qkv(queries: int, keys: int, scale: float = 1.0, dtype: str = "float32", heads: int = 1) -> Make:
    wide = normal(1, heads, keys, 32, dtype=dtype)
    return several(normal(1, heads, queries, 32, dtype=dtype, scale=scale), wide, wide)


GELU = Exercise(
    "gelu",
    "gelu(x)",
    (
        Probe("1024 elements, float32", normal(1024), "hint.plain"),
        Probe("1000 elements: no multiple of a block", normal(1000), "hint.tail"),
        Probe("the first 96 of 160 columns", changed(normal(32, 160), lambda x: x[:, :96]), "hint.strides"),
        Probe("large inputs, to 100", normal(2048, scale=30.0), "hint.large"),
        Probe("float16", normal(2048, dtype="float16", scale=4.0), "hint.half"),
    ),
    "16384x16384 tanh",
    "float32",
    ("cuda_double", "cuda", "cuda_packed", "triton"),
    fixed=("tanh",),
)
REDUCE_SUM = Exercise(
    "reduce_sum",
    "reduce_sum(x)",
    (
        Probe("1024 numbers of 0 to 1", changed(normal(1024), lambda x: x.abs() / 4), "hint.plain"),
        Probe("1000 numbers: no multiple of a block", changed(normal(1000), lambda x: x.abs() / 4), "hint.tail"),
        Probe("40000 numbers: several blocks", changed(normal(40000), lambda x: x.abs() / 4), "hint.blocks"),
        Probe(
            "every second column of 32x256",
            changed(normal(32, 256), lambda x: (x.abs() / 4)[:, ::2]),
            "hint.strides",
        ),
        Probe(
            "65536 numbers near 1/4, float16",
            changed(normal(65536, dtype="float16"), lambda x: (1 + x.abs() / 16) / 4),
            "hint.sum-half",
        ),
    ),
    "32 Mi",
    "float32",
    ("v0", "v2", "v8", "cuda_best"),
    stores=False,
)
SOFTMAX = Exercise(
    "softmax",
    "softmax(x)",
    (
        Probe("4 rows of 128", normal(4, 128), "hint.plain"),
        Probe("5 rows of 100: no power of two", changed(normal(5, 100), lambda x: x - 3), "hint.padding"),
        Probe("scores of 100 and more", normal(4, 128, scale=100.0), "hint.max"),
        Probe("the first 96 of 160 columns", changed(normal(4, 160), lambda x: x[:, :96]), "hint.strides"),
        Probe("float16, rows of 1000", normal(3, 1000, dtype="float16"), "hint.half"),
    ),
    "16384x16384",
    "float32",
    ("cuda_uncached", "cuda_block", "triton_row", "triton"),
)
TRANSPOSE = Exercise(
    "transpose",
    "transpose(x)",
    (
        Probe("64x64", normal(64, 64), "hint.plain"),
        Probe("64x128: a rectangle", normal(64, 128), "hint.rectangle"),
        Probe("33x70: no multiple of a tile", normal(33, 70), "hint.tile-tail"),
        Probe("the first 64 of 100 columns", changed(normal(64, 100), lambda x: x[:, :64]), "hint.strides"),
    ),
    "8192x8192",
    "float32",
    ("cuda", "cuda_tile", "cuda_padded", "cuda_packed"),
)
MATMUL = Exercise(
    "matmul",
    "matmul(a, b)",
    (
        Probe("64x64 by 64x64, float16", several(*[_whole(64, 64)] * 2), "hint.plain"),
        Probe(
            "K = 100: no multiple of a tile",
            several(_whole(64, 100), _whole(100, 64)),
            "hint.k-tail",
        ),
        Probe(
            "33x64 by 64x90",
            several(_whole(33, 64), _whole(64, 90)),
            "hint.product-tail",
        ),
        Probe(
            "b a transposed view",
            several(_whole(64, 64), changed(_whole(128, 64), lambda b: b.T)),
            "hint.product-strides",
        ),
        Probe(
            "K = 2048, all numbers near 1",
            several(
                *[
                    changed(normal(*shape, dtype="float16"), lambda a: 1 + a.abs() / 16)
                    for shape in ((16, 2048), (2048, 16))
                ]
            ),
            "hint.dot-half",
        ),
    ),
    "4096x4096x4096",
    "bfloat16",
    ("triton", "triton_persistent"),
    tensors=2,
    products=True,
)
ATTENTION = Exercise(
    "attention",
    "attention(q, k, v, causal=False)",
    (
        Probe("32 queries, 64 keys, D 32, the first score the largest", _ordered(64, 1.0), "hint.scale"),
        Probe("a maximum that rises from block to block", _ordered(128, -1.0), "hint.rescale"),
        Probe("50 queries, 77 keys: no multiple of a tile", _qkv(50, 77), "hint.keys"),
        Probe("scores of 100 and more", _qkv(32, 64, scale=100.0), "hint.score-max"),
        Probe("scores of -100 and less", _low(32, 64), "hint.start"),
        Probe("heads between the positions", changed(_qkv(32, 64, heads=2), _heads_inside), "hint.head-strides"),
        Probe("causal, 64 positions", _qkv(64, 64), "hint.causal", {"causal": True}),
        Probe("float16", _qkv(32, 128, dtype="float16"), "hint.attention-half"),
    ),
    "4x16x4096x128 causal",
    "bfloat16",
    ("triton", "gluon"),
    tensors=3,
    options=("causal",),
    products=True,
)
EXERCISES = {3: GELU, 4: REDUCE_SUM, 5: SOFTMAX, 6: TRANSPOSE, 7: MATMUL, 8: ATTENTION}
