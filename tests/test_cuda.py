"""Checks what `cuda.py` passes to kernels: the layout of their parameters, and tensor maps."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import cuda
from ridgeline.boundary import launch
from ridgeline.cuda import CudaError, CudaKernel, TensorMap
from ridgeline.lab.analysis import inspect
from ridgeline.op import RidgelineError, registry
from ridgeline.ops.movement import _index_add
from ridgeline.ops.reduction import _cumsum

TRANSPOSE = CudaKernel(Path(__file__).with_name("tensor_map.cu"), "transpose", "PMii")


def test_parameters_lie_where_the_driver_says() -> None:
    assert cuda.parameter_layout("Pif", [(0, 8), (8, 4), (12, 4)]) == "0xP0xi0xf"
    layout = cuda.parameter_layout("PMiiP", [(0, 8), (64, 128), (192, 4), (196, 4), (200, 8)])
    assert layout is not None
    packed = struct.pack("@" + layout, 1, bytes(range(128)), 2, 3, 4)
    assert packed == struct.pack("@P56x128siiP", 1, bytes(range(128)), 2, 3, 4)
    triton = [(0, 8), (64, 128), (192, 4), (196, 4), (200, 4), (208, 8), (216, 8), (224, 8), (232, 1), (240, 8)]
    assert (
        cuda.parameter_layout(["P", "M3", "?", "8x"], triton) == "0xP56x168s0x?7x8x"
    )  # three sizes and three strides follow the map
    assert cuda.parameter_layout(["P", "M2", "?", "8x"], triton) is None
    assert cuda.parameter_layout("PP", [(0, 8), (8, 4)]) is None
    assert cuda.parameter_layout("PP", [(0, 8)]) is None
    assert cuda.parameter_layout("P", [(0, 8), (8, 8)]) is None


@pytest.mark.parametrize(
    ("tensor", "box", "swizzle", "message"),
    [
        (torch.randn(8), (8,), 0, "2 to 5 dimensions"),
        (torch.randn(8, 8, dtype=torch.complex64), (8, 8), 0, "of float16, float32"),
        (torch.randn(8, 8), (8,), 0, "a box of 1"),
        (torch.randn(8, 8), (8, 8), 48, "swizzle 48"),
        (torch.randn(8, 8).t(), (8, 8), 0, "last dimension is contiguous"),
        (torch.randn(8, 7), (8, 8), 0, "multiples of 16 bytes"),
        (torch.randn(65)[1:].view(8, 8), (8, 8), 0, "begins 4 bytes after one"),
        (torch.randn(0, 8), (8, 8), 0, r"sizes from 1 to 2\^31 - 1"),
    ],
)
def test_tensors_that_fit_no_map(tensor: Any, box: Any, swizzle: int, message: str) -> None:
    with pytest.raises(RidgelineError, match=message):
        TensorMap(tensor, box, swizzle).view({})


def test_maps_where_the_kernel_has_them() -> None:
    x = torch.randn(16, 32)
    for values in ([1, 2, 16, 32], [1, TensorMap(x, (16, 32)), 16], [TensorMap(x, (16, 32)), 2, 16, 32]):
        with pytest.raises(TypeError, match="tensor_map.cu:transpose is declared with 'PMii'"):
            TRANSPOSE.start({}, values, 0)


@pytest.mark.compiles
def test_the_kernel_with_a_tensor_map_compiles() -> None:
    assert ".tile" in TRANSPOSE.compile("sm_90", {"ROWS": 16, "COLUMNS": 32}).ptx


def _stores(kernel: CudaKernel, **macros: Any) -> tuple[int, int]:
    """Returns the number of 16-byte stores to global memory in a kernel, and of narrower ones."""
    ptx = kernel.compile("sm_90", macros).ptx
    body = ptx[ptx.index(f".entry {kernel.name}(") :]
    found = re.findall(r"\bst\.global\S*", body[: body.index("\n}\n")])
    wide = [s for s in found if re.search(r"v4\.[buf]32", s)]
    return len(wide), len(found) - len(wide)


@pytest.mark.compiles
def test_packs_leave_by_one_store() -> None:
    """A plain assignment split the first pack of a thread into stores of single elements."""
    kinds = {torch.float32: ("float", 4), torch.bfloat16: ("__nv_bfloat16", 8)}
    for name, pack in kinds.values():
        macros = _index_add._PLAIN | {"DTYPE": name, "ITYPE": "long long", "PACK": pack}
        assert _stores(_index_add._FEW, **macros) == (4, 0)
        assert _stores(_index_add._SORTED, **macros) == _stores(_index_add._SEGMENTS, **macros) == (1, 0)
    for dtype, (_, pack) in kinds.items():
        x = torch.empty(4096, dtype=dtype)
        for reverse in (False, True):
            macros = _cumsum._macros(x, x, 1, 4096, reverse, True, 256)
            # Twice: for warps whose elements are all inside and, with stores of single elements, for the others.
            for items in {macros["ITEMS"], 8}:
                assert _stores(_cumsum._ROWS, **macros | {"ITEMS": items}) == (2 * items, pack * items)


def test_copies_take_whole_units() -> None:
    """Includes 100003 bytes, whose last three are the first block's."""
    copy = registry()["copy"]
    for name in ("cuda_packed", "cuda_loads"):
        launches = inspect.launches(copy, copy.implementations[name], copy.case("100003 of int8"), "float32", "sm_90")
        assert [one.constants["UNIT"] for _, one in launches] == ["uint4"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 32), (33, 100), (257, 1028)])
def test_tensor_map(shape: tuple[int, int]) -> None:
    rows, columns = shape
    grid = (-(-columns // 32), -(-rows // 16))
    for _ in range(3):  # other tensors, other maps
        x = torch.randn(rows, columns + 4, device="cuda")[:, :columns]
        y = torch.full((columns, rows), float("nan"), device="cuda")
        launch(TRANSPOSE, grid, y, TensorMap(x, ("ROWS", 32)), rows, columns, ROWS=16, COLUMNS=32, block=128)
        assert torch.equal(y, x.t())


@pytest.mark.gpu
def test_a_box_that_does_not_fit_is_an_error() -> None:
    x = torch.randn(512, 512, device="cuda")
    with pytest.raises(CudaError, match="a tensor map of"):
        launch(TRANSPOSE, (1, 1), x, TensorMap(x, (512, 32)), 512, 512, ROWS=16, COLUMNS=32, block=128)


@pytest.mark.gpu
def test_a_wrong_list_of_parameters_is_an_error() -> None:
    x = torch.randn(16, 32, device="cuda")
    wrong = CudaKernel(TRANSPOSE.path, "transpose", "PPii")
    with pytest.raises(CudaError, match="takes parameters of"):
        launch(wrong, (1, 1), x, x, 16, 32, ROWS=16, COLUMNS=32, block=128)


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels are cached on disk, by source, macros and architecture."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "fill.cu"
    source.write_text('extern "C" __global__ void fill(float* x) { x[threadIdx.x] = VALUE; }')
    compiled = []
    real = nvrtc.nvrtcCompileProgram
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", lambda *args: compiled.append(args) or real(*args))

    def compile(value: int, arch: str = "sm_90") -> cuda.Compiled:
        cuda.compile_source.cache_clear()  # like a new process
        return cuda.compile_source(source, arch, (("VALUE", value),))

    first = compile(1)
    assert (compile(1), len(compiled)) == (first, 1)
    others = compile(2), compile(1, "sm_80")
    assert (first in others, len(compiled)) == (False, 3)
    source.write_text(source.read_text() + "// changed")
    compile(1)
    assert len(compiled) == 4
    cuda.compile_source.cache_clear()
