"""Tests tune on a synthetic clock: it saves the winner, never a wrong or refused candidate; noise changes nothing."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toy
from ridgeline import tuning
from ridgeline.device import Device
from ridgeline.lab.measurement import tune
from ridgeline.lab.measurement.clock import Measurement
from ridgeline.op import RidgelineError, Spec

pytestmark = pytest.mark.kernels


def clock(seconds: dict[str, float], noise: float = 0.01) -> Callable[..., dict[str, Measurement]]:
    """A clock that gives each function its planned time with noise, and runs it once."""
    generator = torch.Generator().manual_seed(0)

    def measure(functions: dict[str, Callable[[], Any]], **options: Any) -> dict[str, Measurement]:
        for function in functions.values():
            function()
        jitter = {name: torch.randn(30, generator=generator).mul(noise).add(1).tolist() for name in functions}
        return {name: Measurement(tuple(seconds[name] * j for j in jitter[name]), group=0) for name in functions}

    return measure


def run(
    tmp_path: Path, measure: Callable[..., Any], device: str, names: tuple[str, ...] = ("small",), **options: Any
) -> list[tune.Found]:
    cases = [replace(toy.OP.case("small"), name=name) for name in names]
    return tune.tune(
        toy.OP, cases, device=device, folder="sm_00", dtype="float32", measure=measure, configs=tmp_path, **options
    )


NAMES = [tune.label(c) for c in toy.SPACE]


def test_the_fastest_is_saved(tmp_path: Path, device: str) -> None:
    heard: list[tune.Found] = []
    times = {"now": 2.0, NAMES[0]: 2.0, NAMES[1]: 1.0, NAMES[2]: 1.5}
    found = run(tmp_path, clock(times), device, implementation="triton", tell=heard.append)
    assert found == heard
    assert [(f.kernel, f.key, f.config, f.tried, f.refused, f.wrong) for f in found] == [
        ("fwd", "float32", toy.SPACE[1], 3, {}, {})
    ]
    assert found[0].gain == pytest.approx(2, rel=0.02)
    assert json.loads((tmp_path / "sm_00/twice.json").read_text()) == {"fwd": {"float32": toy.SPACE[1]}}


def test_a_sample_is_measured_and_not_saved(tmp_path: Path, device: str) -> None:
    """Every case is searched, even if the kernels' keys are the same."""
    measure = clock({"now": 2.0, NAMES[0]: 2.0, NAMES[1]: 1.0, NAMES[2]: 1.5})
    facts: dict[str, Any] = {"names": ("one", "two"), "implementation": "triton", "directions": ("forward",)}
    found = run(tmp_path, measure, device, save=False, **facts)
    assert [(f.case, f.key, f.config) for f in found] == [
        ("one", "float32", toy.SPACE[1]),
        ("two", "float32", toy.SPACE[1]),
    ]
    assert not list(tmp_path.iterdir())
    assert len(run(tmp_path, measure, device, **facts)) == 1


def test_noise_changes_nothing(tmp_path: Path, device: str) -> None:
    found = run(
        tmp_path, clock({"now": 1.0, NAMES[0]: 1.0, NAMES[1]: 1.001, NAMES[2]: 1.0}), device, implementation="triton"
    )
    assert found[0].config is None
    assert not list(tmp_path.iterdir())


def test_a_wrong_or_refused_candidate_does_not_win(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_is_wrong(y: torch.Tensor, x: torch.Tensor) -> None:
        config = toy._tuned(x, "fwd")()
        if config == toy.SPACE[2]:
            raise MemoryError
        y.copy_(x * (2.01 if config == toy.SPACE[1] else 2))

    monkeypatch.setattr(tune, "_refusal", lambda function: refusal(function))
    monkeypatch.setitem(toy.OP.implementations["triton"].launchers, "fwd", one_is_wrong)
    found = run(
        tmp_path,
        clock({"now": 2.0, NAMES[0]: 1.5, NAMES[1]: 1.0}),
        device,
        implementation="triton",
        directions=("forward",),
    )
    assert found[0].config == toy.SPACE[0]
    assert list(found[0].wrong) == [NAMES[1]]
    assert found[0].refused == {NAMES[2]: "too much"}


def refusal(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except MemoryError:
        return "too much"
    return None


def test_nothing_to_tune(tmp_path: Path, device: str) -> None:
    with pytest.raises(RidgelineError, match="nothing to tune"):
        run(tmp_path, clock({}), device, implementation="dot")


def test_a_case_without_gradients_has_no_backward(device: str) -> None:
    data = tune.Data(toy.OP, replace(toy.OP.case("small"), args=(Spec(64, grad=False),)), "float32", device)
    tune.Call(toy.OP.implementations["triton"], data, "forward")
    with pytest.raises(RidgelineError, match="nothing in small takes a gradient"):
        tune.Call(toy.OP.implementations["triton"], data, "backward")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = argparse.ArgumentParser()
    tune.arguments(parser)
    with pytest.raises(RidgelineError, match="PyTorch finds none"):
        tune.main(parser.parse_args(["gelu"]))


def test_a_configuration_of_cards_with_that_much_l2_goes_before_its_architectures(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "CONFIGS", tmp_path)
    tuning.save("sm_90", "toy", {"fwd": {"a": {"BLOCK": 1}, "b": {"BLOCK": 2}}}, tmp_path)
    tuning.save("sm_90-l2-60", "toy", {"fwd": {"a": {"BLOCK": 3}}}, tmp_path)
    try:
        small, large = (Device("", "cuda", "sm_90", 90, l2=size << 20) for size in (50, 60))
        chosen = [tuning.config(d, "toy", "fwd", key, dict)["BLOCK"] for d in (small, large) for key in "ab"]
        assert chosen == [1, 2, 3, 2]
    finally:
        tuning._table.cache_clear()
