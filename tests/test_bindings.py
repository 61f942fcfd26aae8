"""The templates of `examples/bindings`: right, differentiable, and seen by torch.compile as docs/bindings.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.cuda import CudaKernel
from ridgeline.lab.analysis import sheets
from ridgeline.lab.measurement import query, store

FOLDER = Path(__file__).resolve().parents[1] / "examples/bindings"
CODE = """
import sys
import torch
sys.path.insert(0, {folder!r})
way, registered = {way!r}, {registered!r}
silu = __import__(way).silu
x = torch.randn(3, 50, device={device!r}, requires_grad=True)
strided = torch.randn(8, 6, device={device!r}).T
torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))
if way != "stable":
    torch.testing.assert_close(silu(strided), torch.nn.functional.silu(strided))
assert silu(x[:0]).shape == (0, 50)
grad, = torch.autograd.grad(silu(x).square().sum(), x)
torch.testing.assert_close(grad, torch.autograd.grad(torch.nn.functional.silu(x).square().sum(), x)[0])
try:
    silu(x.double())
except Exception as error:
    assert "float32" in str(error), error
else:
    raise AssertionError("float64 is taken")
if way == "triton_op" and {device!r} == "cpu":  # its kernel is traced even where another one serves the CPU
    print("right")
    sys.exit()
compiled = torch.compile(lambda x: silu(x) + 1, fullgraph=True, backend="aot_eager")
try:
    torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x) + 1)
    whole = True
except torch._dynamo.exc.TorchDynamoException:
    whole = False
assert whole == registered, (way, whole)
if registered and way != "plain_triton":
    torch.library.opcheck(silu, (x,))
print("right")
"""
REGISTERED = ("library", "custom_op", "triton_op", "stable")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja"
)


def tried(way: str, registered: bool, device: str, folder: Path, **environment: str) -> None:
    """Runs a template's checks in a process of its own, which builds what is to be built in the folder."""
    code = CODE.format(folder=str(FOLDER), way=way, registered=registered, device=device)
    known = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder), "MAX_JOBS": "2"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=known)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.endswith("right\n")


@pytest.mark.parametrize("way", ["library", "custom_op", "triton_op"])
def test_registered_in_python(way: str, tmp_path: Path) -> None:
    tried(way, True, "cpu", tmp_path)


@needs_compiler
@pytest.mark.parametrize(("way", "registered"), [("stable", True), ("inline", False)])
def test_built_by_the_compiler(way: str, registered: bool, tmp_path: Path) -> None:
    tried(way, registered, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain_triton", "nvrtc", "library", "custom_op", "triton_op", "inline", "stable"])
def test_on_a_gpu(way: str, tmp_path: Path) -> None:
    tried(way, way not in ("nvrtc", "inline"), "cuda", tmp_path)


@pytest.mark.kernels
def test_the_triton_kernel(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import plain_triton

    x = torch.randn(3, 200, device=device, requires_grad=True)
    y = plain_triton.silu(x)
    torch.testing.assert_close(y, torch.nn.functional.silu(x))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)[0])


def test_the_cuda_kernel_compiles_without_nvcc() -> None:
    compiled = CudaKernel(FOLDER / "silu.cu", "silu_kernel", "PPq").compile("sm_90", {})
    assert b"silu_kernel" in compiled.cubin


@needs_compiler
def test_the_script_records_what_it_timed(tmp_path: Path) -> None:
    path = tmp_path / "bindings.jsonl"
    command = [sys.executable, str(FOLDER / "cost.py"), "--ways", "library,custom_op", "--record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in query.of(store.load(path), "figure")}
    assert [*rows] == ["torch", "library", "custom_op"]
    assert query.one(store.load(path), "run")["command"].startswith("python cost.py --ways library,custom_op")
    assert rows["torch"]["build_seconds"] is None
    assert rows["library"]["build_seconds"] > 0
    assert rows["library"]["training"]["median"] > rows["torch"]["training"]["median"]


def test_the_script_refuses_an_unknown_way() -> None:
    command = [sys.executable, str(FOLDER / "cost.py"), "--ways", "pigeon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no way pigeon; the ways are plain_triton" in done.stderr


def test_the_page_names_every_template_and_its_table_follows_the_results(tmp_path: Path) -> None:
    page = FOLDER.parents[1] / "docs/bindings.md"
    for path in FOLDER.glob("*"):
        if path.is_file():
            assert f"examples/bindings/{path.name}" in page.read_text(), path.name
    figure = {"median": 2e-6, "low": 1.9e-6, "high": 2.1e-6}
    rows = [
        {"what": what, "seconds": figure, "training": figure, "build_seconds": seconds}
        for what, seconds in (("torch", None), ("inline", 31.0))
    ]
    table = sheets.TABLES["bindings"](rows, "host")
    assert "| `inline` | 2.00 us | 2.00 us | 31.0 s |" in table
    assert "| PyTorch's own `silu` | 2.00 us | 2.00 us |" in table
