"""The check of lessons: right kernels pass all tests, and each common mistake fails the test that has its hint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.boundary import INTERPRETED
from ridgeline.lab.analysis.lesson import worker
from ridgeline.lab.analysis.lesson.exercises import EXERCISES
from ridgeline.lab.analysis.lesson.wording import MESSAGES

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
RIGHT = Path(__file__).with_name("lessons")
NUMBERS = {exercise.op: number for number, exercise in EXERCISES.items()}
# (op, a part of the right file, what a learner writes instead, the hint of a test that then fails)
MISTAKES = [
    ("gelu", "mask=mask).to", "mask=None).to", "tail"),
    ("gelu", "1 + tanh), mask=mask)", "1 + tanh))", "tail"),
    ("gelu", "x = x.contiguous()", "", "strides"),
    ("gelu", "1 - 2 / (tl.exp(2 * z) + 1)", "(tl.exp(2 * z) - 1) / (tl.exp(2 * z) + 1)", "large"),
    ("gelu", ".to(tl.float32)", "", "half"),
    ("gelu", "0.044715", "0.045", "plain"),
    ("reduce_sum", "mask=offsets < n, other=0.0)", "mask=None)", "tail"),
    ("reduce_sum", "x.contiguous().view(-1)", "x.as_strided((x.numel(),), (1,))", "strides"),
    ("reduce_sum", "total[0].to(x.dtype)", "parts[0].to(x.dtype)", "blocks"),
    ("softmax", " - tl.max(x, 0)", "", "max"),
    ("softmax", 'other=float("-inf")', "other=0.0", "padding"),
    ("softmax", "x.stride(0), N", "N, N", "strides"),
    ("transpose", "columns[:, None] * M", "columns[:, None] * N", "rectangle"),
    ("transpose", "columns[None, :], mask=inside)", "columns[None, :])", "tile-tail"),
    ("transpose", "x.stride(0), SIDE", "N, SIDE", "strides"),
    ("matmul", "k[None, :] < K", "k[None, :] < K + 64", "k-tail"),
    ("matmul", "b_mask = (k[:, None] < K) & ", "b_mask = ", "k-tail"),
    ("matmul", "*b.stride()", "N, 1", "product-strides"),
    ("matmul", "rows[:, None] < M) & (columns", "rows[:, None] < M + 64) & (columns", "product-tail"),
    ("matmul", "tl.dot(a, b, total)", "(total + tl.dot(a, b)).to(tl.float16)", "dot-half"),
    ("attention", "s = tl.where(columns[None, :] < keys, s", "s = tl.where(columns[None, :] < keys + 99, s", "keys"),
    ("attention", "row_sum * shrink", "row_sum", "rescale"),
    ("attention", "o * shrink[:, None]", "o", "rescale"),
    ("attention", "tl.maximum(row_max, tl.max(s, 1))", "tl.zeros((BM,), tl.float32)", "score-max"),
    ("attention", "*k.stride()[:3]", "*q.stride()[:2], D", "head-strides"),
    ("attention", "rows[:, None] >= columns", "rows[:, None] > columns", "causal"),
    ("attention", "D**-0.5", "1 / D", "scale"),
]  # fmt: skip


@pytest.mark.parametrize("op", NUMBERS)
def test_a_right_kernel_passes_every_test(op: str) -> None:
    rows = worker.tests(NUMBERS[op], RIGHT / f"{op}.py", "cpu")
    assert len(rows) == len(EXERCISES[NUMBERS[op]].probes)
    assert all(row["ok"] for row in rows), rows


@pytest.mark.parametrize(("op", "right", "wrong", "hint"), MISTAKES)
def test_a_mistake_fails_the_test_with_its_hint(tmp_path: Path, op: str, right: str, wrong: str, hint: str) -> None:
    text = (RIGHT / f"{op}.py").read_text()
    assert right in text
    path = tmp_path / "attempt.py"
    path.write_text(text.replace(right, wrong, 1))
    failed = [row["hint"] for row in worker.tests(NUMBERS[op], path, "cpu") if row["ok"] is False]
    assert failed[:1] == [f"hint.{hint}"], failed


HALF_SUM = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.atomic_add(y_ptr, tl.sum(x, 0))

def reduce_sum(x):
    x = x.contiguous()
    y = torch.zeros((), dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(x.numel(), 256),)](y, x, x.numel(), BLOCK=256)
    return y
"""


def test_a_sum_in_float16_stalls(tmp_path: Path) -> None:
    path = tmp_path / "attempt.py"
    path.write_text(HALF_SUM)
    failed = [row["hint"] for row in worker.tests(NUMBERS["reduce_sum"], path, "cpu") if row["ok"] is False]
    assert failed == ["hint.sum-half"]


def test_every_exercise_has_three_tests_with_hints() -> None:
    for exercise in EXERCISES.values():
        assert len({probe.hint for probe in exercise.probes} - {"hint.plain"}) >= 3
        assert all(probe.hint in MESSAGES for probe in exercise.probes)


# (op, a part of the right file, what a learner writes instead, a part of the reason, the hint)
ERRORS = [
    ("gelu", "tl.exp(2", "tl.expp(2", r"line 12: AttributeError: .*expp", "raised"),
    ("gelu", "    return y\n", "", "returned NoneType", "returned"),
    ("gelu", "y = torch.empty_like(x)", "y = x", "changed its input", "changed"),
    ("gelu", "empty_like(x)", "empty_like(x, dtype=torch.float32)", r"float32 \(2048,\), and float16", "form"),
    ("attention", "p.to(v.dtype)", "p", "same dtype", "attention-half"),
    ("attention", 'tl.full((BM,), float("-inf"), tl.float32)', "tl.zeros((BM,), tl.float32)", "", "start"),
    ("attention", ", o, mask=rows[:, None] < queries)", ", o)", r"writes outside its tensors \(\d+ ", "outside"),
    ("attention", "BM=128", "BM=16", "wrongly finite", "unwritten"),
    ("attention", "triton.cdiv(queries, 128), batch * heads", "triton.cdiv(queries, 128), 1", "", "head-strides"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "right", "wrong", "reason", "hint"), ERRORS)
def test_the_hint_of_an_error_is_about_the_error(
    tmp_path: Path, op: str, right: str, wrong: str, reason: str, hint: str
) -> None:
    text = (RIGHT / f"{op}.py").read_text()
    assert right in text
    path = tmp_path / "attempt.py"
    path.write_text(text.replace(right, wrong, 1))
    failed = next(row for row in worker.tests(NUMBERS[op], path, "cpu") if row["ok"] is False)
    assert failed["hint"] == f"hint.{hint}"
    assert re.search(reason, failed["reason"]), failed["reason"]


def test_libdevice_has_a_hint_of_its_own(tmp_path: Path) -> None:
    text = (RIGHT / "gelu.py").read_text().replace("1 - 2 / (tl.exp(2 * z) + 1)", "libdevice.tanh(z)")
    path = tmp_path / "attempt.py"
    path.write_text("from triton.language.extra import libdevice\n" + text)
    assert worker.tests(3, path, "cpu")[0]["hint"] == "hint.libdevice"
