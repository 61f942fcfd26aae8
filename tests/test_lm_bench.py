"""`ridgeline lm bench` and `lm attention`, on the CPU at small sizes."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import cli, cuda
from ridgeline.lm import attention, bench, command, lab, memory
from ridgeline.lm.setup import build
from ridgeline.lm.sizes import SIZES

TINY = ("--size", "tiny", "--batch", "2", "--context", "16", "--device", "cpu")
FEW = ("--warmups", "1", "--steps", "3")


def run(*arguments: str) -> int:
    """Returns the exit code of `ridgeline lm ARGUMENTS` in this process."""
    try:
        return cli.main(["lm", *arguments])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def rows(capsys: pytest.CaptureFixture[str], *arguments: str):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("ridgeline: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("mode", "parts"), [("forward", 1), ("backward", 2), ("step", 3)])
@pytest.mark.parametrize("impl", ["ridgeline", "torch", "naive"])
def test_one_row(mode: str, parts: int, impl: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "bench", *TINY, *FEW, "--mode", mode, "--impl", impl)
    assert list(row["parts"]) == ["forward", "backward", "optimizer"][:parts]
    assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    assert len(row["samples"]) == 3
    assert sum(row["parts"].values()) < 3 * row["seconds"]["high"]
    assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"]["median"])
    assert (row["mfu"], row["peak_bytes"]) == (None, None)  # a CPU has neither


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    return parser.parse_args([*arguments])


def test_a_graph_is_made_once_a_mode_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for CUDA: two steps, the captured one, and replays, which run no Python."""
    made: list[Any] = []

    class Graph:
        replays = 0

        def __init__(self) -> None:
            made.append(self)

        def replay(self) -> None:
            self.replays += 1

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    for name, stand_in in (("CUDAGraph", Graph), ("Stream", Stream), ("current_stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    setup, ran = build(options(*TINY)), list[str]()
    setup.graph, step = True, setup._step
    monkeypatch.setattr(type(setup), "_step", lambda self, mode, *mark: ran.append(mode) or step(mode, *mark))
    marks: list[str] = []
    loss = setup.step("step", marks.append)
    assert setup.step("step", marks.append) is loss
    assert loss.isfinite()
    assert (ran, marks, made[0].replays) == (["step"] * 3, ["graph"] * 2, 2)
    setup.step("forward")
    assert ran[3:] == ["forward"] * 3
    assert made[1].replays == 1
    assert [*setup.graphs] == ["forward"]  # the other's memory is free
    memory.peak_of(setup, "forward")  # a graph takes its memory when it is made
    assert ran[6:] == ["forward"] * 3
    assert len(made) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["ridgeline", "torch"])
def test_a_graph_trains_as_steps_do(impl: str) -> None:
    """Its first replay is the third step: two come before the capture."""
    how = "--size", "tiny", "--batch", "2", "--context", "16", "--impl", impl
    plain, graphed = build(options(*how)), build(options(*how, "--graph"))
    losses = [plain.step("step").item() for _ in range(5)]
    assert [graphed.step("step").item() for _ in range(3)] == pytest.approx(losses[2:], rel=1e-5)


def test_mfu_is_held_against_the_roof(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "bench", *TINY, *FEW, "--roof", "1e9")
    assert row["flops"] == SIZES["tiny"].step(2, 16)
    assert row["mfu"] == pytest.approx(row["flops"] / row["seconds"]["median"] / 1e9)


def test_a_grid_is_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    grid = "--batch", "1", "--grid", "tiny", "16,100000000"
    found = rows(capsys, "bench", "--device", "cpu", *FEW, *grid, "--record", str(file))
    assert [(r["size"], r["context"]) for r in found] == [("tiny", 16), ("tiny", 100_000_000)]
    assert "seconds" in found[0]
    assert found[1]["error"].startswith("out of memory")
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["type"] for r in recorded] == ["lm bench"] * 2
    assert recorded[1]["error"] == found[1]["error"]


def test_memory_that_runs_out_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(options, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")

    monkeypatch.setattr(bench, "_figures", full)
    assert run("bench", "--device", "cpu", "--grid", "tiny", "16,32") == 0
    said = capsys.readouterr().out
    assert said.count("out of memory: CUDA out of memory. Tried to allocate 20 GiB.") == 2
    assert run("bench", *TINY) == 1


def test_the_warm_up_study(capsys: pytest.CaptureFixture[str]) -> None:
    """Each number of warm-ups runs in a process of its own; the last row splits the first step."""
    zero, one, split = rows(capsys, "bench", *TINY, "--warmups", "0,1", "--steps", "2")
    assert (zero["warmups"], one["warmups"]) == (0, 1)
    parts = split["first"]
    assert set(parts) == {"compiling", "loading", "allocating", "running", "other", "whole"}
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["running"] > 0


def test_nvrtc_is_counted_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "compile_source", lambda *args: args)
    before = cuda.compile_source
    with bench.Spent() as spent:
        assert cuda.compile_source(1, 2) == (1, 2)
    assert spent.compiling > 0
    assert cuda.compile_source is before


def test_compilers_are_counted() -> None:
    with bench.Spent() as spent:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert spent.compiling > 0
    torch._dynamo.reset()


def test_the_guide_names_flags_that_exist() -> None:
    text = (Path(__file__).parents[1] / "docs/guide.md").read_text()
    found = [c for c in re.findall(r"`ridgeline lm ([a-z]+ ?[^`]*)`", text) if c != "VERB"]
    assert len(found) >= 10
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.arguments(parser)
    for line in found:
        assert parser.parse_args(shlex.split(line)).lm_verb == line.split()[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("bench", "--size", "huge"), "there is no size 'huge'; the sizes are tiny, small"),
        (("bench", "--grid", "tiny,huge", "16"), "there is no size 'huge'"),
        (("bench", "--grid", "tiny", "16,-1"), "contexts of 1 token or more"),
        (("bench", "--size", "tiny", "--context", "1000000000"), "needs at least"),
        (("bench", "--size", "tiny", "--context", "-4"), "--context must be at least 1, but is -4"),
        (("bench", "--size", "tiny", "--heads", "3"), "heads"),
        (("bench", "--size", "tiny", "--checkpoint", "-1"), "--checkpoint must be 0 or more, but is -1"),
        (("bench", "--size", "tiny", "--steps", "-3"), "a whole number of 1 or more, and got '-3'"),
        (("bench", "--size", "tiny", "--warmups", "1,x"), "a whole number of 0 or more, and got 'x'"),
        (("bench", "--warmups", "0,1", "--grid", "tiny", "16"), "one number of --warmups"),
        (("bench", "--size", "tiny", "--graph", "--device", "cpu"), "--graph makes a step a CUDA graph, which needs"),
        (("bench", "--warmups", "0,1", "--graph"), "a study of warm-ups times steps as the host starts them"),
        (("bench", "--first", "--graph"), "--first times steps as the host starts them: leave --graph out"),
        (("attention", "--impls", "fast"), "there is no implementation 'fast'; there are tiled"),
        (("attention", "--dim", "17"), "no point"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, *arguments)


def test_the_grids_of_the_assignment() -> None:
    assert (len(attention.GRIDS["20"]), len(attention.GRIDS["80"])) == (20, 80)
    assert {p.seq for p in attention.GRIDS["80"]} == {1 << n for n in range(7, 17)}
    largest = attention.Point(8, 16384, 128, "float32", False)
    assert largest.scores == 8 << 30  # the assignment's accounting: 8 GiB
    assert largest.flops == 4 * 8 * 16384**2 * 128


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", ["plain", "tiled", "torch"])
def test_what_attention_keeps_is_the_formula(impl: str, dtype: str, causal: bool) -> None:
    point = attention.Point(2, 128, 32, dtype, causal)
    q, k, v = (torch.randn(2, 1, 128, 32, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
    kept = attention.kept_bytes(lambda: attention.implementation(impl)(q, k, v, causal=causal))
    assert kept == pytest.approx(point.kept(impl), rel=0.01)


def test_attention_without_a_gpu_says_what_is_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--device", "cpu", "--budget", "0.01", "--steps", "2", "--seq", "64", "--dim", "16"
    found = rows(capsys, "attention", *flags, "--impls", "plain,tiled,gluon")
    assert [r["impl"] for r in found] == ["plain", "tiled", "gluon"]
    assert set(found[0]["seconds"]) == {"forward", "backward", "both"}
    assert found[2]["error"].startswith("unsupported: ")
    assert run("attention", *flags, "--impls", "tiled,gluon") == 0
    assert "unsupported" in capsys.readouterr().out


def test_compiled_attention_is_timed_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    """Its graph is kept for several backwards."""
    flags = "--device", "cpu", "--budget", "0.01", "--steps", "2", "--seq", "64", "--dim", "16"
    (row,) = rows(capsys, "attention", *flags, "--impls", "compiled")
    assert "error" not in row
    assert set(row["seconds"]) == {"forward", "backward", "both"}


def test_scores_beyond_memory_are_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lab, "memory_of", lambda device: 1 << 30)
    flags = "--device", "cpu", "--grid", "20", "--seq", "16384", "--dim", "16", "--impls", "plain"
    (row,) = rows(capsys, "attention", *flags)
    assert row["error"] == "out of memory: three matrices of scores take 24.0 GiB"


def test_a_point_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_):
        raise ValueError("a mistake\nof many lines")

    monkeypatch.setattr(attention, "_figures", broken)
    assert run("attention", "--device", "cpu", "--seq", "64", "--dim", "16", "--impls", "tiled") == 1
    assert "tiled: failed: ValueError: a mistake\n" in capsys.readouterr().out


def test_an_interrupted_grid_keeps_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def figures(point: Any, *_: Any) -> Any:
        if point.dim == 64:
            raise KeyboardInterrupt
        raise ValueError("no figures")

    monkeypatch.setattr(attention, "_figures", figures)
    flags = "--device", "cpu", "--seq", "64", "--impls", "tiled", "--record", str(tmp_path / "rows.jsonl")
    assert run("attention", *flags) == 130
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["type"], row["dim"], row["error"]) == ("lm attention", 16, "failed: ValueError: no figures")


def test_a_slow_point_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--device", "cpu", "--seq", "64", "--dim", "16", "--impls", "tiled", "--limit", "0"
    (row,) = rows(capsys, "attention", *flags)
    assert row["error"].startswith("too slow")
