"""`ridgeline lm scale`, and the example with the lecture's calls."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import cli
from ridgeline.lm import scale

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/cs336_lecture6.py"


def test_the_fits() -> None:
    sizes = [1, 2, 4, 8]
    assert scale.exponent(sizes, [3e-3 * n**2.5 for n in sizes]) == pytest.approx(2.5)
    assert scale.exponent([4], [1.0]) is None
    flops = [n**3 for n in sizes]
    assert scale.overhead(flops, [n**3 / 100 for n in sizes]) == pytest.approx(0)
    # 7 of overhead beside 1 at size 1; at size 8 the rate with overhead is 512 / 519
    assert scale.overhead(flops, [7 + n**3 for n in sizes]) == pytest.approx(8 - 519 / 512)


def test_the_operations_of_the_stack() -> None:
    stack = scale.Stack(width=8, layers=3, batch=4, steps=2)
    with FlopCounterMode(display=False) as counter:
        stack.function(torch.device("cpu"), torch.float32)()
    assert counter.get_total_flops() == stack.flops


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--sides", "16,32", "--factors", "1,2", "--budget", "0.01", "--device", "cpu"
    flags += "--width", "8", "--layers", "1", "--batch", "4", "--steps", "1"
    assert cli.main(["lm", "scale", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in found] == ["products", "steps", "layers", "batch", "width"]
    assert [row["size"] for row in found[4]["rows"]] == [8, 16]
    for row in found[0]["rows"]:
        assert row["flops_per_second"] == pytest.approx(2 * row["size"] ** 3 / row["ms"]["median"] * 1e3)
    assert cli.main(["lm", "scale", *flags, "--what", "products"]) == 0
    said = capsys.readouterr().out
    assert " ms " in said
    assert "time grows as size^" in said


@pytest.mark.parametrize("flag", ["--sides", "--factors"])
def test_bad_input(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["lm", "scale", flag, "0,2"])
    assert stop.value.code == 2
    assert f"{flag} takes whole numbers of 1 or more" in capsys.readouterr().err


@pytest.fixture
def lecture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, at its small sizes."""
    monkeypatch.setattr(sys, "argv", ["cs336_lecture6.py", "--quick"])
    spec = importlib.util.spec_from_file_location("cs336_lecture6", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cs336_lecture6", module)
    spec.loader.exec_module(module)
    return module


def test_the_lecture_has_every_call(lecture: ModuleType) -> None:
    named = [name for name, _ in lecture.benchmarks()]
    assert {"sleep", "run_mlp", "run_mlp(5x dim)", "manual_gelu", "triton_softmax"} < set(named)
    assert len(named) == 1 + len(lecture.MATMUL_DIMS) + 1 + 16 + 5 + 4
    operations = ["sleep", "add", "matmul", "matmul(dim=128)", "cdist", "gelu", "softmax", "mlp"]
    ours = [f"{n}_gelu" for n in lecture.GELUS] + [f"{n}_softmax" for n in lecture.SOFTMAXES]
    assert list(lecture.profiles()) == operations + ours


def test_the_lecture_measures_milliseconds(lecture: ModuleType) -> None:
    assert lecture.benchmark("sleep", lambda: lecture.sleep_50ms) == pytest.approx(50, abs=15)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_lecture_says_what_cannot_run(lecture: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lecture.main(["cuda_gelu"])
    assert capsys.readouterr().out.count("impl='cuda_packed' cannot run this call") == 2


def test_the_lecture_profiles(lecture: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lecture.main(["cdist", "--out", str(tmp_path)])
    assert "profile('cdist')" in capsys.readouterr().out
    assert (tmp_path / "cdist/trace.json").is_file()
