"""The command line: every verb's help; bad input gives exit code 2 and one sentence on what is accepted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fixture_rows
from ridgeline import cli
from ridgeline.op import RidgelineError, get

GPU = torch.cuda.is_available()
NOWHERE = "nowhere"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes an empty current folder, with its own cache and a few results files, good and bad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fixture_rows.write(tmp_path / "good.jsonl")
    (tmp_path / "corrupt.jsonl").write_text('{"schema": 1, "type": "run", "run": "a"}\n{"schema": 1, "ty\n{}\n')
    (tmp_path / "newer.jsonl").write_text('{"schema": 99, "type": "run", "run": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "own.py").write_text("def step():\n    pass\n\n\nnumber = 3\n")
    (tmp_path / "file").write_text("not a folder")
    return tmp_path


def run(*arguments: str) -> int:
    """Returns the exit code of `ridgeline ARGUMENTS` in this process."""
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent.name != "__pycache__"}


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert f"usage: ridgeline {verb}" in capsys.readouterr().out


def test_the_list_of_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in cli.VERBS)
    assert run() == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    "verb",
    [
        "doctor",
        "micro",
        "list",
        "explain",
        "check",
        "bench",
        "compare",
        "ladder",
        "roofline",
        "profile",
        "graph",
        "mamf",
    ]
    + ["inspect", "tune"],
)
def test_every_verb_with_figures_prints_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert "--json" in capsys.readouterr().out


# arguments, and words that the sentence must contain: what was given and what is accepted
BAD = [
    (["nowhere"], [NOWHERE, *cli.VERBS]),
    (["bench", "--nowhere"], ["--nowhere"]),
    (["compare", "good.jsonl"], ["RUN"]),
    *(
        (verb, [NOWHERE, "gelu", "softmax"])
        for verb in (["explain", NOWHERE], ["check", NOWHERE], ["bench", NOWHERE], ["tune", NOWHERE])
    ),
    (["ladder", NOWHERE, "--run", "good.jsonl"], [NOWHERE, "gelu"]),
    (["roofline", NOWHERE, "--run", "good.jsonl"], [NOWHERE, "gelu"]),
    (["profile", NOWHERE], [NOWHERE, "gelu"]),
    (["inspect", NOWHERE, "--impl", "triton"], [NOWHERE, "gelu"]),
    (["check", "gelu", "--impl", NOWHERE], [NOWHERE, "cuda_packed"]),
    (["bench", "gelu", "--impl", NOWHERE], [NOWHERE, "cuda_packed"]),
    (["inspect", "gelu", "--impl", NOWHERE], [NOWHERE, "cuda_packed"]),
    (["check", "gelu", "--case", NOWHERE], [NOWHERE, "33x129"]),
    (["bench", "gelu", "--case", NOWHERE], [NOWHERE, "33x129"]),
    (["inspect", "gelu", "--impl", "triton", "--case", NOWHERE], [NOWHERE, "33x129"]),
    (["check", "gelu", "--dtype", NOWHERE], [NOWHERE, "bfloat16"]),
    (["bench", "gelu", "--dtype", NOWHERE], [NOWHERE, "bfloat16"]),
    (["inspect", "gelu", "--impl", "triton", "--dtype", NOWHERE], [NOWHERE, "bfloat16"]),
    (["inspect", "gelu", "--impl", "triton", "--arch", NOWHERE], [NOWHERE, "sm_90"]),
    (["check", "matmul", "--case", "256", "--dtype", "bfloat16"], ["bfloat16", "256", "float32"]),
    (["bench", "matmul", "--case", "256", "--dtype", "bfloat16"], ["bfloat16", "256", "float32"]),
    (["bench", "gelu", "--grid"], ["gelu", "grid"]),
    (["bench", "--model", NOWHERE], [NOWHERE, "config.json", "llama-1b", "gemma2-2b"]),
    (["bench", "--model", "llama-1b", "--batch", "0"], ["--batch", "0", "1 or more"]),
    (["bench", "--model", "llama-1b", "--seq", "1"], ["--seq", "1", "2 or more"]),
    (["bench", "--model", "llama-1b", "--steps", "0"], ["--steps", "0", "1 or more"]),
    (["bench", "--model", "llama-1b", "--variants", f"eager,{NOWHERE}"], [NOWHERE, "ridgeline", "liger"]),
    (["bench", "--model", "llama-1b", "--variants", ""], ["variant", "ridgeline", "liger"]),
    (["bench", "--model", "llama-1b", "--variants", "eager", "--memory", "low"], ["--memory", "ridgeline", "eager"]),
    (["bench", "gelu", "--model", "llama-1b", "--quick"], ["--model", "gelu", "quick"]),
    (["bench", "--model", "llama-1b", "--graph", "--device", "cpu"], ["--graph", "GPU"]),
    (["bench", "gelu", "--budget", "nan"], ["--budget", "nan", "seconds"]),
    (["tune", "gelu", "--budget", "-1"], ["--budget", "-1", "seconds"]),
    (["explain", "gelu", "--device", NOWHERE], [NOWHERE, "sm_90", "cpu"]),
    (["explain", "gelu", "--case", NOWHERE], [NOWHERE, "33x129"]),
    (["doctor", "--device", NOWHERE], [NOWHERE, "cpu"]),
    (["doctor", "--topology", "--device", "h200"], ["--topology", "h200"]),
    (["micro", NOWHERE], [NOWHERE, "latency", "streams"]),
    (["micro", "--device", NOWHERE], [NOWHERE, "cuda"]),
    (["micro", "--device", "cpu"], ["cpu", "cuda"]),
    (["micro", "--run", NOWHERE], [NOWHERE]),
    (["micro", "--run", "good.jsonl"], ["good.jsonl", "not JSON"]),
    (["micro", "--json", "file/below"], ["file"]),
    (["profile", "gelu", "--impl", NOWHERE], [NOWHERE, "cuda_packed"]),
    (["profile", "gelu", "--steps", "0"], ["0", "1 or more"]),
    (["profile", "gelu", "--out", "file/below"], ["file/below"]),
    (["graph", NOWHERE], [NOWHERE, "gelu"]),
    (["graph", "own.py:nowhere"], [NOWHERE, "step"]),
    (["graph", "own.py"], ["graph takes an op or FILE.py:FUNCTION", "own.py"]),
    (["graph", "gelu", "--impl", NOWHERE], [NOWHERE, "cuda_packed"]),
    (["mamf", "--range", "8:4:2"], ["--range", "8:4:2", "512:8192:512"]),
    (["mamf", "--k", "0"], ["--k", "0", "512:8192:512"]),
    (["mamf", "--square", "--m", "64"], ["--square", "--range", "--m"]),
    (["mamf", "--dtype", NOWHERE], [NOWHERE, "bf16", "int8"]),
    (["mamf", "--seconds", "0"], ["--seconds", "0", "above 0"]),
    (["mamf", "--device", NOWHERE], [NOWHERE, "cpu"]),
    (["mamf", "--range", "8", "--out", "corrupt.jsonl"], ["corrupt.jsonl", "schema 1"]),
    (["mamf", "--range", "8", "--out", "good.jsonl"], ["good.jsonl", "another file"]),
    (["mamf", "--range", "8", "--out", "file/below"], ["file/below"]),
    (["inspect", "gelu", "--impl", "torch"], ["torch"]),
    (["check", "gelu", "--device", NOWHERE], [NOWHERE, "cpu"]),
    (["compare", "good.jsonl", "corrupt.jsonl"], ["corrupt.jsonl"]),
    (["compare", "newer.jsonl", "good.jsonl"], ["newer.jsonl", "99"]),
    (["compare", "good.jsonl", "empty.jsonl"], ["empty.jsonl"]),
    (["compare", "good.jsonl", NOWHERE], [NOWHERE]),
    (["ladder", "gelu", "--run", "corrupt.jsonl"], ["corrupt.jsonl"]),
    (["roofline", "--run", "newer.jsonl"], ["newer.jsonl", "99"]),
    (["roofline", "--run", "good.jsonl", "--out", "file/below"], ["file/below"]),
    (["report", "--out", "file/below"], ["file/below"]),
    (["inspect", "gelu", "--impl", "triton", "--out", "file/below"], ["file/below"]),
    (["profile", "own.py:nowhere"], [NOWHERE, "step"]),
    (["profile", "own.py:number"], ["number"]),
    (["profile", "nowhere.py:step"], ["nowhere.py"]),
]
NO_GPU = [
    (["micro", "--record"], ["GPU"]),
    (["micro", "--device", "cuda"], ["GPU"]),
    (["tune", "gelu"], ["GPU"]),
    (["profile", "gelu", "--impl", "triton"], ["triton", "GPU"]),
    (["bench", "gelu", "--device", "cuda"], ["cuda", "cpu"]),
    (["check", "gelu", "--device", "cuda"], ["cuda", "cpu"]),
]


@pytest.mark.parametrize(("arguments", "named"), BAD if GPU else BAD + NO_GPU, ids=lambda value: " ".join(value))
def test_bad_input(arguments: list[str], named: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(folder)
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("ridgeline: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert not [name for name in named if name not in said.err], said.err
    assert everything(folder) == before, "something was written"


def spawn(*arguments: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "ridgeline", *arguments], **(pipes | options))  # type: ignore[call-overload]


def test_as_a_process(folder: Path) -> None:
    process = spawn("check", NOWHERE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"ridgeline: there is no op '{NOWHERE}'; the ops are ")
    assert "Traceback" not in err


def test_a_reader_that_leaves(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn("list", "--json", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err == ""


def test_an_interrupt(folder: Path) -> None:
    waiting = (
        "import signal, sys, time; from ridgeline import cli; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background jobs ignore it
        "cli.run = lambda *_: (print('on', flush=True), time.sleep(60)); sys.exit(cli.main(['list']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "ridgeline: interrupted\n")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert run("list") == 2
    assert "needs the package rich" in capsys.readouterr().err


def test_json_is_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    assert {"gelu", "mul", "softmax", "matmul"} <= {row["op"] for row in json.loads(capsys.readouterr().out)}


def test_a_named_rung_that_could_not_be_checked_is_a_failure() -> None:
    only = ["check", "gelu", "--case", "33x129", "--dtype", "float32", "--device", "cpu", "--impl"]
    assert [cli.main([*only, impl]) for impl in ("naive", "cuda_packed", "naive,cuda_packed")] == [0, 1, 1]


def test_an_op_s_name_that_is_nearly_right() -> None:
    with pytest.raises(RidgelineError, match=r"no op 'sofmax' \(perhaps softmax or .* is meant\); the ops are "):
        get("sofmax")
