"""`ridgeline lm leaderboard`: its plan for memory, and that every policy gives the same gradients."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import cli
from ridgeline.lm import leaderboard
from ridgeline.lm.model import Transformer
from ridgeline.lm.sizes import SIZES

BOARD = SIZES["leaderboard"]
RATES = leaderboard.RATE, leaderboard.BANDWIDTH


def rows(capsys: pytest.CaptureFixture[str], *arguments: str):
    assert cli.main(["lm", "leaderboard", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plan(limit: float = 141e9, context: int = 32_768) -> leaderboard.Plan:
    return leaderboard.planned(BOARD, context, 2, limit, *RATES)


def test_the_plan_of_the_assignment() -> None:
    found = plan()
    states = sum(found.parts[name] for name in ("weights", "gradients", "moments"))
    assert states == pytest.approx(65e9, rel=0.01)
    assert 130e9 < found.peak <= 141e9
    assert found.floor["products"] + found.floor["attention"] == pytest.approx(7.6, rel=0.02)  # seconds at 660 TFLOP/s
    assert found.floor["recomputation"] < 0.1 * sum(found.floor.values())


def test_less_memory_means_more_recomputation() -> None:
    plans = [plan(limit) for limit in (95e9, 110e9, 125e9, 141e9, 180e9, 400e9)]
    prices = [p.floor["recomputation"] for p in plans]
    assert prices == sorted(prices, reverse=True)
    assert all(p.peak <= p.limit for p in plans)
    assert set(plans[-1].policies) == {"keep"}
    assert "layer" in plans[0].policies
    for one in plans:  # the last layers keep the most
        assert one.policies == sorted(one.policies, key=leaderboard.POLICIES.index)


def test_no_single_layer_could_keep_more() -> None:
    found = plan()
    for n, policy in enumerate(found.policies):
        for better in leaderboard.POLICIES[leaderboard.POLICIES.index(policy) + 1 :]:
            policies = sorted([*found.policies[:n], better, *found.policies[n + 1 :]], key=leaderboard.POLICIES.index)
            assert replace(found, policies=policies).peak > found.limit


@pytest.mark.parametrize("name", ["leaderboard", "llama-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("policy", leaderboard.POLICIES)
def test_what_a_layer_keeps_is_the_formula(name: str, policy: str) -> None:
    """The formula agrees with the tensors that the kernels of an H200 save, seen on the meta device."""
    assert leaderboard.counted(SIZES[name], policy, 1024) == leaderboard.kept(SIZES[name], policy)


def gradients(model: Transformer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(model.size.vocabulary, (1, 33))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return [p.grad for p in model.parameters()]


def test_every_policy_gives_the_same_gradients() -> None:
    shape = replace(SIZES["tiny"], layers=4, key_heads=2)
    torch.manual_seed(0)
    plain = Transformer(shape, "torch")
    planned = leaderboard.Planned(shape, leaderboard.POLICIES, "torch")
    planned.load_state_dict(plain.state_dict())
    for expected, found in zip(gradients(plain), gradients(planned), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_recomputation_is_the_formula() -> None:
    """At a rate of 1 FLOP/s and with endless bandwidth, the seconds are the operations that a policy adds."""
    shape, tokens = replace(SIZES["tiny"], layers=1), torch.randint(256, (1, 32))

    def flops(policy: str) -> int:
        model = leaderboard.Planned(shape, [policy], "naive")
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        return counter.get_total_flops()

    for policy in ("mlp", "gate", "keep"):
        added = 32 * leaderboard.again(shape, policy, 32, 1.0, float("inf"))
        assert flops(policy) - flops("keep") == added, policy
    # the formula of attention has all pairs' scores in memory, and counts those that no query sees
    seen = 32 * leaderboard.again(shape, "layer", 32, 1.0, float("inf"))
    unseen = shape.scores(1, 32, causal=False) - shape.scores(1, 32)
    assert flops("layer") - flops("keep") == seen + unseen


def test_gradients_add_up_in_place() -> None:
    found = leaderboard.planned(SIZES["tiny"], 16, 2, 4e9, *RATES)
    board = leaderboard.Board(found, torch.device("cpu"))
    assert {p.dtype for p in board.model.parameters()} == {torch.bfloat16}
    board.gradients()
    at = [p.grad.data_ptr() for p in board.model.parameters()]
    board.gradients()
    assert [p.grad.data_ptr() for p in board.model.parameters()] == at
    board.step()
    moments = {s[name].dtype for s in board.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}
    assert moments == {torch.bfloat16}


def test_dry(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--dry")
    assert row["parameters"] == BOARD.parameters
    assert row["counted_bytes"] == {p: leaderboard.kept(BOARD, p) for p in leaderboard.POLICIES}
    assert cli.main(["lm", "leaderboard", "--dry"]) == 0
    assert "8.13 B parameters" in capsys.readouterr().out


def test_steps_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--size", "tiny", "--context", "16", "--steps", "2", "--device", "cpu", "--warm-cache")
    assert len(row["losses"]) == 3
    assert row["losses"][2] < row["losses"][0]  # the same batch again
    assert row["seconds"]["median"] > 0


def test_the_cache_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")  # so that it is put back
    with leaderboard.empty_cache():
        folder = Path(os.environ["TRITON_CACHE_DIR"]).parent
        assert folder.is_dir()
        assert not list(folder.iterdir())
    assert not folder.exists()


def test_the_board_of_2025(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--attention", "--context", "64", "--steps", "1", "--device", "cpu")
    assert set(row["seconds"]) == {"ridgeline", "torch"}
    assert row["floor_seconds"] == pytest.approx(4 * 16 * 64 * (64 * 65 // 2) * 3.5 / 660e12)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--dry", "--memory", "70"), "need at least"),
        (("--dry", "--context", "100000000"), "need at least"),
        (("--dry", "--size", "huge"), "there is no size 'huge'"),
        (("--dry", "--rate", "0"), "--rate must be above 0"),
        (("--steps", "-1"), "a whole number of 1 or more"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["lm", "leaderboard", *arguments])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
