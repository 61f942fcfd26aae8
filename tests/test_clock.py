"""The clock on a synthetic timer with realistic noise, and on this machine."""

import math
import random
import time

import pytest
import torch

from ridgeline.lab import benchmark
from ridgeline.lab.measurement import clock
from ridgeline.lab.measurement.clock import CpuTimer, GpuTimer, Measurement, differs, interval, measure
from ridgeline.lab.measurement.graphed import copies, graphed
from ridgeline.lab.measurement.law import Law
from ridgeline.op import RidgelineError, get


class NoisyTimer:
    """Gives each function its own time, with 2% jitter, a clock that drifts by 3%, and one run in forty disturbed."""

    def __init__(self, seconds, seed):
        self.seconds, self.dice, self.rounds, self.orders = seconds, random.Random(seed), 0, set()

    def round(self, functions, writes=None):
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
    assert Measurement((4.0, 1.0, 3.0, 2.0)).median == 2.5


def test_at_least_ten_runs_within_any_budget():
    timer = NoisyTimer({one: 1.0}, 0)
    assert len(measure({"one": one}, budget=0, timer=timer)["one"].samples) == 10
    assert len(measure({"one": one}, budget=0, timer=timer, min_reps=3)["one"].samples) == 3


@pytest.mark.parametrize("function", [3, None, "softmax"])
def test_benchmark_takes_a_function(function):
    with pytest.raises(RidgelineError, match="function without arguments"):
        benchmark(function)


def test_a_sleep_takes_its_time():
    found = measure({"sleep": lambda: time.sleep(0.01)}, budget=0.1, timer=CpuTimer())["sleep"]
    assert 0.01 <= found.seconds["low"] <= found.seconds["median"] <= found.seconds["high"]
    assert "ms" in str(found)


class SimulatedGpu:
    """Just enough of torch.cuda: a queue that runs behind the host's clock, which only the tests advance."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.delays = []
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: SimulatedEvent(self))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.host)

    def run(self, seconds):
        self.device = max(self.device, self.host) + seconds

    def sleep(self, cycles):
        self.delays.append(cycles / 2e9)
        self.run(cycles / 2e9)

    def synchronize(self):
        self.host = max(self.host, self.device)

    def kernel(self, host, seconds, waits=False):
        def call():
            self.host += host
            self.run(seconds)
            if waits:
                self.synchronize()

        return call


class SimulatedEvent:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.device, self.gpu.host)

    def query(self):
        return self.gpu.host >= self.at

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


@pytest.fixture
def gpu_timer(monkeypatch):
    monkeypatch.setattr(GpuTimer, "__init__", lambda self: setattr(self, "delay", 1e-4))
    monkeypatch.setattr(GpuTimer, "buffer", torch.empty(1, dtype=torch.int32), raising=False)
    gpu = SimulatedGpu(monkeypatch)
    return gpu, GpuTimer()


def test_the_delay_grows_until_the_gpu_never_waits(gpu_timer):
    gpu, timer = gpu_timer
    functions = [gpu.kernel(host=5e-4, seconds=2e-6), gpu.kernel(host=1e-3, seconds=7e-6)]
    for _ in range(5):
        assert timer.round(functions) == pytest.approx([2e-6, 7e-6])
    assert 1.5e-3 < gpu.delays[-1] < 4e-3
    assert len(gpu.delays) <= 9


def test_a_function_that_waits_for_the_gpu_is_timed_all_the_same(gpu_timer):
    gpu, timer = gpu_timer
    assert timer.round([gpu.kernel(host=1e-4, seconds=1e-3, waits=True)]) == pytest.approx([1e-3 + 1e-4], rel=0.2)
    assert gpu.delays[-1] == timer.LONGEST


def test_what_a_function_does_not_write_it_finds_read(gpu_timer):
    class Clean:
        def __getitem__(self, where):
            read.append(4 * where.stop)
            return torch.zeros(1)

    _, timer = gpu_timer
    timer.cache, timer.clean, read = 1000, Clean(), []
    for writes in (None, 0, 600, 1000, 5000):
        timer.cool(writes)
    assert read == [2000, 800]


def test_a_function_that_makes_several_calls_is_timed_by_the_call():
    class Eight:
        calls, one = 8, staticmethod(one)

        def __call__(self):
            pass

    class Timer(NoisyTimer):
        def peak(self, function):
            return 5 if function is one else 0

        def host(self, function, seconds):
            return seconds if function is one else 0

    eight = Eight()
    found = measure({"eight": eight}, timer=Timer({eight: 8e-5}, 0), min_reps=40)["eight"]
    assert found.median == pytest.approx(1e-5, rel=0.05)
    assert found.host_us == pytest.approx(10, rel=0.2)
    assert found.peak_bytes == 5


def test_copies_of_the_arguments_overflow_the_cache_four_times():
    assert [copies(size, 50) for size in (1, 40, 199, 200, 1000)] == [200, 5, 2, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("new", [False, True])
def test_a_graph_of_calls_gives_what_one_gives(new):
    """It times the kernels of a short call, and its copies hold what a call wrote."""
    op = get("decode_attention")
    law = Law.of(op, "3x1x4/2 of 37x16 appended" if new else "3x1x4/2 of 37x16", "bfloat16", "cuda")
    function = graphed(law, op.implementations["triton"], 1 << 16)
    args = op.fresh(law.args)
    expected = op.implementations["triton"](*args, **law.kwargs)
    function()
    assert torch.equal(function.one(), expected)
    for call in function.held[1]:
        assert torch.equal(call.args[1], args[1])
    assert measure({"graph": function}, budget=0.1)["graph"].median < 1e-3


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
