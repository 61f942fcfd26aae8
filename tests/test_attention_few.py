"""attention with few queries and many keys: keys split into parts, and heads that share them in one tile."""

from typing import Any

import hypothesis
import pytest
import torch
import triton
from hypothesis import strategies as st

import ridgeline
from attention_calls import calls, exact, kernels, lawful, lawful_call, make, near, outcome, qkv, sampled
from ridgeline import device as devices
from ridgeline import tuning
from ridgeline.boundary import Launch, observe
from ridgeline.lab.analysis import catalogue, inspect
from ridgeline.lab.presentation import served
from ridgeline.op import get
from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.ops.attention.hopper import backward as hopper_backward
from ridgeline.ops.attention.hopper import forward as hopper_forward
from ridgeline.ops.attention.triton import forward as triton_forward
from ridgeline.ops.attention.triton import split_keys
from ridgeline.select import select
from test_kernels import OWN

DECODE = {"causal": "bottom_right"}
BAND = {"causal": "bottom_right", "window": (20, None)}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small calls are split too, into the listed number of parts; a GPU chooses for itself only for calls with many
    keys."""
    wanted = [3]
    monkeypatch.setattr(split_keys, "KEYS", 1)
    monkeypatch.setattr(split_keys, "BUSY", 1 << 30)
    monkeypatch.setattr(split_keys, "_split", lambda *_: wanted[0])
    return wanted


def launches(call: Any, *args: Any, **given: Any) -> list[Launch]:
    seen: list[Launch] = []
    with observe(seen.append):
        call(*args, **given)
    return seen


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("q", "k", "many", "given"), [
    ((2, 6, 1, 16), (2, 2, 50, 16), 1, {}),
    ((1, 8, 3, 16), (1, 2, 75, 16), 4, {**DECODE, "return_lse": True}),
    ((2, 2, 17, 40), (2, 2, 60, 40), 3, {"causal": True, "return_lse": True}),
    ((1, 4, 5, 80), (1, 2, 90, 80), 2, {**BAND, "softcap": 2.0}),
    ((1, 2, 4, 24), (1, 1, 200, 24), 5, {"window": (3, 2), "return_lse": True}),
    ((1, 3, 1, 128), (1, 1, 61, 128), 3, {**DECODE, "scale": -0.3}),
    ((1, 4, 7, 16), (1, 1, 5, 16), 2, {**DECODE, "return_lse": True}),
], ids=str)  # fmt: skip
def test_the_law(
    parts: list[int],
    q: tuple[int, ...],
    k: tuple[int, ...],
    many: int,
    given: dict[str, Any],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Forward in parts, and backward from what it saves, with views of arbitrary strides."""
    parts[:] = [many]
    args = [
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv(q, k, device, dtype=dtype)
    ]
    lawful("attention", args, given, ["triton"])
    found = launches(ridgeline.attention, *args, impl="triton", **given)
    assert [one.kernel for one in found] == [split_keys._fwd] + [split_keys._join] * (many > 1)
    assert found[0].grid == (many * k[0] * k[1],)


@kernels
def test_all_options_together(parts: list[int], device: str) -> None:
    """The sample of test_attention, with few queries."""

    @sampled(device)
    @hypothesis.given(call=calls(), rows=st.integers(1, 20), many=st.integers(1, 4))
    def _(call: dict[str, Any], rows: int, many: int) -> None:
        parts[:] = [many]
        B, Hkv, G, _, sk, D = call["sizes"]
        lawful_call(call | {"sizes": (B, Hkv, G, rows, sk, D)}, device, ["triton"])


@kernels
@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("shape", [(2, 4, 3, 40), (1, 4, 1, 40), (4, 3, 1), (2, 1, 3, 40)], ids=str)
def test_masks(parts: list[int], shape: tuple[int, ...], kind: str, device: str) -> None:
    """Each head of a group has its own mask, or all share one."""
    args, whole = qkv((2, 4, 3, 16), (2, 2, 40, 16), device), make(*shape, device=device).detach()
    mask = whole > -0.5 if kind == "bool" else whole if kind == "float" else whole.masked_fill(whole < 0, -torch.inf)
    given = {"mask": mask, "return_lse": True}
    near(outcome(ridgeline.attention, args, impl="triton", **given), exact(args, **given))


@kernels
def test_rows_and_parts_that_see_nothing(parts: list[int], device: str) -> None:
    """Parts that no row sees, parts that some rows do not see, rows that see nothing: no NaN, and lse is -inf only for
    these."""
    args = qkv((1, 4, 9, 16), (1, 2, 90, 16), device)
    mask = torch.ones(9, 90, dtype=torch.bool, device=device)
    mask[2] = mask[:, 30:60] = mask[5, :60] = False
    few = qkv((1, 4, 9, 16), (1, 2, 6, 16), device)
    for some, given, hidden in (
        (args, {"mask": mask}, slice(2, 3)),
        (few, DECODE, slice(0, 3)),
        (few, {"window": (1, 0)}, slice(7, 9)),
    ):
        o, lse, dq, *_ = found = outcome(ridgeline.attention, some, impl="triton", return_lse=True, **given)
        near(found, exact(some, return_lse=True, **given))
        assert not o[:, :, hidden].any()
        assert not dq[:, :, hidden].any()
        assert torch.equal((lse == -torch.inf).any((0, 1)).nonzero()[:, 0], torch.arange(9, device=device)[hidden])


@kernels
def test_maxima_far_apart(parts: list[int], device: str) -> None:
    """The largest score of a part may be hundreds below or above another's; a NaN query affects only its own rows."""
    for slope in (torch.linspace(0, 40, 90), torch.linspace(40, 0, 90)):
        q, k, v = (t.detach() for t in qkv((1, 4, 2, 16), (1, 2, 90, 16), device))
        args = [t.requires_grad_() for t in (q, k * slope.to(device)[:, None], v)]
        near(outcome(ridgeline.attention, args, impl="triton", return_lse=True), exact(args, return_lse=True), 2e-4)
    q = q.detach().clone()
    q[0, 1, 0] = torch.nan
    o, lse = ridgeline.attention(q, k, v, impl="triton", return_lse=True)
    bad = torch.zeros(1, 4, 2, dtype=torch.bool, device=device)
    bad[0, 1, 0] = True
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(o.isnan().all(-1), bad)
    assert torch.equal(o.isnan().any(-1), bad)


@kernels
def test_nothing_depends_on_the_run(parts: list[int], device: str) -> None:
    args = qkv((1, 4, 3, 16), (1, 2, 70, 16), device)
    one, other = (ridgeline.attention(*args, impl="triton", return_lse=True, **DECODE) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_parts_of_the_keys() -> None:
    """One or two programs per multiprocessor; with few keys, no keys or keys that no row sees, at most one part."""
    unbounded = UNBOUNDED
    for turns, rows, columns, left, right, expected in (
        (8, 1, 32768, unbounded, 0, 16),  # 16 blocks of 128 each
        (8, 1, 8192, unbounded, 0, 16),
        (8, 1, 300, unbounded, 0, 1),
        (8, 1, 32768, 1023, 0, 4),
        (128, 1, 8192, unbounded, 0, 2),
        (1, 16, 1 << 20, unbounded, unbounded, 128),
        (300, 1, 32768, unbounded, 0, 1),
        (4, 1, 512, 0, 0, 1),
    ):
        assert split_keys._split(132, turns, rows, columns, left, right, True, 0) == expected
    for columns in (512, 700, 5000, 9999):
        for turns in (1, 7, 40):
            n = split_keys._split(132, turns, 1, columns, unbounded, unbounded, False, 0)
            blocks = -(-columns // split_keys.GRAIN)
            assert (n - 1) * -(-blocks // n) < blocks  # the last part is partly filled
            assert columns // n >= split_keys.LEAST // 2


# --- which implementation serves


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def serves(q: torch.Tensor, k: torch.Tensor) -> tuple[str, str]:
    """Returns the implementations that serve forward and backward on an H100."""
    op, options = get("attention"), (None, None, None, None, 0.1, 0.0, UNBOUNDED, 0, True, 0, 0, 0, "ieee")
    lse = torch.empty(q.shape[:3], device="meta")
    with devices.pretend("sm_90"):
        backward = select(op, None, q, None, q, k, k, q, lse, *options, True, direction="bwd", kernels=True)
        return select(op, None, q, k, k, *options, kernels=True).name, backward.name


@pytest.mark.parametrize(("q", "k", "expected"), [
    ((1, 32, 1, 128), (1, 8, 32768, 128), "triton"),
    ((1, 32, 16, 128), (1, 8, 32768, 128), "triton"),
    ((1, 32, 17, 128), (1, 8, 32768, 128), "gluon"),  # 68 rows
    ((1, 32, 1, 128), (1, 8, 511, 128), "gluon"),
    ((1, 32, 64, 128), (1, 32, 4096, 128), "triton"),
    ((8, 32, 64, 128), (8, 32, 4096, 128), "triton"),
    ((9, 32, 64, 128), (9, 32, 4096, 128), "gluon"),  # heads enough
    ((64, 32, 1, 128), (64, 8, 4096, 128), "triton"),  # that share keys
], ids=str)  # fmt: skip
def test_who_serves(q: tuple[int, ...], k: tuple[int, ...], expected: str) -> None:
    assert serves(meta(*q), meta(*k)) == (expected, "gluon")


@pytest.mark.parametrize(("card", "D", "setting", "expected"), [
    ("h200", 64, "highest", "tf32x3"),
    ("h200", 128, "highest", "tf32x3"),
    ("h200", 256, "highest", "ieee"),  # it spills
    ("h200", 64, "high", "tf32"),
    ("b200", 64, "highest", "ieee"),  # untimed
], ids=str)  # fmt: skip
def test_products_of_float32(card: str, D: int, setting: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full ones are three of TF32's on Hopper, in both directions."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: setting)
    q, seen = torch.empty(2, 4, 300, D, device="meta").requires_grad_(), list[Launch]()
    with devices.pretend(card), observe(seen.append):
        o = ridgeline.attention(q, q, q, impl="triton")
        torch.autograd.grad(o, q, torch.empty_like(o))
    found = {one.kernel.__name__: one.constants["RULES"].PRECISION for one in seen}
    assert found.pop("_delta") == ""
    assert found == dict.fromkeys(("_fwd", "_bwd", "_bwd_dq"), expected)


def test_few_queries_keep_one_product_of_float32() -> None:
    """Their tiles have up to 64 rows. Such tiles faulted with three products of TF32."""
    q, k, seen = torch.empty(2, 64, 8, 80, device="meta"), torch.empty(2, 8, 4096, 80, device="meta"), list[Launch]()
    with devices.pretend("h200"), observe(seen.append):
        ridgeline.attention(q, k, k, impl="triton")
    assert seen[0].kernel is split_keys._fwd
    assert seen[0].constants["RULES"].PRECISION == "ieee"


def test_a_named_rung_runs() -> None:
    q, k = meta(1, 32, 2, 128).requires_grad_(), meta(1, 8, 4096, 128)
    with devices.pretend("sm_90"):
        assert launches(ridgeline.attention, q, k, k, impl="gluon", **DECODE)[0].kernel is hopper_forward._fwd
        seen: list[Launch] = []
        with observe(seen.append):
            o = ridgeline.attention(q, k, k, **DECODE)
            torch.autograd.grad(o, q, torch.empty_like(o))
    assert [one.kernel for one in seen[:2]] == [split_keys._fwd, split_keys._join]
    assert hopper_backward._bwd in [one.kernel for one in seen[2:]]


def test_packed_sequences_stay() -> None:
    q, k = meta(4, 32, 128), meta(4096, 8, 128)
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    with devices.pretend("sm_90"):
        for impl, kernel in ((None, hopper_forward._fwd), ("triton", triton_forward._fwd)):
            assert kernel in [
                one.kernel for one in launches(ridgeline.attention_varlen, q, k, k, cu, cu.clone(), impl=impl)
            ]


def test_what_is_said_of_it() -> None:
    """`explain` names the forward implementation; the tables of results ask for each direction."""
    op = get("attention")
    case = op.case("1x32/8x1 of 32768x128")
    rungs = {rung["impl"]: rung for rung in catalogue.explain(op, case, "bfloat16", "sm_90")["rungs"]}
    assert rungs["triton"]["serves"]
    assert "splits the keys" in rungs["gluon"]["left"]
    for direction, expected in (("forward", "triton"), ("backward", "gluon")):
        rows = [
            {"impl": impl, "case": case.name, "dtype": "bfloat16", "direction": direction}
            for impl in ("gluon", "triton", "torch")
        ]
        found = served.serving(op, rows)
        assert found is not None
        assert found["impl"] == expected


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "sm_100", "gfx942"])
def test_kernels_fit(arch: str) -> None:
    """Tiles of 16, 32 and 64 rows, in each dtype and with each option, have no spills (some on sm_100) and fit in
    shared memory."""
    half, whole, bias = torch.bfloat16, torch.float32, torch.empty(1, 64, 8, 1024, device="meta")
    seen = []
    with devices.pretend(arch), observe(seen.append):
        for heads, rows, D, dtype, given in (
            (32, 1, 16, half, {}),
            (32, 1, 128, half, DECODE),
            (32, 8, 128, half, DECODE),
            (64, 8, 64, torch.float16, BAND),
            (64, 8, 80, half, {"softcap": 3.0}),
            (16, 4, 256, half, DECODE),
            (64, 8, 256, half, BAND),
            (64, 8, 256, half, {"mask": bias}),
            (64, 8, 64, half, {"mask": bias > 0}),
            (32, 1, 256, whole, DECODE),
            (64, 8, 128, whole, {}),
            (32, 8, 256, whole, BAND),
        ):
            q, k = (torch.empty(1, h, n, D, dtype=dtype, device="meta") for h, n in ((heads, rows), (8, 1024)))
            ridgeline.attention(q, k, k, impl="triton", **given)
    assert [one.kernel for one in seen].count(split_keys._join) == 9  # a window leaves one part
    inspect.compile_side_by_side(seen, arch)
    for one in seen:
        found = inspect.of_launch(one)
        spilled = found.spill_loads + found.spill_stores if found.stack else 0
        assert spilled <= (64 if arch == "sm_100" else 0) + (0 if triton.__version__ == OWN else 320), (
            found.kernel,
            one.constants,
            spilled,
        )
        assert found.shared <= devices.known(arch).shared_memory
        assert found.widest_load == 16 or one.kernel is split_keys._join


# --- on a GPU alone


@pytest.mark.gpu
@pytest.mark.parametrize(("q", "k", "given"), [
    ((1, 32, 1, 128), (1, 8, 32768, 128), DECODE),
    ((1, 32, 8, 64), (1, 8, 5000, 64), {**DECODE, "window": (1000, 0), "return_lse": True}),
    ((3, 16, 4, 256), (3, 2, 3001, 256), {"softcap": 20.0, "return_lse": True}),
    ((16, 32, 1, 80), (16, 8, 1111, 80), {**DECODE, "return_lse": True}),
    ((2, 4, 64, 128), (2, 4, 2000, 128), {"causal": True}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(q: tuple[int, ...], k: tuple[int, ...], given: dict[str, Any], dtype: torch.dtype) -> None:
    """Passes the tolerance check, with the same bits each time, by default and captured."""
    args = qkv(q, k, "cuda", dtype=dtype)
    lawful("attention", args, given, ["triton"])
    assert launches(ridgeline.attention, *args, **given)[0].kernel is split_keys._fwd
    given = given | {"return_lse": True}
    with torch.no_grad():
        first = ridgeline.attention(*args, **given)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, ridgeline.attention(*args, **given), strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ridgeline.attention(*args, **given)
        for t in args:
            t.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, ridgeline.attention(*args, **given), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("many", [1, 2, 3, 17, 32, 33, 128])
def test_any_number_of_parts(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including more parts than there are blocks of keys."""
    monkeypatch.setattr(split_keys, "_split", lambda *_: many)
    args = qkv((1, 8, 3, 64), (1, 2, 1500, 64), "cuda", dtype=torch.bfloat16)
    with tuning.listen(lambda request: None):  # no call is replayed from a plan with another number of parts
        lawful("attention", args, {**DECODE, "return_lse": True}, ["triton"])
