"""`profile`: the table and flame graphs show what ran; traces of a GPU; missing Nsight tools; bad input."""

import argparse
import json
import re
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ridgeline import device
from ridgeline.lab.analysis import flame, ladder, profile
from ridgeline.lab.measurement import counters, nsight
from ridgeline.op import RidgelineError, registry
from ridgeline.select import why_not

USER = """
import torch

def step():
    return helper(torch.ones(300, 300))

def helper(x):
    return x @ x

def picky(x):
    return x

def broken():
    raise KeyError("nope")
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(USER)
    return path


def run(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    profile.arguments(parser)
    return profile.main(parser.parse_args([str(w) for w in words]))


def figures(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def titles(path: str) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]


def test_a_function_of_ones_own(user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = figures(capsys, f"{user}:step", "--steps", 2, "--out", tmp_path / "out")
    (product,) = [line for line in told["lines"] if line["name"] == "aten::mm"]
    assert product["calls"] == 1
    assert product["cpu_us"] > 0
    frames = titles(told["files"]["flame_cpu"])
    assert [t for t in frames if "user.py(7): helper" in t]
    assert [t for t in frames if t.startswith("aten::mm")]
    assert not [t for t in frames if "profile.py" in t and "span" not in t]
    assert re.search(r"^step;.*;aten::mm \d+$", Path(told["files"]["stacks_cpu"]).read_text(), flags=re.MULTILINE)
    assert json.loads(Path(told["files"]["trace"]).read_text())["traceEvents"]


def test_an_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = figures(capsys, "gelu", "--impl", "naive", "--steps", 2, "--out", tmp_path)
    names = {line["name"] for line in told["lines"]}
    assert {"aten::mul", "gelu forward", "gelu backward"} <= names
    assert told["target"].startswith("gelu naive, ")


def test_the_table_is_printed(user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{user}:step", "--steps", 1, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "aten::mm" in out
    assert "flame-cpu.svg" in out


def test_nsight_is_driven_or_said_to_be_missing(
    user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = figures(capsys, f"{user}:step", "--steps", 1, "--out", tmp_path, "--nsys", "--ncu")
    assert [(t["name"], t["ok"]) for t in told["tools"]] == [("nsys", False), ("ncu", False)]
    assert "not installed" in told["tools"][0]["said"]
    fake = tmp_path / "ncu"
    fake.write_text('#!/bin/sh\nfor a; do echo "$a"; done > "$0.args"\necho "==ERROR== ERR_NVGPUCTRPERM"\nexit 1\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    told = figures(capsys, f"{user}:step", "--steps", 1, "--out", tmp_path, "--ncu")
    assert "ERR_NVGPUCTRPERM" in told["tools"][0]["said"]
    words = (tmp_path / "ncu.args").read_text().splitlines()
    assert words[words.index("--clock-control") + 1] == "none"
    assert run(*words[words.index("profile") + 1 :]) == 0
    assert words[words.index("-m") + 1 :][:3] == ["ridgeline", "profile", f"{user}:step"]


def test_the_figures_of_ncu() -> None:
    table = """==PROF== noise
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","gelu_fwd","GPU Speed Of Light Throughput","Duration","us","120.5"
"0","gelu_fwd","GPU Speed Of Light Throughput","DRAM Throughput","%","91.2"
"1","gelu_bwd","Launch Statistics","Registers Per Thread","register/thread","32"
"""
    assert nsight.kernels(table) == [
        {"kernel": "gelu_fwd", "time": "120.5 us", "DRAM": "91.2 %"},
        {"kernel": "gelu_bwd", "registers": "32 register/thread"},
    ]


def test_the_counters_of_rungs() -> None:
    """An empty kernel separates the rungs. A rung's sums add up over its kernels; else the longest kernel counts."""
    name = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
    table = f"""==PROF== noise
"ID","Kernel Name","gpu__time_duration.sum","{name}"
"","","us",""
"0","empty","1.1","0"
"1","naive","120.5","4,194,304"
"2","empty","1.1","0"
"3","first","2.5","7"
"4","second(float*)","22.5","8"
"5","empty","1.1","0"
"""
    place = {
        "type": "counter",
        "status": "ok",
        "op": "transpose",
        "case": "8192x8192",
        "dtype": "float32",
        "direction": "forward",
        "counter": name,
    }
    rungs = [place | {"impl": impl} for impl in ("naive", "shared", "idle")]
    found = list(counters.rows(rungs, table))
    refused = place | {"status": "unsupported", "reason": "it is too old", "impl": "tma"}
    assert list(counters.rows([rungs[0], refused, *rungs[1:]], table)) == [refused, *found]
    assert [(row["impl"], row["value"], row.get("before"), row["kernel"]) for row in found] == [
        ("naive", 4194304, None, "naive"),
        ("shared", 15, 4194304, "second"),
    ]
    rate = "sm__warps_active.avg.pct_of_peak_sustained_active"
    rates = list(counters.rows([rung | {"counter": rate} for rung in rungs], table.replace(name, rate)))
    assert [(row["impl"], row["value"], row.get("before")) for row in rates] == [
        ("naive", 4194304, None),
        ("shared", 8, 4194304),
    ]
    unnamed = rungs[0] | {"counter": None}  # it runs for the implementation after it
    assert list(counters.rows([unnamed, *rungs[1:]], table)) == found[1:]
    for other in ({"op": "copy"}, {"case": "32768x32768"}, {"dtype": "bfloat16"}):
        assert "before" not in list(counters.rows([rungs[0] | other, *rungs[1:]], table))[1]
    with pytest.raises(ValueError, match="zip"):
        list(counters.rows(rungs[:2], table))
    facts = {"type": "bench", "run": "1", "peer": False, "status": "ok", "kind": "cuda", "seconds": {"median": 1e-3}}
    steps = ladder.ladder([*[place | facts | {"impl": impl} for impl in ("naive", "shared")], *found], "transpose")
    assert [ladder.counted(step["counted"]) for step in next(iter(steps.values()))] == [
        f"{name} 4.19 M",
        f"{name} 15.0, before 4.19 M",
    ]


def test_a_rung_has_its_turn_in_the_first_case_that_it_takes() -> None:
    """Compared with the rung before; a rung that supports none gives the reason for the first case."""
    takes = {
        "warp": ["long", "short"],
        "packed": ["long", "short"],
        "short": ["short"],
        "complex": [],
        "plain": [],
        "bulk": ["long"],
    }

    def refusal(op: str, case: str, dtype: str, rung: str) -> str | None:
        return None if case in takes[rung] else f"{rung} takes no {case} {dtype}"

    rungs = [
        ("warp", ""),
        ("packed", "issued"),
        ("short", "lanes"),
        ("complex", "dram"),
        ("plain", ""),
        ("bulk", "dram"),
    ]
    found = list(counters.turns([["gemv", [["long", "float32"], ["short", "float16"]], rungs]], refusal))
    assert [(r["impl"], r["case"], r["dtype"], r["counter"], r.get("reason")) for r in found] == [
        ("warp", "long", "float32", "", None),
        ("packed", "long", "float32", "issued", None),
        ("packed", "short", "float16", "", None),
        ("short", "short", "float16", "lanes", None),
        ("complex", "long", "float32", "dram", "complex takes no long float32"),
        ("bulk", "long", "float32", "dram", None),
    ]


@pytest.mark.parametrize(
    "name", [name for name, op in registry().items() if any(rung.counter for rung in op.implementations.values())]
)
def test_every_rung_with_a_counter_takes_a_benchmark(name: str) -> None:
    """Otherwise its counter would never be read."""
    op = registry()[name]
    with device.pretend("sm_90"):
        for rung in [rung for rung in op.implementations.values() if rung.counter]:
            calls = [case.make(dtype, "meta")[0] for case in op.cases if case.use == "bench" for dtype in case.dtypes]
            assert any(why_not(rung, *args) is None for args in calls), rung.name


def event(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_gpu_time_stands_under_what_launched_it(tmp_path: Path) -> None:
    events = [
        event("python_function", "cli.py(1): main", 0, 100),
        event("user_annotation", "step", 10, 60),
        event("cpu_op", "aten::mm", 20, 30),
        event("cuda_runtime", "cudaLaunchKernel", 25, 5, correlation=7),
        event("cuda_driver", "cuLaunchKernelEx", 55, 5, correlation=8),
        event("cpu_op", "MmBackward", 30, 20, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 35, 5, tid=2, correlation=9),
        event("cpu_op", "aten::outside", 90, 5),
        event("kernel", "gemm<a, b>", 40, 400, tid="stream 7", correlation=7),
        event("kernel", "_fwd", 450, 100, tid="stream 7", correlation=8),
        event("kernel", "gemm<a, b>", 550, 500, tid="stream 7", correlation=9),
    ]
    host, gpu = flame.stacks({"traceEvents": events}, "step")
    step, product = ("step", "range"), ("aten::mm", "op")
    assert host[step,] == 25
    assert host[step, product] == 25
    assert sum(own for path, own in host.items() if path[0] == step) == 60
    assert not [path for path in host if ("aten::outside", "op") in path]
    launch = ("cudaLaunchKernel", "runtime")
    assert gpu == {
        (step, product, launch, ("gemm<a, b>", "gpu")): 400,
        (step, ("cuLaunchKernelEx", "runtime"), ("_fwd", "gpu")): 100,
        (("other thread", "range"), ("MmBackward", "op"), launch, ("gemm<a, b>", "gpu")): 500,
    }
    assert "step;aten::mm;cudaLaunchKernel;gemm<a, b> 400000\n" in flame.folded(gpu)
    assert [(name, depth, left, time) for (name, _), depth, left, time in flame.frames(gpu)] == [
        ("step", 0, 0, 500),
        ("aten::mm", 1, 0, 400),
        ("cudaLaunchKernel", 2, 0, 400),
        ("gemm<a, b>", 3, 0, 400),
        ("cuLaunchKernelEx", 1, 400, 100),
        ("_fwd", 2, 400, 100),
        ("other thread", 0, 500, 500),
        ("MmBackward", 1, 500, 500),
        ("cudaLaunchKernel", 2, 500, 500),
        ("gemm<a, b>", 3, 500, 500),
    ]
    path = tmp_path / "flame.svg"
    path.write_text(flame.svg(gpu, "a < b", steps=1))
    assert [t for t in titles(str(path)) if t.startswith("gemm<a, b>\n400 us per step, 40%")]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{user}", "names no function"),
        ("{user}:nix", "has no function 'nix'; it has step, helper, picky, broken"),
        ("{user}:picky", "calls a function without arguments, and .*picky needs some"),
        ("{user}:broken", r"KeyError: 'nope' \(.*user.py:14\)"),
        ("nix.py:f", "no Python file 'nix.py'"),
        ("nix", "there is no op 'nix'"),
    ],
)
def test_bad_targets(target: str, words: str, user: Path, tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match=words):
        run(target.format(user=user), "--out", tmp_path / "out")


def test_bad_options(user: Path, tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match="--steps must be 1 or more, and is 0"):
        run(f"{user}:step", "--steps", 0)
    with pytest.raises(RidgelineError, match="cannot be written"):
        run(f"{user}:step", "--out", user)
    with pytest.raises(RidgelineError, match="no dtype 'int8'"):
        run("gelu", "--dtype", "int8", "--out", tmp_path)
