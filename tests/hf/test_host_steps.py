"""The host's work of patched models' steps cannot creep back: on an emulated GPU, every launcher is repeated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Functions of Python and of C that a layer's forward and backward call: some more than when these were written.
MOST = {"Llama": (470, 440), "Qwen3": (550, 530), "Gemma2": (580, 560), "GptOss": (560, 570), "Olmo2": (550, 530)}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[int]]]:
    """What steps ran and called, from a process of its own: what it replaces in torch stays there."""
    command = [sys.executable, str(HERE / "host_steps.py"), *MOST]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MOST)
def test_a_patched_step_repeats_every_launcher(found, name: str) -> None:
    assert found[name]["ran"] == []


@pytest.mark.parametrize("name", MOST)
def test_a_patched_layer_calls_few_functions(found, name: str) -> None:
    python, c = found[name]["calls"]
    assert (python <= MOST[name][0], c <= MOST[name][1]) == (True, True), (python, c)
