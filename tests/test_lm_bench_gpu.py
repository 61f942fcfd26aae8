"""The language-model lab's verbs about time on a GPU: figures that a CPU does not have."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch

from ridgeline import cli
from ridgeline.lm import leaderboard, owners, profile, setup
from ridgeline.lm.owners import Ranges
from ridgeline.lm.sizes import SIZES

pytestmark = pytest.mark.gpu
SHAPE = ("--size", "small", "--layers", "2", "--context", "256", "--batch", "2", "--precision", "bfloat16")


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main(["lm", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bench_has_mfu_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "bench", *SHAPE, "--warmups", "2", "--steps", "3")
    assert 0 < row["mfu"] < 1
    assert row["peak_bytes"] > 0
    assert set(row["parts"]) == {"forward", "backward", "optimizer"}


def test_a_grid_goes_on_after_memory_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--impl", "naive", "--batch", "64", "--mode", "backward", "--steps", "2", "--warmups", "1"
    found = rows(capsys, "bench", "--grid", "tiny", "16384,64", "--roof", "1e14", *flags)
    assert found[0]["error"].startswith("out of memory")
    assert "seconds" in found[1]


def test_attention_by_our_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--grid", "80", "--seq", "1024", "--dim", "64", "--dtype", "bfloat16"
    plain, triton = rows(capsys, "attention", *flags, "--impls", "plain,triton")
    assert triton["in_use_bytes"] < plain["in_use_bytes"]
    for row in (plain, triton):
        assert row["in_use_bytes"] == pytest.approx(row["formula_bytes"], rel=0.1)


@pytest.mark.parametrize("every", ["0", "1"])
def test_every_kernel_has_an_owner(every: str) -> None:
    parser = argparse.ArgumentParser()
    setup.flags(parser)
    made = setup.build(parser.parse_args([*SHAPE, "--checkpoint", every]))
    ranges = Ranges(made.plain)
    profile.steps(made, ranges, 2)
    items, events = profile.recorded(made, ranges, 1, None)
    ranges.remove()
    kernels = [e for e in events if "CPU" not in str(e.device_type) and not e.is_user_annotation]
    whole = sum(e.time_range.end - e.time_range.start for e in kernels)
    assert sum(i.us for i in items) == pytest.approx(whole, rel=0.05)
    q = [i for i in items if i.owner.module == "model.layers.1.self_attn.q_proj" and i.kind == "products"]
    phases = [i.owner.phase for i in q]
    assert [phases.count(p) for p in profile.PHASES] == [1, 1, int(every), 2, 0]
    backward = {i.owner.part for i in items if i.owner.phase == "backward"}
    assert {"layer 0", "layer 1", "loss", "last norm", "embedding"} <= backward
    assert {i.kind for i in items} >= {"products", "attention", "norms", "loss", "optimizer"}
    assert set(owners.KINDS) >= {i.kind for i in items}


def test_the_plan_holds_what_a_step_takes() -> None:
    shape = SIZES["small"]
    made = leaderboard.planned(shape, 4096, 2, 20e9, leaderboard.RATE, leaderboard.BANDWIDTH)
    for policy in leaderboard.POLICIES:
        made.policies = [policy] * shape.layers
        made.__post_init__()
        board = leaderboard.Board(made, torch.device("cuda"))
        board.step()
        torch.cuda.reset_peak_memory_stats()
        assert board.step().isfinite()
        assert torch.cuda.max_memory_allocated() <= made.peak - leaderboard.RESERVE + 0.5e9, (
            policy
        )  # cuBLAS's workspaces
        del board
        torch.cuda.empty_cache()
