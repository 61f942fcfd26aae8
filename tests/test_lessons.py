"""The lessons: their commands run, their figures are the recorded ones, and the verb lists, opens and checks."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.lab.analysis.lesson import advice, checking, pages
from ridgeline.lab.analysis.lesson.exercises import EXERCISES
from ridgeline.lab.analysis.lesson.wording import MESSAGES
from ridgeline.lab.measurement import results, store
from ridgeline.op import RidgelineError

LESSONS = pages.lessons()
RIGHT = Path(__file__).with_name("lessons")


@pytest.mark.parametrize("number", LESSONS)
def test_the_commands_of_a_lesson_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = pages.commands(LESSONS[number].read_text())
    assert blocks, "a lesson marks at least one command as runnable"
    for block in blocks:
        lines = block.strip().splitlines()
        if block.startswith("python -c"):  # in this process, which has torch already
            exec(shlex.split(block)[2], {})
            assert capsys.readouterr().out.strip(), block
        elif all(line.startswith("ridgeline ") and "|" not in line for line in lines):
            for line in lines:
                assert cli.main(shlex.split(line)[1:]) == 0, line
                assert capsys.readouterr().out.strip(), line
        else:
            script = f'ridgeline() {{ "{sys.executable}" -m ridgeline "$@"; }}\n{block}'
            done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{block}\n{done.stderr}"
            assert done.stdout.strip(), block


def test_the_figures_are_the_recorded_ones() -> None:
    rows = results.newest(store.HOUSE / "results/h200.jsonl")
    stale = [path.name for path in LESSONS.values() if pages.filled(path.read_text(), rows) != path.read_text()]
    assert not stale, f"{stale} are not current; write them with: make readme"


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_is_one_sitting(number: int) -> None:
    text = LESSONS[number].read_text()
    assert text.startswith(f"# {number}. ")
    assert len(text.splitlines()) <= 300
    for target in re.findall(r"\]\(([\w./]+\.md)", text):
        assert (LESSONS[number].parent / target).exists(), target


def test_the_verb_lists_and_opens(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lesson", "--json"]) == 0
    assert [row["number"] for row in json.loads(capsys.readouterr().out)] == list(LESSONS)
    assert cli.main(["lesson"]) == 0
    assert "gelu(x)" in capsys.readouterr().out
    assert cli.main(["lesson", "3"]) == 0
    text = capsys.readouterr().out
    assert "Coalescing" in text
    assert "<!--" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["99"], "no lesson 99"),
        (["--check", "x.py"], "number of a lesson"),
        (["2", "--check", "x.py"], "lesson 2 has no exercise"),
        (["3", "--check", "nowhere.py"], "no such file"),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["lesson", *arguments])
    assert said in capsys.readouterr().err


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def silu(x): return x\n")
    with pytest.raises(Exception, match="defines no function gelu"):
        checking.run("test", 3, path, "cpu", 60)


def test_a_check_from_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The narrow kernel passes its tests, is compiled beside ours, and is told about its loads."""
    path = RIGHT / "gelu.py"
    assert cli.main(["lesson", "3", "--check", str(path)]) == 0
    said = capsys.readouterr().out
    assert MESSAGES["passes"] in said
    assert "cuda_packed" in said


CUDA = """
import torch
from ridgeline.lab import Inline

kernel = Inline('''
__global__ void gelu(float* y, const float* x, long long n) {
  long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i < n) y[i] = 0.5 * x[i] * (1.0 + tanh(0.79788456 * x[i]));
}
''', "gelu")

def gelu(x):
    y = torch.empty_like(x)
    kernel[(x.numel() + 255) // 256, 256](y, x, x.numel())
    return y
"""


def test_cuda_in_a_string_is_compiled_and_its_doubles_are_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUDA)
    tests, died = checking.run("test", 3, path, "cpu", 60)
    assert died is None
    assert tests[0]["ok"] is None
    assert tests[0]["reason"] == MESSAGES["cuda"]
    rows, died = checking.run("compile", 3, path, "cpu", 120)
    assert died is None
    assert "are float64" in advice.advise(EXERCISES[3], rows, [], path)


def row(impl: str, **facts: object) -> dict[str, object]:
    made = {"impl": impl, "kernel": "k", "double": 0, "spill_stores": 0, "matrix": {}, "loads": {"16": 1}, "shared": 0}
    return made | {"stores": {"16": 1}, "widest_load": 16, "occupancy": 1.0, "limit": "registers"} | facts


@pytest.mark.parametrize(
    ("number", "mine", "source", "said"),
    [
        (3, {"spill_stores": 64}, "", "64 bytes a thread"),
        (3, {"widest_load": 4, "loads": {"4": 1}}, "", "4 bytes wide, ours 16"),
        (3, {"stores": {"4": 1}}, "", "stores as wide"),
        (3, {"occupancy": 0.25}, "", "limited by registers"),
        (8, {"occupancy": 0, "shared": 400_000}, "", "400,000 bytes of shared memory"),
        (8, {"matrix": {"HGMMA.64x64x8.F32.TF32": 4}}, "", "run as TF32"),
        (6, {}, "__shared__ float tile[32][32];", "Pad the shared tile to 33"),
        (7, {}, "", "Use `tl.dot`"),
        (7, {"matrix": {"HMMA.16816.F32": 4}}, "", "wgmma is faster"),
        (7, {"matrix": {"HGMMA.64x64x16.F16": 4}}, "", "add in float16"),
        (7, {"matrix": {"HGMMA.64x64x16.F32": 4}, "shared": 10}, "", "larger tiles"),
        (3, {}, "", "Time it on a GPU"),
    ],
)
def test_the_advice(tmp_path: Path, number: int, mine: dict[str, object], source: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    best = row(EXERCISES[number].rungs[-1], shared=100_000 if number == 7 else 0)
    assert said in advice.advise(EXERCISES[number], [row("yours", **mine), best], [], path)


def test_a_loop_of_launches_is_advised_into_a_grid(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("")
    mine = [row("yours", matrix={"HGMMA.64x64x16.F32.BF16": 4})] * 64
    said = advice.advise(EXERCISES[8], [*mine, row("gluon")], [], path)
    assert said == "Put the loop into the grid: the call starts k 64 times, ours once."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nx = torch.nothing\n", "line 2: AttributeError"),
        ("def gelu(x:\n", "cannot be imported: SyntaxError"),
        ("import sys\nsys.exit(1)\n", "line 2: SystemExit: 1"),
        (CUDA.replace('"gelu")', '"other")'), "the CUDA C++ has no `__global__ void other"),
        ("", "defines no function gelu"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(RidgelineError) as raised:
        checking.run("test", 3, path, "cpu", 60)
    assert said in str(raised.value)
    assert "RidgelineError" not in str(raised.value)


def test_a_fault_of_cuda_in_a_string_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CUDA.replace("tanh(0.79788456 * x[i]))", "tanh(0.79788456 * xx[i]))"))
    rows, died = checking.run("compile", 3, path, "cpu", 120)
    assert died is None
    assert 'line 4 of the CUDA C++: identifier "xx" is undefined' in rows[0]["failed"]
    path.write_text(CUDA.replace("(y, x, x.numel())", "(y, x)"))
    tests, _ = checking.run("test", 3, path, "cpu", 60)
    assert "gelu takes 3 arguments, and the call passes 2" in tests[0]["reason"]


def test_a_call_that_reads_values_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    right = Path(__file__).with_name("lessons") / "gelu.py"
    path.write_text(right.read_text().replace("    n = x.numel()\n", "    n = x.numel()\n    assert x.sum() < 1e9\n"))
    rows, _ = checking.run("compile", 3, path, "cpu", 120)
    assert "tensors without values" in rows[0]["failed"]


def test_the_advice_of_times(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("")
    rows = [row("yours"), row("triton")]
    times = [{"impl": n, "status": "ok", "seconds": {"median": t}} for n, t in (("yours", 2.0), ("triton", 1.0))]
    assert "takes 50% of your time" in advice.advise(EXERCISES[3], rows, times, path)
