"""Bench on an op of the test's own, on the CPU: each row says what it should, and nothing untrue is timed."""

import argparse
import json
from dataclasses import replace

import pytest
import torch

from fake import fake_op
from ridgeline import op as ops
from ridgeline.lab.analysis import ladder
from ridgeline.lab.measurement import bench, compare, limits, machine, plan, record, roof, store, timing
from ridgeline.lab.measurement.candidates import Candidate
from ridgeline.lab.measurement.judge import check_row
from ridgeline.lab.measurement.law import Law
from ridgeline.op import RidgelineError

FIGURE = {"median": 1e10, "low": 0.9e10, "high": 1.1e10}
ROOF = {name: dict(FIGURE) for name in ("read", "write", "copy", "spread", "add")} | {"launch_us": 5.0}
ROOF["matmul"] = {d: {**FIGURE, "shape": [8, 8, 8]} for d in ("float32", "float16", "bfloat16")}


class Steady:
    """A timer that runs everything and says what it is told."""

    def __init__(self, seconds=1e-3):
        self.seconds, self.writes = seconds, set()

    def round(self, functions, writes=None):
        self.writes.add(writes)
        for function in functions:
            function()
        return [self.seconds for _ in functions]

    def host(self, function, seconds):
        return None

    def peak(self, function):
        return None


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HOUSE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def rows_of(op, timer=None, device="cpu"):
    case = op.case("64x96")
    candidates = [Candidate(rung) for rung in op.implementations.values()]
    return list(timing.bench_case(op, case, "float32", device, candidates, ROOF, budget=0.01, timer=timer or Steady()))


def bench_rows(rows, **wanted):
    return [r for r in rows if r["type"] == "bench" and all(r[k] == v for k, v in wanted.items())]


def raising(error):
    def call(x):
        raise error

    return call


def test_every_outcome_is_a_row():
    mutants = {
        "fast": lambda x: torch.softmax(x, -1),
        "wrong": lambda x: torch.softmax(x, -1) * 1.01,
        "refuses": raising(RidgelineError("fake_softmax: impl='refuses' cannot run this call: it takes nothing")),
        "hungry": raising(torch.OutOfMemoryError("no memory")),
        "breaks": raising(TypeError("it is broken\nin many lines")),
    }
    with fake_op(**mutants) as op:
        rows = rows_of(op)
    for direction in ("forward", "backward"):
        found = {row["impl"]: row for row in bench_rows(rows, direction=direction)}
        assert list(found) == ["torch", *mutants]
        assert {name: row["status"] for name, row in found.items()} == {
            "torch": "ok",
            "fast": "ok",
            "wrong": "wrong",
            "refuses": "unsupported",
            "hungry": "oom",
            "breaks": "wrong",
        }
        assert found["refuses"]["reason"] == "it takes nothing"
        assert found["breaks"]["reason"] == "it raised TypeError: it is broken"
        assert "times the allowed error" in found["wrong"]["reason"]
        assert found["wrong"]["seconds"] is None
        assert found["torch"]["peer"]
        assert found["fast"]["ratio"] == 1
        assert found["fast"]["law"] <= 1
        assert len({tuple(row) for row in found.values()}) == 1
    assert "fake_softmax" not in ops.LOADED


def test_the_share_of_the_roof():
    with fake_op() as op:
        forward, backward = bench_rows(rows_of(op), impl="torch")
    size = 64 * 96 * 4
    assert (forward["read"], forward["write"]) == (size, size)
    assert (backward["read"], backward["write"]) == (2 * size, size)
    assert forward["share"] == pytest.approx(2 * size / 1e10 / 1e-3)
    assert forward["bound"] == "memory"
    assert forward["cached"]


def test_a_wrong_backward_is_only_wrong_backward():
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.softmax(x, -1)

        @staticmethod
        def backward(ctx, dy):
            return dy

    with fake_op(bent=Bent.apply) as op:
        rows = bench_rows(rows_of(op), impl="bent")
    assert [(row["direction"], row["status"]) for row in rows] == [("forward", "ok"), ("backward", "wrong")]


def test_a_backward_that_cannot_run_twice_is_a_row():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.softmax(x, -1)
            ctx.save_for_backward(y)
            ctx.first = True
            return y

        @staticmethod
        def backward(ctx, dy):
            if not ctx.first:
                raise RuntimeError("once is enough")
            ctx.first = False
            (y,) = ctx.saved_tensors
            return y * (dy - (y * dy).sum(-1, keepdim=True))

    with fake_op(once=Once.apply) as op:
        rows = bench_rows(rows_of(op), impl="once")
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert "once is enough" in rows[1]["reason"]


def test_without_a_backward_the_row_says_so():
    with fake_op() as op:
        op.eager("forward_only", "", lambda x: torch.softmax(x.detach(), -1), differentiable=False)
        rows = bench_rows(rows_of(op), impl="forward_only")
    assert [(row["status"], row["reason"]) for row in rows] == [("ok", None), ("unsupported", "it has no backward")]


def test_a_figure_above_the_roof_is_refused(monkeypatch):
    from ridgeline.lab.measurement import clock

    monkeypatch.setattr(clock, "cache_bytes", lambda device: 0)
    size = 2 * 64 * 96 * 4
    with fake_op() as op:
        for seconds, status in ((size / 1.15e10, "refused"), (size / 1.12e10, "ok")):
            (row,) = bench_rows(rows_of(op, Steady(seconds)), impl="torch", direction="forward")
            assert row["status"] == status
        assert "above the measured roof" in bench_rows(rows_of(op, Steady(1e-9)), impl="torch")[0]["reason"]


def test_what_does_not_fit_together_is_timed_apart():
    alive = []

    def make(name):
        def made():
            alive.append(name)
            if name == "giant" or len(alive) > 1:
                alive.clear()
                raise torch.OutOfMemoryError
            return lambda: alive.clear()

        return made

    found = timing.timed({name: make(name) for name in ("a", "b", "giant")}, 0.01, Steady(), "cpu")
    assert found["giant"] is None
    assert found["a"].median == found["b"].median == 1e-3


@pytest.mark.gpu
def test_a_backward_holds_what_its_forward_saved():
    from functools import partial

    from ridgeline.lab.measurement.clock import device_timer

    x = torch.randn(1 << 20, device="cuda", requires_grad=True)

    def made():
        y = x.exp()
        return partial(torch.autograd.grad, y, x, torch.ones_like(y), retain_graph=True)

    found = timing.timed({"exp": made}, 0.01, device_timer("cuda"), "cuda")
    assert found["exp"].held_bytes == 2 * x.nbytes


def test_a_run_is_kept_compared_and_climbed(monkeypatch, capsys):
    monkeypatch.setattr(roof, "measure_roof", lambda *args: ROOF)
    with fake_op(naive=lambda x: torch.softmax(x, -1)) as op:
        runs = [record.record([op], "cpu", quick=True, dtype="float32", budget=0.01) for _ in range(2)]
        rows = store.load(runs[0].path)
        assert [row["type"] for row in rows[:2]] == ["run", "roof"]
        assert {row["type"] for row in rows[2:]} == {"check", "bench"}
        assert len(bench_rows(rows)) == 4
        assert runs[0].path.parent.name == "cpu"
        differences = compare.compare(*(run.rows for run in runs))
        assert len(differences) == 4
        assert {row["change"] for row in differences} <= {"same", "faster", "slower"}
        steps = ladder.ladder(rows, op.name)
        assert [[step["impl"] for step in one] for one in steps.values()] == [["torch", "naive"]] * 2
        assert all(one[0]["gain"] is None and one[1]["gain"] > 0 for one in steps.values())
        bench.show(rows)
        compare.show(differences, rows, rows)
        assert "fake_softmax 256x512 float32 forward" in capsys.readouterr().out
        assert compare.main(argparse.Namespace(before=runs[0].name, after="latest", json=True)) == 0
        assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.fixture
def recording(monkeypatch):
    """Records the test's op on a CPU that calls itself an H100, in two cases. break_at: the case to interrupt."""
    h100 = dict.fromkeys(store.MACHINE) | {"gpu": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(machine, "facts", lambda device: h100)
    monkeypatch.setattr(roof, "measure_roof", lambda *args: ROOF)
    broken = []

    def naive(x):
        if tuple(x.shape) in broken:
            raise KeyboardInterrupt
        return torch.softmax(x, -1)

    def run(break_at=None, **how):
        broken[:] = [break_at]
        return record.record([op], "cpu", budget=0.01, record=True, **how)

    with fake_op(naive=naive) as op:
        op.cases[:] = [replace(case, use="bench") for case in op.cases]
        monkeypatch.setattr(ops, "registry", lambda: {op.name: op})
        monkeypatch.setattr(plan, "chosen_work", lambda ops, *args: [(op, case, "float32") for case in op.cases])
        yield run


def test_a_recorded_run_is_merged_and_kept(recording, tmp_path):
    merges = []
    run = recording(merged=merges.append, commit="0123456789")
    rows = store.load(tmp_path / "results/h100.jsonl")
    assert {row["run"] for row in rows} == {run.name}
    assert {(row["case"], row["impl"]) for row in bench_rows(rows)} == {
        (case, impl) for case in ("64x96", "256x512") for impl in ("torch", "naive")
    }
    assert [len(merge.added) for merge in merges] == [len(bench_rows(rows))] == [len(bench_rows(run.rows))]
    assert (rows[0]["commit"], rows[0]["dirty"]) == ("0123456", True)
    assert run.path.parent == tmp_path / "cache/ridgeline/h100"
    assert len(store.load(run.path)) == len(run.rows) > len(rows)


def test_an_interrupted_run_is_merged_up_to_its_last_whole_case(recording, tmp_path):
    merges, path = [], tmp_path / "results/h100.jsonl"
    with pytest.raises(KeyboardInterrupt):
        recording((256, 512), merged=merges.append)
    assert {row["case"] for row in bench_rows(store.load(path))} == {"64x96"}
    assert len(merges) == 1
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        recording((64, 96), merged=merges.append)
    assert len(merges) == 1
    assert path.read_bytes() == before


def test_what_cannot_be_recorded_is_said_before_anything_is_measured(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(roof, "measure_roof", lambda *args: pytest.fail("measured"))
    for how in ({"quick": True}, {"grid": True}):
        with pytest.raises(RidgelineError, match="leave out --quick and --grid"):
            recording(**how)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/h100.jsonl").write_text("hello\n")
    with pytest.raises(RidgelineError, match="not a results file"):
        recording()
    monkeypatch.setattr(machine, "facts", lambda device: {"gpu": None})
    with pytest.raises(RidgelineError, match="--record is for GPUs and this run is on a CPU"):
        recording()
    assert not store.runs()


def test_patterns_of_cases_and_rungs_left_out(monkeypatch):
    monkeypatch.setattr(roof, "measure_roof", lambda *args: ROOF)
    with fake_op(naive=lambda x: torch.softmax(x, -1)) as op:
        rows = record.record([op], "cpu", case="256x*", without="naive", dtype="float32", budget=0.01).rows
        assert {(row["case"], row["impl"]) for row in bench_rows(rows)} == {("256x512", "torch")}
        with pytest.raises(RidgelineError, match="--without nope: none of fake_softmax has that implementation"):
            record.record([op], "cpu", quick=True, without="nope")
        with pytest.raises(RidgelineError, match="nothing has case '7x"):
            record.record([op], "cpu", case="7x*")


def test_changes_are_judged_by_their_intervals():
    was = {"median": 1.0, "low": 0.98, "high": 1.02}
    for scale, word in ((1.01, "same"), (1.1, "slower"), (0.9, "faster")):
        assert compare.change(was, {k: v * scale for k, v in was.items()}) == word
    assert compare.change(None, was) == "new"
    assert compare.change(was, None) == "gone"


def test_a_wrong_name_is_an_error_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(roof, "measure_roof", lambda *args: pytest.fail("measured"))
    with fake_op() as op:
        for wrong in ({"impl": "none"}, {"case": "none"}, {"dtype": "int3"}, {"budget": -1.0}):
            with pytest.raises(RidgelineError, match=r"has|budget"):
                record.record([op], "cpu", **wrong)
    assert not store.runs()


def test_what_has_no_order_is_drawn_again_for_its_scale_alone():
    """One draw in three that leans is luck; a wrong one, or one of sums that have an order, is not."""

    def once(factor):
        draws = iter([factor, 1.0, 1.0])
        return lambda x: (torch.softmax(x, -1).double() * next(draws)).float()

    lean, wrong = 1 + 5e-8, torch.cat([torch.full((1, 96), 1.1), torch.ones(63, 96)])
    with fake_op(leans=once(lean), breaks=once(wrong), ordered=once(lean)) as op:
        law = Law.of(op, "64x96", "float32", "cpu")
        rungs = [
            replace(op.implementations[name], deterministic=name == "ordered")
            for name in ("leans", "breaks", "ordered")
        ]
        assert [check_row(law, rung, "64x96", "float32", "cpu", False)[0]["ok"] for rung in rungs] == [
            True,
            False,
            False,
        ]


def test_the_timer_knows_what_is_written():
    timer = Steady()
    with fake_op() as op:
        rows_of(op, timer)
    assert timer.writes == {64 * 96 * 4}


def test_the_roof_between_the_measured_mixes():
    roof = {n: {"median": v} for n, v in (("read", 4.0), ("add", 3.0), ("copy", 2.0), ("write", 1.0))}
    for read, write, value in ((1, 0, 4.0), (2, 1, 3.0), (1, 1, 2.0), (0, 1, 1.0)):
        assert limits.bandwidth(roof, read, write) == pytest.approx(value)
    assert 1 < limits.bandwidth(roof, 1, 3) < 2
    roof["spread"] = {"median": 1.9}
    assert limits.bandwidth(roof, 1, 4) == pytest.approx(1.9)


def test_measuring_the_roof(monkeypatch):
    monkeypatch.setattr(roof, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(roof, "CPU_SIDES", (32,))
    found = roof.measure_roof("cpu", quick=True)
    assert set(found) == {"read", "write", "copy", "spread", "add", "matmul", "launch_us"}
    assert set(found["matmul"]) == {"float32", "float16", "bfloat16"}
    for figure in (found["read"], found["copy"], *found["matmul"].values()):
        assert 0 < figure["low"] <= figure["median"] <= figure["high"]
    assert found["matmul"]["float32"]["shape"] == [32, 32, 32]


@pytest.mark.parametrize(("reached", "expected"), [(100.0, 200.0), (250.0, 250.0)])
def test_roofs_of_8_bits_say_what_they_are(reached, expected, monkeypatch):
    """At least twice bfloat16's; and then what torch's product reached stands beside it."""
    half, own = ({"median": m, "low": m - 1, "high": m + 1, "shape": [1, 1, 1]} for m in (100.0, reached))
    monkeypatch.setattr(roof, "_matrix_rate", lambda *args: own)
    found = roof._rate_of_codes("int8", half, None, None, 1.0)
    assert found["median"] == expected
    assert found.get("found") == (own if expected > reached else None)
