"""`ridgeline lm profile`: who owns each event, gaps, reads by the host, and the tables on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace as Event

import pytest
import torch

from ridgeline import cli
from ridgeline.lm import owners, profile, setup
from ridgeline.lm.owners import MODULE, NODE, OP, PHASE, Owner, Ranges

TINY = ("--size", "tiny", "--batch", "2", "--context", "16", "--device", "cpu")
FEW = ("--warmups", "1", "--steps", "1")


def built(*arguments: str) -> setup.Setup:
    parser = argparse.ArgumentParser()
    setup.flags(parser)
    return setup.build(parser.parse_args([*TINY, *arguments]))


def figures(capsys: pytest.CaptureFixture[str], *arguments: str):
    assert cli.main(["lm", "profile", *TINY, *FEW, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def work(*arguments: str) -> list[owners.Item]:
    made = built("--impl", "torch", *arguments)
    ranges = Ranges(made.plain)
    profile.steps(made, ranges, 1)
    items, _ = profile.recorded(made, ranges, 1, None)
    ranges.remove()
    return items


def products(items: list[owners.Item], phase: str, place: str) -> int:
    return sum(
        i.name == "aten::mm" and i.owner.phase == phase and i.owner.place == place and i.owner.part == "layer 1"
        for i in items
    )


@pytest.mark.parametrize("every", [0, 1, 2])
def test_backward_belongs_to_the_module_that_ran_forward(every: int) -> None:
    """A linear layer has one product forward and two backward, with recomputation one more."""
    items = work("--checkpoint", str(every))
    for place in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"):
        found = [products(items, phase, place) for phase in profile.PHASES]
        assert found == [1, 1, 1 if every else 0, 2, 0], place
    # the last product of what is made again is skipped if nothing needs its result
    assert products(items, "backward", "mlp.down_proj") == 2
    assert [products(items, p, "mlp") for p in ("forward", "backward")] == [2, 4]


def test_phases_and_kinds() -> None:
    items = work()
    assert {i.owner.phase for i in items} == {"inference", "forward", "backward", "optimizer"}
    assert {i.kind for i in items} == set(owners.KINDS)
    assert {i.owner.part for i in items} >= {"embedding", "layer 0", "layer 1", "last norm", "loss", "optimizer"}
    assert all(i.owner.op == "attention" for i in items if i.kind == "attention")
    backward = {i.kind for i in items if i.owner.phase == "backward"}
    assert backward >= {"products", "attention", "norms", "loss"}
    assert all(i.owner.module or i.owner.op for i in items if i.owner.phase == "backward" and i.kind == "products")


def event(name: str, start: float, end: float, parent=None, kernels=(), seq: int = -1, fwd: int = 0, thread: int = 1):
    return Event(
        name=name, time_range=Event(start=start, end=end), cpu_parent=parent, sequence_nr=seq, fwd_thread=fwd,
        thread=thread, kernels=[Event(name=n, duration=us) for n, us in kernels], device_type="DeviceType.CPU",
        is_async=False, self_cpu_time_total=end - start,
    )  # fmt: skip


def test_kernels_of_backward_on_another_thread() -> None:
    """As on a GPU: backward runs on autograd's thread, and our kernels are all called _fwd or _bwd."""
    phase = event(PHASE + "forward", 0, 100)
    layer = event(MODULE + "model.layers.3", 1, 90, phase)
    mlp = event(MODULE + "model.layers.3.mlp", 2, 80, layer)
    op = event(OP + "gated_linear", 3, 70, mlp, [("_fwd", 7.0)])
    call = event("_Function", 4, 60, op, [("elementwise_kernel", 1.0)], seq=11)
    node = event(NODE + " _FunctionBackward", 200, 300, None, seq=11, fwd=1, thread=2)
    inner = event("aten::mm", 210, 220, node, [("nvjet_hsh", 5.0), ("_ungate", 2.0)], thread=2)
    add = event(NODE + " torch::autograd::AccumulateGrad", 301, 310, None, [("vectorized_add", 3.0)], thread=2)
    again = event(MODULE + "model.layers.2", 230, 240, node, [("rms_fwd", 4.0)], thread=2)
    items = owners.items([phase, layer, mlp, op, call, node, inner, add, again], gpu=True)
    found = {i.name: (i.owner.phase, i.owner.part, i.owner.place, i.kind) for i in items}
    assert found == {
        "_fwd": ("forward", "layer 3", "mlp", "products"),
        "elementwise_kernel": ("forward", "layer 3", "mlp", "elementwise"),
        "nvjet_hsh": ("backward", "layer 3", "mlp", "products"),
        "_ungate": ("backward", "layer 3", "mlp", "elementwise"),
        "vectorized_add": ("backward", "layer 3", "mlp", "elementwise"),
        "rms_fwd": ("recompute", "layer 2", "layer", "elementwise"),
    }


@pytest.mark.parametrize(
    ("name", "owner", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", Owner("forward"), "copies"),
        ("sm90_xmma_gemm_bf16", Owner("forward", "model.layers.0.mlp"), "products"),
        ("sm90_xmma_gemm_bf16", Owner("forward", "model.layers.0.self_attn", "attention"), "attention"),
        ("_stream", Owner("backward", "", "loss"), "loss"),
        ("nvjet_tst_128", Owner("backward", "", "loss"), "products"),
        ("_step", Owner("optimizer"), "optimizer"),
        ("_bwd", Owner("backward", "model.norm", "norm"), "norms"),
    ],
)
def test_kinds_of_kernels(name: str, owner: Owner, kind: str) -> None:
    assert owners.kind_of(name, owner, gpu=True) == kind


def test_ranges_on_a_cpu_are_the_hosts() -> None:
    assert owners.kind_of("lm::phase:optimizer", Owner("optimizer"), gpu=False) == "host"
    assert owners.kind_of("aten::_fused_adamw_", Owner("optimizer"), gpu=False) == "optimizer"


def test_gaps_say_what_the_host_did() -> None:
    phase = event(PHASE + "forward", 0, 200)
    module = event(MODULE + "model.layers.0.mlp", 5, 90, phase)
    wait = event("cudaStreamSynchronize", 40, 80, module)
    device = [(0, 10), (8, 30), (32, 33), (85, 100), (150, 160), (300, 310)]
    found = owners.gaps(device, [phase, module, wait])
    assert found == [
        (52, "cudaStreamSynchronize in model.layers.0.mlp"),
        (50, "Python in forward"),
        (140, "Python outside all ranges"),
    ]


def test_reads_name_the_line() -> None:
    made = built("--impl", "torch")
    ranges = Ranges(made.plain)
    quiet, printing = (profile.reads(made, ranges, demo) for demo in (None, "print-loss"))
    ranges.remove()
    new = {line: times - quiet.get(line, 0) for line, times in printing.items() if times != quiet.get(line)}
    assert list(new.values()) == [1]
    assert "loss.item()" in next(iter(new))
    assert "lm/profile.py" in next(iter(new))


def test_ranges_leave_no_trace_and_cost_little() -> None:
    made = built("--context", "128")
    before = {name: dict(vars(module)) for name, module in made.plain.named_modules()}
    ranges = Ranges(made.plain)
    assert profile.overhead(made, ranges)["share"] < 0.02
    ranges.remove()
    assert {name: dict(vars(module)) for name, module in made.plain.named_modules()} == before


def test_the_tables_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = figures(capsys, "--impl", "naive", "--checkpoint", "1", "--demo", "print-loss", "--trace", str(trace))
    totals = [sum(sum(row.values()) for row in found[name].values()) for name in ("kinds", "layers", "modules")]
    assert totals == pytest.approx([totals[0]] * 3)
    assert 0 < found["products_share"]["training"] < 1
    halves = found["attention"]
    assert halves["softmax"]["us"] > 0
    assert halves["products"]["flops"] / halves["softmax"]["flops"] == 4 * 16 / 5  # 4 head_dim to 5 a score
    assert found["gaps"] is None
    for name, phases in (("inference", profile.PHASES[:1]), ("training", profile.TRAINING)):
        summed = sum(row[phase] for row in found["layers"].values() for phase in phases)
        assert found["timer"][name]["summed"] == pytest.approx(summed)
        assert found["timer"][name]["timed"] > 0
    assert set(found["demo"]) == {"quiet", "quiet_host", "printing", "printing_host", "reads"}
    assert [line for line in found["demo"]["reads"] if "profile.py" in line and "print(" in line]
    assert not [line for line in found["reads"] if "print(" in line]
    assert "traceEvents" in json.loads(trace.read_text())


def test_it_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["lm", "profile", *TINY, *FEW, "--impl", "naive", "--nsys", "report"]) == 0
    said = capsys.readouterr().out
    for text in ("by kind of work", "by layer", "by module", "longest in inference", "softmax and mask take"):
        assert text in said
    assert "nsys is not installed here" in said
    assert "--cudabacktrace=all" in said


def test_the_steps_that_nsys_records(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(profile, "steps", lambda made, ranges, count: counts.append(count))
    assert cli.main(["lm", "profile", *TINY, "--warmups", "2", "--steps", "3", "--bare"]) == 0
    assert counts == [2, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--compile",), "leave --compile out"),
        (("--nvtx",), "on the CPU"),
        (("--trace", "/nowhere/trace.json"), "there is no such folder"),
        (("--steps", "0"), "a whole number of 1 or more"),
        (("--heads", "3"), "heads"),
        (("--context", "1000000000"), "needs at least"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["lm", "profile", *TINY, *FEW, *arguments])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
