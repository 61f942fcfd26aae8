"""The host's work of small calls cannot creep back: a test counts the functions of a call, on an emulated GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Functions of Python and of C that a call may call: two more than it did when these were written.
MOST = {
    "linear_attention": (14, 17),
    "gated_linear_attention": (14, 18),
    "gated_linear_attention, channels": (14, 18),
    "gated_delta_rule": (14, 19),
    "rwkv6": (14, 19),
    "rwkv7": (14, 20),
    "ssd": (13, 22),
    "causal_conv1d": (13, 17),
    "decode_attention": (13, 22),
    "mla_decode": (13, 20),
    "rms_norm": (15, 16),
    "layer_norm": (15, 17),
    "int4_linear": (16, 22),
    "int8_linear": (15, 20),
    "mxfp4_linear": (15, 20),
    "topk_gate": (13, 17),
    "moe": (20, 29),
    "moe, mxfp4": (21, 36),
    "rms_norm, gradients": (20, 20),
    "layer_norm, gradients": (20, 23),
    "softmax, gradients": (20, 17),
    "gelu, gradients": (20, 19),
    "batch_norm, gradients": (17, 19),
    "batch_norm, training": (23, 30),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, list[int]]:
    """The counts, from a process of its own: what it replaces in torch stays there."""
    command = [sys.executable, str(HERE / "host_calls.py"), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_all_calls_are_counted(counts: dict[str, list[int]]) -> None:
    assert counts.keys() == MOST.keys()


@pytest.mark.parametrize("name", MOST)
def test_a_small_call_calls_few_functions(counts: dict[str, list[int]], name: str) -> None:
    python, c = counts[name]
    assert python <= MOST[name][0]
    assert c <= MOST[name][1]
