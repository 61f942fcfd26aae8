"""The law of tolerance accepts torch's results and rejects every mutant, in each dtype, forward and backward."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake import fake_op
from ridgeline.lab.measurement import law as laws
from ridgeline.lab.measurement.judge import check
from ridgeline.lab.measurement.law import Law, as_tuple
from ridgeline.op import RidgelineError, get

DTYPES = ("float32", "float16", "bfloat16")


def zeroed(row=..., column=...):
    def mutate(y):
        y = y.clone()
        y[row, column] = 0
        return y

    return mutate


def one(value):
    def mutate(y):
        y = y.clone()
        y[17, 33] = value(y[17, 33])
        return y

    return mutate


MUTANTS = {
    "scale": lambda y: y * 1.01,
    "dropped row": zeroed(row=5),
    "dropped column": zeroed(column=7),
    "one element": one(lambda v: v * 1.5 + 0.01),
    "nan": one(lambda v: float("nan")),
    "infinite": one(lambda v: float("inf")),
    "zeros": torch.zeros_like,
    "a permuted row": lambda y: torch.cat([y[1:2], y[:1], y[2:]]),
}


class Through(torch.autograd.Function):
    """Softmax with a backward changed by a mutation."""

    @staticmethod
    def forward(ctx, x, mutate):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        ctx.mutate = mutate
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        exact, grad = y.float(), dy.float()
        return ctx.mutate((exact * (grad - (exact * grad).sum(-1, keepdim=True))).to(dy.dtype)), None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["64x96", "256x512"])
def test_torch_passes(dtype, case):
    with fake_op(right=lambda x: Through.apply(x, lambda y: y)) as op:
        for name in op.implementations:
            row = check(op, name, case, dtype)
            assert row["ok"], row
            assert set(row["outputs"]) == {"out", "grad_x"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(dtype, mutant):
    mutate = MUTANTS[mutant]
    forward, backward = (lambda x: mutate(torch.softmax(x, -1))), (lambda x: Through.apply(x, mutate))
    with fake_op(forward=forward, backward=backward) as op:
        law = Law.of(op, "64x96", dtype)
        verdict = law.judge(*law.run(op.implementations["forward"], backward=False))
        assert verdict.worst("forward") > 2, verdict
        verdict = law.judge(*law.run(op.implementations["backward"]))
        assert verdict.worst("forward") <= 1
        assert verdict.worst("backward") > 2, verdict
        assert "grad_x" in verdict.reason()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_rung_of_torch_the_reference_in_float32_is_the_yardstick(dtype):
    with fake_op(
        naive=lambda x: torch.softmax(x.float(), -1).to(x.dtype), scaled=lambda x: torch.softmax(x, -1) * 1.01
    ) as op:
        del op.implementations["torch"]
        assert check(op, "naive", "64x96", dtype)["ok"]
        assert not check(op, "scaled", "64x96", dtype)["ok"]


def test_non_finite_values_stand_where_they_belong():
    with fake_op(reference=lambda x: 1 / x, same=lambda x: 1 / x, clamped=lambda x: (1 / x).clamp(-1e3, 1e3)) as op:
        op.implementations.pop("torch")
        x = torch.randn(8, 16)
        x[2, 3], x[4, 5] = 0.0, float("nan")
        law = Law(op, [x])
        assert law.judge([1 / x]).ok
        assert law.judge([(1 / x).clamp(-1e3, 1e3)]).outputs["out"].where == "nonfinite"
        assert law.judge([(1 / x).nan_to_num(0, posinf=float("inf"))]).outputs["out"].where == "nonfinite"


def test_another_shape_or_dtype_fails():
    with fake_op() as op:
        law = Law.of(op, "64x96", "float16")
        y = torch.softmax(law.args[0], -1)
        assert law.judge([y]).ok
        assert law.judge([y.float()]).outputs["out"].where == "form"
        assert law.judge([y.T]).outputs["out"].where == "form"


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (1, 300), (300, 1), (3, 4, 5), (0, 4), (2, 0, 0)])
def test_odd_shapes(shape):
    with fake_op(reference=lambda x: x * torch.sigmoid(x)) as op:
        op.eager("torch", "", torch.nn.functional.silu)
        law = Law(op, [torch.randn(shape, requires_grad=True)])
        assert law.judge(*law.run(op.implementations["torch"])).ok
        if 0 not in shape:
            assert not law.judge([law.args[0] * 1.01]).ok


def test_of_few_elements_torch_runs_more_than_once(monkeypatch):
    """One run of torch may be exact by luck: here it is exact at the given inputs, and eight ulps off beside them."""
    x = torch.linspace(1, 2, 64).reshape(4, 16)
    off = 1 + 8 * torch.finfo(torch.float32).eps

    with fake_op() as op:

        def lucky(y: torch.Tensor) -> torch.Tensor:
            exact = op.reference(y)
            return exact if torch.equal(y, x) else exact * off

        monkeypatch.setitem(op.implementations, "torch", replace(op.implementations["torch"], call=lucky))
        assert Law(op, [x]).judge([op.reference(x) * off]).ok
        assert not Law(op, [x]).judge([op.reference(x) * (1 + 40 * torch.finfo(torch.float32).eps)]).ok
        monkeypatch.setattr(laws, "SMALL", 63)
        assert not Law(op, [x]).judge([op.reference(x) * off]).ok


def test_inputs_stay_as_they_are():
    with fake_op() as op:
        x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
        before = x.detach().clone()
        Law(op, [x])
        assert torch.equal(x.detach(), before)
        assert x.grad is None


def test_big_tensors_are_checked_by_slices(monkeypatch):
    monkeypatch.setattr(laws, "SLICED", 1000)
    with fake_op() as op:
        law = Law.of(op, "256x512", "bfloat16")
        assert law.rows is not None
        assert law.incoming[0].shape == (256, 512)
        outputs, grads = law.run(op.implementations["torch"])
        assert law.judge(outputs, grads).ok
        wrong = outputs[0].clone()
        wrong[-1] = 0
        assert not law.judge([wrong], grads).ok


def test_chunks_add_up(monkeypatch):
    with fake_op() as op:
        whole = Law.of(op, "64x96", "float32")
        monkeypatch.setattr(laws, "CHUNK", 50)
        pieces = Law.of(op, "64x96", "float32")
        y = torch.softmax(whole.args[0], -1) * 1.001
        assert whole.judge([y]).worst() == pytest.approx(pieces.judge([y]).worst(), rel=0.05)


def test_a_reference_that_rounds_is_no_oracle():
    with (
        fake_op(reference=lambda x: torch.softmax(x.float(), -1)) as op,
        pytest.raises(RidgelineError, match="float64"),
    ):
        Law.of(op, "64x96", "float32")


def test_an_unsupported_call_is_a_row_with_the_reason():
    def refuses(x):
        raise RidgelineError("it takes only what it takes")

    with fake_op(refuses=refuses) as op:
        row = check(op, "refuses", "64x96", "float32")
        assert row["ok"] is None
        assert "only what it takes" in row["reason"]


def test_numbers_of_8_bits_are_met_exactly():
    """Checks e4m3 codes to the last one, and by dtype: their bytes as integers are no valid result."""
    codes = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 8)
    standard = laws.Standard(codes, torch.float8_e4m3fn)
    assert standard.judge(codes.clone()).worst == 0
    off = codes.clone()
    off.view(torch.uint8)[3, 4] += 1
    assert standard.judge(off).where == "unequal"
    assert standard.judge(codes.view(torch.uint8)).where == "form"
    assert laws.Standard(codes.view(torch.uint8), torch.uint8).judge(codes).where == "form"


class Seen(TorchDispatchMode):
    """Notes the elements of the largest float64 tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for t in as_tuple(made):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float64:
                Seen.most = max(Seen.most, t.numel())
        return made


def grouped_law(bias: bool = True) -> Law:
    """The law of groups of 0 to 30 rows, and of four rows past the last end."""
    dice = torch.Generator().manual_seed(3)
    sizes, K, N = [17, 0, 30, 9, 24], 40, 36
    given = (torch.randn(s, generator=dice).half() for s in ((84, K), (5, K, N), (5, N)))
    x, w, b = (t.requires_grad_() for t in given)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Law(get("grouped_matmul"), [x, w, ends], {"bias": b} if bias else {})


def test_a_call_of_pieces_is_checked_piece_by_piece(monkeypatch):
    """No float64 copy is as large as the weights of all groups, and each group's mistakes are found."""
    monkeypatch.setattr(laws, "SLICED", 5000)
    monkeypatch.setattr(Seen, "most", 0)
    with Seen():
        law = grouped_law()
        assert law.pieces is not None
        outputs, grads = law.run(law.op.implementations["naive"])
        verdict = law.judge(outputs, grads)
    assert verdict.ok, verdict.reason()
    assert list(verdict.findings()) == ["out", "grad_x", "grad_w"]
    assert 0 < Seen.most < 40 * 36 * 2
    assert grouped_law().judge(outputs, grads).worst() == verdict.worst()
    for at in (*range(5), 82):  # a group each, and a row past the last end
        first = ([0, 17, 17, 47, 56, 80])[at] if at < 5 else at
        changed = [[t.clone() for t in some] for some in (outputs, grads)]
        if at != 1:
            changed[0][0][first] += 0.2
            assert not law.judge(changed[0], grads).ok
            changed[1][0][first] += 0.2
            assert not law.judge(outputs, [changed[1][0], grads[1]]).ok
        if at < 5:
            changed[1][1][at, 3] = changed[1][1][at, 3] * 1.05 + 0.01
            found = law.judge(outputs, [grads[0], changed[1][1]])
            assert not found.ok
            assert "grad_w" in str(found.reason())
    assert law.judge([outputs[0][:-1]], grads).outputs["out"].where == "form"
    assert law.judge([outputs[0].float()], grads).outputs["out"].where == "form"
    assert law.judge(outputs, [grads[0], grads[1].float()]).grads["grad_w"].where == "form"
    assert not law.judge(outputs, [grads[0], None]).ok


def test_pieces_are_no_milder_than_the_whole(monkeypatch):
    """What breaks the law of the whole call breaks that of its pieces."""
    whole = grouped_law(bias=False)
    outputs, grads = whole.run(whole.op.implementations["naive"])
    monkeypatch.setattr(laws, "SLICED", 5000)
    pieces = grouped_law(bias=False)
    for scale in (1.0, 1.0005, 1.002, 1.01):
        wrong = [outputs[0] * scale], [g * scale for g in grads]
        assert pieces.judge(*wrong).worst() > 0.9 * whole.judge(*wrong).worst()
