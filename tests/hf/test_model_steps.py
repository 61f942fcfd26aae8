"""Whole training steps of Hugging Face models on a CPU: the sizes, one variant's commands, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ridgeline.lab.measurement.model import bench as model_bench
from ridgeline.lab.measurement.model import kinds as model_kinds
from ridgeline.lab.measurement.model import routing as model_routing
from ridgeline.lab.measurement.model import step as model_step
from ridgeline.lab.measurement.model import worker as model_worker
from ridgeline.lab.measurement.model.step import Task

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(find_spec("transformers") is None, reason="the package transformers is not installed"),
]
TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}  # fmt: skip
MIXTURE = TINY | {
    "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    "intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
# Products, attention and memory-bound work of a step in ms, at these rates in FLOP/s and bytes/s.
H100, H200 = (779e12, 3.02e12), (765e12, 4.27e12)
FLOORS = [
    ("llama-1b", 4, H100, (155.9, 19.8, 27.9)),
    ("llama-1b", 4, H200, (158.8, 20.1, 19.7)),
    ("qwen3-0.6b", 2, H200, (38.3, 17.6, 9.1)),
    ("llama-8b-8l", 2, H200, (145.9, 10.1, 17.1)),
]
PARAMETERS = {"llama-1b": 1.236, "qwen3-0.6b": 0.596, "llama-8b-8l": 2.796, "gpt-oss-6l": 6.097, "gemma2-2b": 2.614}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def on_meta(model: str):
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(model_step.configuration(model), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", model_step.SIZES)
def test_the_sizes_are_the_models(name: str) -> None:
    found = sum(p.numel() for p in on_meta(name).parameters())
    assert round(found / 1e9, 3) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "batch", "rates", "milliseconds"), FLOORS)
def test_the_floor_of_a_step(name: str, batch: int, rates: tuple, milliseconds: tuple) -> None:
    least = model_step.work(on_meta(name), batch, 4096)
    products, attention = (least[part] / rates[0] * 1e3 for part in ("products", "attention"))
    memory = sum(least["bytes"].values()) / rates[1] * 1e3
    assert (products, attention) == (pytest.approx(milliseconds[0], abs=0.1), pytest.approx(milliseconds[1], abs=0.1))
    assert memory == pytest.approx(milliseconds[2], rel=0.02)


def test_experts_count_for_the_tokens_that_reach_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    model = on_meta(str(tmp_path))
    least, attention = model_step.work(model, 1, 8), 2 * 64 * 64 + 2 * 64 * 32
    expert, router = 3 * 64 * 64, 4 * 64
    assert least["products"] == 6 * 8 * (2 * (attention + 2 * expert + router) + 256 * 64)
    assert least["attention"] == 14 * 16 * 4 * (36 + 26)  # one layer has a window of 4
    assert least["bytes"]["gate"] == 16 * 2 * 64 * 2 * 8


def session(folder: str, variant: str = "eager", **options) -> model_worker.Session:
    made = model_worker.Session(Task(folder, 2, 32, variant, "cpu", **options))
    made.imports()
    made.build()
    return made


def turn() -> None:
    """The turn, which is always there."""


def test_the_patched_model_is_measured_with_ridgeline_s_optimizer(folder: str, monkeypatch) -> None:
    from ridgeline.optim import AdamW

    calls = []
    fake = ModuleType("ridgeline.hf")
    fake.__spec__ = ModuleSpec("ridgeline.hf", None)
    fake.patch = lambda model, memory=None: calls.append((type(model).__name__, memory)) or "2 norms"  # type: ignore
    monkeypatch.setitem(sys.modules, "ridgeline.hf", fake)
    ours = model_worker.Session(Task(folder, 2, 32, "ridgeline", "cpu", memory="low"))
    ours.imports()
    assert ours.build()["patched"] == "2 norms"
    assert calls == [("LlamaForCausalLM", "low")]
    assert isinstance(ours.optimizer, AdamW)
    losses = ours.prepare(turn)["losses"]
    assert losses == pytest.approx(session(folder).prepare(turn)["losses"], rel=2e-3)
    assert losses[-1] < losses[0] - 0.1, "the model does not learn"


def test_a_variant_that_went_away_and_came_back_learns_the_same(folder: str) -> None:
    stays, goes = session(folder), session(folder)
    goes.least = 0
    for one in (stays, goes):
        one.prepare(turn)
    for _ in range(2):
        goes.park()
        assert goes.copies
        assert all(storage.nbytes() == 0 for storage, _ in goes.copies)
        assert goes.measure(2, 1)["loss"] == stays.measure(2, 1)["loss"]


def test_a_compiled_step_takes_the_turn_once_and_can_go_away(folder: str) -> None:
    one, turns = session(folder, "compile"), []
    one.least = 0
    step, steps = one.step, []

    def counted() -> torch.Tensor:
        steps.append(len(turns))
        return step()

    one.step = counted
    losses = one.prepare(lambda: turns.append(len(steps)))["losses"]
    assert turns == [1], "the turn is asked for in the first step, and once"
    assert losses == pytest.approx(session(folder).prepare(turn)["losses"], rel=2e-3)
    one.park()
    assert one.measure(1, 1)["loss"] < losses[-1]


def test_a_measurement_and_a_profile(folder: str) -> None:
    one = session(folder)
    one.prepare(turn)
    assert one.measure(2, 0)["seconds"] > 0
    found = one.profile()
    assert found["kinds"].keys() == {*model_kinds.KINDS}
    assert found["kinds"]["products"] > 0
    assert found["kinds"]["optimizer"] > 0
    assert found["kernels"][0]["seconds"] >= found["kernels"][-1]["seconds"]


def test_what_a_model_raises_is_a_reason(folder: str) -> None:
    one = session(folder)

    def broken() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    one.step = broken
    assert model_worker.answer(one, "measure", {"steps": 1, "warm": 1}) == ("oom", "it needs more memory than there is")
    one.step = lambda: [][1]
    assert model_worker.answer(one, "measure", {"steps": 1, "warm": 1}) == (
        "wrong", "it raised IndexError: list index out of range"
    )  # fmt: skip


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_the_command_line(folder: str, tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = ["bench", "--model", folder, "--batch", "2", "--seq", "32", "--variants", "eager,liger", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *command, "--device", "cpu", "--json"],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    assert rows["eager"]["status"] == "ok"
    assert len(rows["eager"]["samples"]) == 2
    assert len(rows["eager"]["losses"]) == model_worker.CHECKED
    assert rows["eager"]["kinds"]["products"] > 0
    assert rows["liger"]["status"] == "skipped"
    assert "pip install liger-kernel" in rows["liger"]["reason"]


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"num_local_experts": 16, "num_experts_per_tok": 4}))
    return str(tmp_path)


def prepared(folder: str, variant: str, choices: Any = None) -> dict[str, Any]:
    return session(folder, variant).prepare(lambda: choices)


def test_variants_follow_the_reference_s_choice_of_experts(mixture: str) -> None:
    """Their own choice parts from it between near ties; a wrong one is found, and so is a wrong loss."""
    own = prepared(mixture, "eager")
    assert len(own["choices"]) == 2 * model_worker.CHECKED
    free, ours = prepared(mixture, "ridgeline"), prepared(mixture, "ridgeline", own["choices"])
    apart = [max(abs(a - b) for a, b in zip(own["losses"], found["losses"], strict=True)) for found in (free, ours)]
    assert apart[1] < apart[0] / 2
    assert ours["followed"] == model_worker.CHECKED
    assert 0 < ours["routing"]["elsewhere"] < 0.3
    assert model_routing.wrong(ours["routing"]) is None
    others = [(shape, bytes([(b + 5) % 16 if n % 2 == 0 else 0 for n, b in enumerate(kept)]))
              for shape, kept in own["choices"]]  # fmt: skip
    assert model_routing.wrong(prepared(mixture, "ridgeline", others)["routing"])


def test_dense_models_have_no_choice(folder: str) -> None:
    assert prepared(folder, "eager")["choices"] == []


class Row:
    """A process whose first steps are made."""

    def __init__(self, variant: str, losses: list[float], **found: Any):
        self.task, self.found, self.status = Task("f", 1, 8, variant, "cpu"), {"losses": losses} | found, "ok"

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason


def test_losses_are_held_where_the_choice_was_followed() -> None:
    near = {"elsewhere": 0.1, "regret": 0.001}
    eager = Row("eager", [7.0, 6.0, 5.0], choices=[((1, 1), b"00")])
    good = Row("ridgeline", [7.0, 6.0, 5.5], followed=2, routing=near)
    bad = Row("ridgeline", [7.0, 6.1, 5.0], followed=2, routing=near)
    lost = Row("liger", [7.0, 6.0, 5.0], followed=3, routing={"elsewhere": 0.9, "regret": 1.2})
    compiled, worse = Row("compile", [7.0, 6.1, 5.0]), Row("compile", [7.1, 6.1, 5.0])
    for row in (good, bad, lost, compiled, worse):
        model_bench.disagreement([eager, row])  # type: ignore[list-item]
    assert [row.status for row in (good, bad, lost, compiled, worse)] == ["ok", "wrong", "wrong", "ok", "wrong"]
    assert bad.reason == "its loss of step 2 is 6.1000, and that of eager is 6.0000"
    assert "routers' choice" in lost.reason
    dense, other = Row("eager", [7.0, 6.0], choices=[]), Row("ridgeline", [7.0, 6.1])
    model_bench.disagreement([dense, other])  # type: ignore[list-item]
    assert other.status == "wrong"
