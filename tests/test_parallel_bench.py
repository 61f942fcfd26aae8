"""`ridgeline parallel bench` on two processes: its rows, its checks, its sentences; and one run under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ridgeline import cli
from ridgeline.lab.measurement import parallel_bench, parallel_cuts, parallel_rank, parallel_ranks
from ridgeline.lm.sizes import SIZES
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, context, groups, models, pipeline
from ridgeline.parallel.cluster import cluster
from ridgeline.parallel.rung import Traffic

CPU = "symmetric memory needs GPUs, but the tensors are on the cpu"
QUICK = ["--budget", "0.01", "--warmups", "1", "--layers", "1", "--context", "16", "--bytes", "4K"]


def run(*arguments: str) -> int:
    try:
        return cli.main(["parallel", "bench", *arguments])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def test_each_part_is_checked_and_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "rows.jsonl"
    assert run(*QUICK, "--json", "--buckets", "0.05", "--record", str(record)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["part"] for r in rows} == set(parallel_ranks.PARTS)
    assert len(record.read_text().splitlines()) == len(rows)
    for row in rows:
        assert row["wrong"] is None
        assert row["world"] == 2
        if "refused" in row:
            assert (row["rung"], row["refused"]) in [(c.name, CPU) for c in collectives.LADDER if c.kernel]
            continue
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        if row["rung"] == "alone":
            continue
        assert row["checked"]
        assert row["calls"] == row["calls_predicted"], row
        assert row["bytes_moved"] == row["bytes_predicted"], row
        assert row["predicted"] > 0
        if row["part"] not in ("collectives", "ring"):
            there, formula = row["memory"], row["memory_predicted"]
            assert all(abs(there[name] - formula[name]) <= 0.02 * formula[name] for name in there), row
        if row["part"] == "pipeline":
            assert row["live"] == row["live_predicted"], row
            assert 0 < row["idle_predicted"] < 0.3
        if row["part"] in parallel_cuts.PARTS:
            assert row["step_predicted"] > row["predicted"]
    assert len([r for r in rows if r["part"] in parallel_cuts.PARTS]) == 15
    assert {r["rung"] for r in rows if r["part"] == "data"} > {"naive", "engine", "buckets-0.05"}


def refused_rows() -> list[Any]:
    """Rungs that three ranks cannot share, and a pipeline of other sizes."""
    found = []
    for part, only, many in (("ring", "ulysses", None), ("tensor", "blocks", None), ("pipeline", "interleaved", 4),
                             ("pipeline", "1f1b", 4)):  # fmt: skip
        work = parallel_ranks.Work((part,), (), SIZES["tiny"], 8, 1, "torch", 0.01, (), (only,), 1, many)
        found += parallel_ranks.rows(work, torch.device("cpu"))
    return found


def test_what_ranks_cannot_share(capsys: pytest.CaptureFixture[str]) -> None:
    rows = groups.spawn(refused_rows, 3)[0]
    parallel_bench.show(rows)
    out = capsys.readouterr().out
    assert "ulysses, world 3: not run: 3 ranks must divide the 4 heads of q and the 4 of k" in out
    assert "blocks, world 3: not run: 3 ranks must divide the 4 heads of keys" in out
    assert "interleaved, world 3: not run: micro-batches must be a multiple of the 3 ranks, and are 4" in out
    assert "6 layers, 4 micro-batches; rank 0" in out
    assert "idle is the share" in out
    assert "pipeline, memory of a rank, counted" in out
    assert rows[-1]["live"] == rows[-1]["live_predicted"] == 3
    with pytest.raises(RidgelineError, match="ring has no rung of these; it has gathered-plain, ring-plain, gathered"):
        parallel_cuts.ladder("ring", parallel_ranks.Work(("ring",), (), SIZES["tiny"], 8, 1, "torch", 1, only=("x",)))


def test_it_says_what_gloo_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fsdp", *QUICK, "--rungs", "blocks") == 0
    out = capsys.readouterr().out
    assert "this machine's memory and its cores, and of no network" in out
    assert "fsdp, memory of a rank, counted" in out
    assert "blocks" in out
    assert "engine  " not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "nccl", "--world", "2"], "nccl needs a GPU for each"),
        (["--world", "0"], "takes a whole number of 1 or more"),
        (["--bytes", "1Q"], "takes a whole number"),
        (["--size", "huge"], "huge"),
        (["--buckets", "0"], "takes positive numbers"),
        (["rank", "--backend", "gloo"], "rank runs one process without a backend"),
        (["rank", "--cluster", "abacus"], "abacus"),
        (["collectives", "--dry"], "--dry is for strategies"),
        (["data", *QUICK, "--rungs", "blocks"], "data has no rung of these; it has naive, flat, hooks"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "nccl" in arguments and torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs")
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_formulas_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry", "--size", "xl", "--world", "2", "--json") == 0
    rows = {(r["part"], r["rung"]): r for r in json.loads(capsys.readouterr().out)}
    weights = 4 * SIZES["xl"].parameters
    assert rows["data", "naive"]["memory_predicted"]["after"] == 4 * weights
    assert rows["optimizer", "whole"]["memory_predicted"]["after"] == 4 * weights
    assert abs(rows["optimizer", "flat"]["memory_predicted"]["after"] / weights - 3) < 0.001
    assert abs(rows["fsdp", "blocks"]["memory_predicted"]["after"] / weights - 2) < 0.001
    assert rows["data", "flat"]["calls_predicted"] == {"all_reduce": 1}
    assert rows["ring", "ring"]["memory_predicted"] is None
    assert rows["tensor", "blocks"]["calls_predicted"] == {"all_reduce": 4 * SIZES["xl"].layers}
    halves = [rows["pipeline", name]["memory_predicted"]["init"] for name in ("gpipe", "zero-bubble")]
    assert all(abs(half / weights - 0.5) < 0.001 for half in halves)
    assert run("--dry", "fsdp") == 0
    assert "fsdp, world 2, by formula" in capsys.readouterr().out


def test_one_rank_of_a_world_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rank", *QUICK, "--world", "8,64", "--rungs", "torch", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    for row, world in zip(rows, (8, 64), strict=True):
        assert row["wrong"] is None
        assert (row["calls"], row["bytes_moved"]) == (row["calls_predicted"], row["bytes_predicted"])
        assert row["world"] == world
        if row["device"] == "cpu":  # counted, and the last rank's rows may be fewer
            assert row["memory"] == pytest.approx(row["memory_predicted"]["after"], rel=0.02)
        assert 0 < row["host"] <= row["seconds"]["high"]
    # 64 ranks are 8 nodes of 8: a ring leaves a node by the slower of NVLink and 8 cards of the network.
    traffic, links = Traffic().add("all_gather", 64 << 30), cluster("dgx-h200")
    near, far = (parallel_rank.link_seconds(traffic, world, links) for world in (8, 64))
    assert near == pytest.approx((56 << 30) / links.collective, rel=0.01)
    assert far == pytest.approx((63 << 30) / min(links.nvlink, 8 * links.nic), rel=0.01)
    parallel_bench.show_rank(rows)
    assert "rank 0 of 8 under FSDP2" in capsys.readouterr().out


def rows_of_a_faulty_engine() -> list[Any]:
    """Gradients are not divided: the check must say so, and nothing is timed."""
    work = parallel_ranks.Work(("data",), (), SIZES["tiny"], 16, 2, "torch", 0.01, only=("flat",))
    with mock.patch.object(torch.Tensor, "div_", lambda sums, world: sums):
        return parallel_ranks.rows(work, torch.device("cpu"))


def test_a_wrong_rung_is_not_timed() -> None:
    _, row = groups.spawn(rows_of_a_faulty_engine, 2)[0]
    assert "after two steps" in row["wrong"]
    assert "seconds" not in row


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "ring": (context, "merge", lambda o, lse, o2, lse2: o.copy_(o2)),
    "tensor": (models, "summed", lambda x, group=None: x),
    "pipeline": (pipeline.Stage, "loss", lambda stage, y, target: stage.of(y.flatten(0, 1), stage.lm_head.weight,
                                                                          target.flatten()) * 2),
}  # fmt: skip


def rows_of_a_faulty_cut(part: str) -> list[Any]:
    work = parallel_ranks.Work((part,), (), SIZES["tiny"], 16, 2, "torch", 0.01, only=("ring", "blocks", "1f1b"))
    with mock.patch.object(*FAULTS[part]):
        return parallel_ranks.rows(work, torch.device("cpu"))


@pytest.mark.parametrize("part", parallel_cuts.PARTS)
def test_a_wrong_cut_is_not_timed(part: str) -> None:
    _, row = groups.spawn(rows_of_a_faulty_cut, 2, part)[0]
    assert "off by" in row["wrong"] or "another rank" in row["wrong"]
    assert "seconds" not in row


def test_a_rank_alone_sends_nothing() -> None:
    traffic = parallel_ranks.Traffic().add("all_reduce", 1 << 20)
    assert parallel_ranks.Link(1e-5, 0.0, 1).seconds(traffic) == 0
    assert parallel_ranks.Link(1e-5, 1e9, 2).seconds(traffic) == pytest.approx(2e-5 + (1 << 20) / 1e9)


def test_under_torchrun() -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
             "ridgeline", "parallel", "bench", "collectives", *QUICK, "--backend", "gloo", "--json"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1],
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert {row["world"] for row in json.loads(line)} == {2}
