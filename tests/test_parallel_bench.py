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
from ridgeline.lab.measurement import parallel_ranks
from ridgeline.lm.sizes import SIZES
from ridgeline.parallel import groups

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
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        if row["rung"] == "alone":
            continue
        assert row["checked"]
        assert row["calls"] == row["calls_predicted"], row
        assert row["bytes_moved"] == row["bytes_predicted"], row
        assert row["predicted"] > 0
        if row["part"] != "collectives":
            there, formula = row["memory"], row["memory_predicted"]
            assert all(abs(there[name] - formula[name]) <= 0.02 * formula[name] for name in there), row
    assert {r["rung"] for r in rows if r["part"] == "data"} > {"naive", "engine", "buckets-0.05"}


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
    assert run("--dry", "fsdp") == 0
    assert "fsdp, world 2, by formula" in capsys.readouterr().out


def rows_of_a_faulty_engine() -> list[Any]:
    """Gradients are not divided: the check must say so, and nothing is timed."""
    work = parallel_ranks.Work(("data",), (), SIZES["tiny"], 16, 2, "torch", 0.01, only=("flat",))
    with mock.patch.object(torch.Tensor, "div_", lambda sums, world: sums):
        return parallel_ranks.rows(work, torch.device("cpu"))


def test_a_wrong_rung_is_not_timed() -> None:
    _, row = groups.spawn(rows_of_a_faulty_engine, 2)[0]
    assert "after two steps" in row["wrong"]
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
