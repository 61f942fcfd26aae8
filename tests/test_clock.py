"""The clock on a synthetic timer with realistic noise, and on this machine."""

import math
import random
import time

import pytest
import torch

from ridgeline.lab import benchmark
from ridgeline.lab.clock import CpuTimer, Measurement, differs, interval, measure, median
from ridgeline.op import RidgelineError


class NoisyTimer:
    """Gives each function its own time, with jitter of 2%, a clock that drifts by 3%, and one run in forty disturbed by half or more."""

    def __init__(self, seconds, seed):
        self.seconds, self.dice, self.rounds, self.orders = seconds, random.Random(seed), 0, set()

    def round(self, functions):
        self.rounds += 1
        self.orders.add(tuple(functions))
        drift = 1 + 0.03 * math.sin(self.rounds / 17)
        return [self.seconds[f] * drift * self.noise() for f in functions]

    def noise(self):
        disturbed = 1 + self.dice.expovariate(2) if self.dice.random() < 1 / 40 else 1
        return self.dice.lognormvariate(0, 0.02) * disturbed

    def host(self, function, seconds):
        return None

    def peak(self, function):
        return None


def one():
    pass


def other():
    pass


def noisy(factor, seed, reps=80):
    timer = NoisyTimer({one: 1e-3, other: 1e-3 * factor}, seed)
    found = measure({"one": one, "other": other}, timer=timer, max_reps=reps)
    assert len(timer.orders) == 2
    return found["one"], found["other"]


def test_a_slowdown_of_five_percent_is_seen_every_time():
    for seed in range(20):
        a, b = noisy(1.05, seed)
        assert differs(a, b), seed
        assert b.median / a.median == pytest.approx(1.05, abs=0.02)


def test_identical_code_is_called_different_at_most_once_in_twenty():
    assert sum(differs(*noisy(1.0, seed)) for seed in range(20)) <= 1
    assert sum(differs(*noisy(1.0, seed)) for seed in range(1000, 1200)) <= 10


def test_of_different_groups_the_intervals_decide():
    a, b = Measurement((1.0,) * 20), Measurement((1.1,) * 20)
    assert differs(a, b)
    assert not differs(a, Measurement((0.9, 1.0, 1.1) * 7))


def test_the_interval_holds_the_median_19_times_in_20():
    dice = random.Random(1)
    for n in (10, 11, 40, 101):
        held = 0
        for _ in range(1000):
            low, high = interval([dice.lognormvariate(0, 1) for _ in range(n)])
            held += low <= 1 <= high
        assert held >= 935, n
    assert interval([3.0]) == (3.0, 3.0)
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_at_least_ten_runs_within_any_budget():
    timer = NoisyTimer({one: 1.0}, 0)
    assert len(measure({"one": one}, budget=0, timer=timer)["one"].samples) == 10
    assert len(measure({"one": one}, budget=0, timer=timer, min_reps=3)["one"].samples) == 3


@pytest.mark.parametrize("function", [3, None, "softmax"])
def test_benchmark_takes_a_function(function):
    with pytest.raises(RidgelineError, match="function of no arguments"):
        benchmark(function)


def test_a_sleep_takes_its_time():
    found = measure({"sleep": lambda: time.sleep(0.01)}, budget=0.1, timer=CpuTimer())["sleep"]
    assert 0.01 <= found.seconds["low"] <= found.seconds["median"] <= found.seconds["high"]
    assert "ms" in str(found)


@pytest.mark.gpu
def test_the_gpu_is_timed_and_not_the_host():
    x = torch.randn(64 << 20, device="cuda")

    def slow_host():
        time.sleep(0.002)
        return x.neg()

    found = measure({"quick": x.neg, "slow": slow_host}, budget=0.3)
    assert found["slow"].median == pytest.approx(found["quick"].median, rel=0.05)
    assert found["slow"].host_us > 2000 > found["quick"].host_us
    assert found["quick"].peak_bytes == x.numel() * 4
