"""Compiling for GPUs that are not here: what is read from the code is what was written, and nothing else changes."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

import toy
from ridgeline import device
from ridgeline.boundary import Launch, launch, observe
from ridgeline.lab.analysis import disassembly, inspect
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.compiles


@pytest.mark.parametrize("arch", inspect.ARCHES)
def test_triton_is_compiled_forward_and_backward(arch: str) -> None:
    before = driver._active
    found = toy.resources("triton", "bfloat16", arch)
    assert [(r.kernel, r.direction, r.kind, r.arch) for r in found] == [
        ("_fwd", d, "triton", arch) for d in inspect.DIRECTIONS
    ]
    for r in found:
        assert r.registers > 0
        assert (r.stack, r.spill_loads, r.spill_stores, r.shared) == (0, 0, 0, 0)
        assert r.widest_load == (8 if arch == "gfx942" else 16)
        assert 0 < r.occupancy <= 1
        assert {"ttir", "ttgir", "llir"} < r.texts.keys()
    assert driver._active is before
    assert device.pretended() is None


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [
        ("sm_80", "HMMA"),
        ("rtx3090", "HMMA"),
        ("sm_89", "HMMA"),
        ("sm_90", "HGMMA"),
        ("sm_100", "UTCHMMA"),
        ("rtx5090", "HMMA"),
        ("gfx942", "v_mfma"),
    ],
)
def test_matrix_instructions(arch: str, instruction: str) -> None:
    (r,) = toy.resources("dot", "bfloat16", arch, disassemble=True)
    assert [name for name in r.matrix if name.startswith(instruction)]
    assert r.shared >= 64 * 64 * 2


@pytest.mark.parametrize("arch", [arch for arch in inspect.ARCHES if arch.startswith("sm_")])
def test_cuda_is_compiled(arch: str) -> None:
    (r,) = toy.resources("cuda", "float32", arch)
    assert (r.kernel, r.kind, r.threads, r.shared_static, r.loads, r.stores) == (
        "toy_twice",
        "cuda",
        256,
        1024,
        {"16": 1},
        {"16": 1},
    )
    assert ".entry toy_twice(" in r.texts["ptx"]
    assert "toy_local" not in r.texts["ptx"]


def test_local_memory_is_seen() -> None:
    (r,) = toy.resources("local", "float32", "sm_90")
    assert r.stack == 256
    assert r.spill_stores >= 256
    assert r.spill_loads > 0


def test_sass_and_ptx_agree() -> None:
    for impl, dtype in (("cuda", "float32"), ("triton", "float16")):
        (sass, *_), (ptx, *_) = (
            toy.resources(impl, dtype, "sm_90", disassemble=True),
            toy.resources(impl, dtype, "sm_90"),
        )
        assert (sass.loads, sass.stores) == (ptx.loads, ptx.stores)
        assert "LDG" in sass.texts["sass"]


@pytest.mark.parametrize(
    ("impl", "dtype", "arch", "words"),
    [
        ("torch", "float32", "sm_90", "is PyTorch and has no kernels"),
        ("cuda", "float32", "gfx942", "CUDA C\\+\\+ runs on an NVIDIA GPU"),
        ("cuda", "bfloat16", "sm_90", "it takes float32"),
        ("triton", "float32", "sm_75", "unknown GPU 'sm_75'"),
        ("triton", "int8", "sm_90", "no dtype 'int8'"),
    ],
)
def test_what_cannot_be_compiled_says_why(impl: str, dtype: str, arch: str, words: str) -> None:
    with pytest.raises(RidgelineError, match=words):
        toy.resources(impl, dtype, arch)


def test_the_readers() -> None:
    sass = """
        /*0010*/ @!P1 LDG.E.128 R8, desc[UR4][R12.64] ;
        /*0020*/              LDG.E.U16.CONSTANT R8, desc[UR4][R12.64] ;
        /*0030*/              LDGSTS.E.BYPASS.LTC128B.128 [R4], desc[UR4][R12.64] ;
        /*0040*/              STG.E.64 desc[UR4][R12.64], R8 ;
        /*0050*/              STL.128 [R1], R8 ;
        /*0060*/              LDL R8, [R1] ;
        /*0070*/              HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0080*/              UTMALDG.2D [UR8], [UR4] ;
        /*0090*/              RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
    """
    found = disassembly.read_sass(sass)
    assert (found.loads, found.stores) == ({"16": 2, "2": 1, "tma": 1}, {"8": 1})
    assert (found.spill_stores, found.spill_loads, found.atomics, found.widest_load) == (16, 4, 1, 128)
    assert found.matrix == {"HGMMA.64x256x16.F32.BF16": 1}
    ptx = """
        @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.nc.v2.f32 {%f1, %f2}, [%rd4];
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
        st.global.b16 [%rd2], %rs1;
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
        @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];
        wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 0;
        red.global.add.f32 [%rd1], %f1;
    """
    found = disassembly.read_ptx(ptx)
    assert (found.loads, found.stores, found.atomics) == ({"16": 2, "8": 1, "tma": 1}, {"2": 1}, 1)
    assert found.matrix == {"wgmma.m64n256k16.f32.bf16.bf16": 1}
    amd = """
        global_load_dwordx4 v[0:3], v[4:5], off
        buffer_load_ushort v1, v2
        buffer_store_dwordx2 v[0:1], v2
        v_mfma_f32_32x32x8_bf16 a, b, c
    """
    found = disassembly.read_amdgcn(amd)
    assert (found.loads, found.stores, found.matrix) == ({"16": 1, "2": 1}, {"8": 1}, {"v_mfma_f32_32x32x8_bf16": 1})


def test_occupancy() -> None:
    h100, mi300 = device.known("sm_90"), device.known("gfx942")
    assert disassembly.occupancy(h100, 256, 32, 0) == (1.0, "")
    assert disassembly.occupancy(h100, 256, 128, 0) == (0.25, "registers")
    assert disassembly.occupancy(h100, 128, 32, 100 << 10) == (8 / 64, "shared memory")
    assert disassembly.occupancy(h100, 384, 168, 200 << 10) == (12 / 64, "registers")
    assert disassembly.occupancy(device.known("rtx4090"), 256, 32, 0) == (1.0, "")
    assert disassembly.occupancy(device.known("rtx3090"), 64, 32, 0) == (32 / 48, "blocks")
    assert disassembly.occupancy(device.known("rtx4090"), 64, 32, 0) == (1.0, "")
    assert disassembly.occupancy(device.known("rtx5090"), 512, 32, 60 << 10) == (16 / 48, "shared memory")
    assert {card.capability for card in device.KNOWN.values() if card.backend == "cuda"} == {*disassembly.RESIDENT}
    assert disassembly.occupancy(mi300, 256, 128, 0) == (0.5, "registers")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    inspect.arguments(parser)
    return parser.parse_args(words)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gelu", "--impl", "cuda_packed", "--dtype", "float32", "--direction", "forward")
    assert inspect.main(options(*words, "--json", "--out", str(tmp_path / "new"))) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(r["kernel"], r["widest_load"], r["stack"]) for r in rows] == [("gelu_fwd", 16, 0)]
    assert {p.suffix for p in (tmp_path / "new").iterdir()} == {".ptx", ".sass"}
    assert inspect.main(options(*words)) == 0
    assert "registers per thread" in capsys.readouterr().out
    assert inspect.main(options(*words, "--show", "sass")) == 0
    assert "LDG.E.128" in capsys.readouterr().out
    assert inspect.main(options(*words, "--arch", "l40s")) == 0
    assert "compiled for sm_89" in capsys.readouterr().out
    with pytest.raises(RidgelineError, match="has no ttir"):
        inspect.main(options(*words, "--show", "ttir"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RidgelineError, match="cannot be written"):
        inspect.main(options(*words, "--out", str(tmp_path / "file")))


def test_no_gpu_memory_is_taken() -> None:
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    toy.resources("triton", "float16", "sm_90")
    assert (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0) == before


class Sizes(NamedTuple):
    rows: Any
    columns: Any


class Rows(NamedTuple):
    data: Any
    step: Any


class Rules(NamedTuple):
    SCALE: int
    LIMITED: bool


@triton.jit(do_not_specialize=["sizes"])
def _bundled(y, x, sizes, RULES: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    inside = n < sizes.rows * sizes.columns if RULES.LIMITED else n < BLOCK
    tl.store(y.data + n * y.step, tl.load(x.data + n * x.step, mask=inside) * RULES.SCALE, mask=inside)


def test_numbers_in_a_bundle_are_not_specialised_on() -> None:
    """One kernel serves all numbers of a bundle in do_not_specialize, however deep; in other bundles they count."""
    launched: list[Launch] = []
    t = torch.empty(64, device="meta")
    calls = [(1, 1, 1), (16, 1, 1), (7, 5, 1), (1, 1, 2)]
    with device.pretend("sm_90"), observe(launched.append):
        for rows, columns, step in calls:
            given = Rows(t, step), Rows(t, 1), Sizes(rows, columns)
            launch(_bundled, (1,), *given, RULES=Rules(2, True), BLOCK=64)
    assert [one.args[2] for one in launched] == [call[:2] for call in calls]  # observers see the numbers themselves
    code = [inspect.of_launch(one).texts["ptx"] for one in launched]
    assert code[0] == code[1] == code[2] != code[3]
    assert len({inspect.signature(one) for one in launched}) == 2


@triton.jit
def _strided(y, x, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(y.data + n * y.step, tl.load(x.data + n * x.step))


def test_numbers_in_a_bundle_are_compared_as_triton_specialises() -> None:
    """In a bundle outside do_not_specialize, 1, multiples of 16, other numbers and truths each have a kernel."""
    launched: list[Launch] = []
    t = torch.empty(64, device="meta")
    with device.pretend("sm_90"), observe(launched.append):
        for step in (1, 16, 48, 3, 5, 1 << 40, True):
            launch(_strided, (1,), Rows(t, step), Rows(t, 1), BLOCK=64)
    signatures = [inspect.signature(one) for one in launched]
    assert [signatures.index(one) for one in signatures] == [0, 1, 1, 3, 3, 5, 6]
    code = [inspect.of_launch(one).texts["ptx"] for one in launched[:4]]
    assert code[1] == code[2]
    assert code[0] not in code[1:]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("UMOV UR4, 0x400 ;\nUIADD3 UR5, UP1, UR4, 0x40, URZ ;\nIADD3 R0, R1, UR5, RZ ;", []),
        ("UIADD3 UR11, UP2, UR11, 0x40, URZ ;\nUIADD3.X UR12, UR12, -0x7fffffe0, URZ, UP2, !UPT ;", ["UR11", "UR12"]),
        ("ULDC.64 UR4, c[0x0][0x208] ;\nLDG.E.128 R4, desc[UR4][R2.64] ;", []),
        ("ULDC UR4, c[0x0][0x208] ;\nLDG.E.128 R4, desc[UR4][R2.64] ;", ["UR5"]),
        ("ULDC.64 UR6, c[0x0][0x208] ;\nHGMMA.64x32x16.F32 R24, R88, gdesc[UR4].tnspB, R24 ;", []),
        ("ULDC.64 UR6, c[0x0][0x208] ;\nHGMMA.64x32x16.F32 R24, gdesc[UR4].tnspB, R24 ;", ["UR4", "UR5"]),
        ("R2UR P2, UR13, R16 ;\nSTS.64 [R0+UR13], R4 ;", []),
        ("@P0 BRA `(.L_x_1) ;\nUMOV UR4, URZ ;\n.L_x_1:\nIADD3 R0, R1, UR4, RZ ;", []),  # on one path at least
        ("BRA `(.L_x_1) ;\nUMOV UR4, URZ ;\n.L_x_1:\nIADD3 R0, R1, UR4, RZ ;", ["UR4"]),
        (".L_x_1:\n@P1 IADD3 R0, R1, UR4, RZ ;\nUMOV UR4, URZ ;\n@P0 BRA `(.L_x_1) ;", []),  # in a later turn
        ("BRA `(.L_x_2) ;\n.L_x_1:\nIADD3 R0, R1, UR4, RZ ;\nEXIT ;\n.L_x_2:\nUMOV UR4, 0x1 ;\nBRA `(.L_x_1) ;", []),
    ],
)
def test_registers_that_nothing_has_written(code: str, found: list[str]) -> None:
    text = "\n".join(line if line.startswith(".") else f"        /*0040*/   {line}" for line in code.split("\n"))
    assert disassembly.unwritten(text) == found
