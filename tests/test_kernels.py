"""Every kernel of every op compiled without a GPU: no spills, registers and shared memory that fit, wide loads.

Each is compiled for sm_90 (FULL), for one of the consumer architectures (NEWER) and for one of OTHERS, which take turns
among the ops. With --every-kernel all are compiled for all architectures. SPILLS lists the kernels that may spill, with
the most bytes they may move, and why.

Compiling takes minutes, and the same sources give the same machine code. kernels_that_fit.txt therefore holds a digest
of what each passing test depends on: sources, constants, arguments, compilers, allowances, and the test. A test whose
digest stands there compiles nothing, but for one digest in eight; SEED=1 to 7 in the environment choose another eighth.
`make compiled` compiles what has changed and writes the file.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import triton

from ridgeline import boundary, cuda, device, op
from ridgeline.boundary import Launch
from ridgeline.cuda import CudaKernel
from ridgeline.lab.analysis import disassembly, inspect
from ridgeline.lab.presentation.site import compiled
from ridgeline.lab.presentation.site.kernels import digest
from ridgeline.op import Case, Implementation, RidgelineError, Spec

# {(op, implementation, kernel, arch): (bytes per thread in and out, why)}
SPILLS: dict[tuple[str, str, str, str], tuple[int, str]] = {
    ("softmax", "cuda_cluster", "softmax_bwd", "sm_90"): (
        8,
        "one register at 65536 columns, for a third block a multiprocessor: 2991 GB/s against 2925",
    ),
    ("batch_norm", "triton", "_sums", "sm_80"): (32, "two registers of channels_last in float32; untimed there"),
    ("batch_norm", "triton", "_sums", "sm_100"): (8, "as sm_80's"),
    ("batch_norm", "triton", "_statistics", "sm_90"): (8, "one register in float32"),
    ("sample", "cuda_cluster", "sample_fwd", "sm_90"): (
        68,
        "nine registers at 128256 columns, for a second block a multiprocessor: 32 rows at once; untimed",
    ),
    **{
        ("sample", "triton", "_fwd", arch): (64, "eight registers at 128256 columns; untimed there")
        for arch in ("sm_80", "sm_86", "sm_89")
    },
    ("adamw", "triton", "_step", "sm_100"): (
        8,
        "one register of four tensors in half precision; the kernel waits for memory",
    ),
    ("log_softmax", "triton", "_bwd", "sm_90"): (
        8,
        "one register at 33x129 in bfloat16, of a tile that the rule makes of short rows",
    ),
    ("softmax", "triton", "_bwd", "sm_80"): (8, "one register at 8192 columns in bfloat16"),
    ("add_layer_norm", "triton", "_fwd", "sm_80"): (
        16,
        "two registers at 1024 columns in bfloat16, of tiles that an H100 is best with",
    ),
    **{
        ("hgemm", "cuda_stages", "hgemm_stages", arch): (
            16,
            "two registers where edges need some; 373 TFLOP/s at 4096, with half the depth 329",
        )
        for arch in ("sm_80", "sm_90", "sm_100")
    },
    ("attention", "triton", "_bwd", "sm_90"): (
        404,
        "causal at D 200 and 256, which are Gluon's there; 100 at D 128 where a length is no multiple of the tile's",
    ),
    ("attention", "triton", "_bwd_dq", "sm_90"): (
        120,
        "a softcap at D 128, which is Gluon's there; 76 a window's third loop: the tile that was fastest on an H100",
    ),
    ("attention", "triton", "_fwd", "sm_90"): (36, "causal at D 200 and 256, which are Gluon's there"),
    ("attention", "triton", "_bwd", "sm_80"): (12, "two registers of a softcap at D 256; untimed there"),
    ("rwkv6", "triton", "scan_chunks", "sm_90"): (160, "the gradient of k at 64 columns; untimed"),
    ("ssd", "triton", "scan_chunks", "sm_90"): (532, "the gradient of B at 128 columns; untimed"),
    ("gated_linear_attention", "triton", "scan_chunks", "sm_90"): (
        664,
        "the gradient of k with a gate per head at 128 columns, whose state fills the registers; untimed",
    ),
    ("gated_linear_attention", "triton", "scan_chunks", "sm_89"): (
        176,
        "the gradient of k with a gate per channel at 128 columns; tiles untimed there",
    ),
    ("gated_linear_attention", "triton", "scan_chunks", "sm_100"): (484, "as sm_89's"),
    ("gated_linear_attention", "triton_chunks", "write_query_gradients", "sm_90"): (580, "for a third block; untimed"),
    ("gated_linear_attention", "triton_chunks", "write_key_gradients", "sm_90"): (
        512,
        "for a second block; 416 bytes of stack in one kernel with the above took 900 us",
    ),
    ("gated_linear_attention", "triton_chunks", "write_outputs", "sm_90"): (80, "for a third block: 196 us, not 222"),
    ("ssd", "gluon_chunks", "shared_keys", "sm_90"): (672, "three tiles of sums in registers: 700 us"),
    ("ssd", "triton_chunks", "write_query_gradients", "sm_90"): (392, "for a third block: 968 us"),
    ("ssd", "triton_chunks", "write_key_gradients", "sm_90"): (552, "Triton 3.6, for a second block: 1839 us"),
    ("ssd", "triton_chunks", "write_outputs", "sm_90"): (48, "as gated_linear_attention's"),
    ("gated_linear_attention", "gluon", "walk_heads", "sm_90"): (160, "most in the warp that sums gates: 144 us"),
    ("gated_linear_attention", "gluon", "walk_keys", "sm_90"): (208, "addresses; untimed"),
    ("linear_attention", "triton_chunks", "write_key_gradients", "sm_90"): (56, "as gated_linear_attention's"),
    ("linear_attention", "triton_chunks", "write_query_gradients", "sm_100"): (8, "one register in float16; untimed"),
    ("gated_linear_attention", "triton", "own_pairs", "sm_90"): (
        152,
        "outside its loops, so that two blocks fit: 377 us",
    ),
    ("rwkv6", "triton", "own_pairs", "sm_90"): (96, "as gated_linear_attention's"),
    ("gated_linear_attention", "triton", "own_gradients_at_once", "sm_90"): (104, "685 us, with fewer registers 815"),
    ("rwkv6", "triton", "own_gradients_at_once", "sm_90"): (480, "as gated_linear_attention's; untimed"),
    ("gated_linear_attention", "triton", "forward_chains", "sm_90"): (264, "the warpgroup of decays; 199 us"),
    ("rwkv6", "triton", "forward_chains", "sm_90"): (120, "80 registers, so that two blocks fit: 187 us"),
    ("gated_linear_attention", "triton", "gradient_chains", "sm_90"): (1780, "985 us; the note says what is next"),
    ("rwkv6", "triton", "gradient_chains", "sm_90"): (960, "as gated_linear_attention's: 901 us"),
    **{("rwkv6", "triton", "own_pairs", arch): (8, "one register; tiles untimed there") for arch in ("sm_86", "sm_89")},
    ("gated_delta_rule", "triton", "chain_states", "sm_90"): (460, "forward with a gate per channel at 128: 340 us"),
    ("gated_delta_rule", "triton", "pairs_by_token", "sm_90"): (
        320,
        "bound to 168 registers: 187 us; float16 the most",
    ),
    ("gated_delta_rule", "triton", "chain_gradients", "sm_90"): (152, "with a gate per head at 128 columns; untimed"),
    ("gated_delta_rule", "triton", "chunk_gradients", "sm_90"): (
        1220,
        "two warpgroups of 255 registers share a multiprocessor: 503 us; packed and with heads that share q the most",
    ),
    ("gated_delta_rule", "triton", "walk_chunks", "sm_90"): (88, "with a gate per channel in reverse: part of 615 us"),
    ("gated_delta_rule", "triton", "channel_gradients", "sm_90"): (504, "mostly outside its loop: 1167 us"),
    ("gated_delta_rule", "triton", "gradients_by_token", "sm_90"): (
        280,
        "three gradients at 64 x 128, packed and with heads that share q; untimed",
    ),
    ("gated_delta_rule", "triton", "gradients_by_channel", "sm_90"): (40, "float32 at 8 columns; untimed"),
    ("gated_delta_rule", "triton", "half_pairs_by_channel", "sm_90"): (540, "for short chunks and strong gates"),
    ("gated_delta_rule", "triton", "half_gradients_by_channel", "sm_90"): (
        3540,
        "64 x 32 channels, half of it for strong gates: 2652 us, 3176 with 64 columns of v and more spills",
    ),
    ("rwkv7", "triton", "half_pairs_by_channel", "sm_90"): (160, "for short chunks and strong gates"),
    ("rwkv7", "triton", "half_gradients_by_channel", "sm_90"): (320, "for short chunks and strong gates"),
    ("rwkv7", "triton", "low_pairs_at_once", "sm_90"): (208, "bound to 128 registers: 643 us, without 663"),
    ("rwkv7", "triton", "chain_states", "sm_90"): (300, "float32 at 8 columns; untimed"),
    ("rwkv7", "triton", "pairs_by_channel", "sm_90"): (264, "float32 at 8 columns; untimed"),
    ("rwkv7", "triton", "gradients_by_channel", "sm_90"): (2720, "float32 at 8 columns; untimed"),
    **{
        (name, "triton", kernel, arch): (most, "as sm_90's, of tiles untimed there")
        for arch in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
        for name, kernel, most in (
            ("gated_delta_rule", "chain_states", 1024),
            ("gated_delta_rule", "chain_gradients", 1024),
            ("gated_delta_rule", "chain_segments", 128),
            ("rwkv7", "chain_segments", 128),
            ("gated_delta_rule", "pairs_by_token", 16),
            ("gated_delta_rule", "gradients_by_token", 3504),
            ("gated_delta_rule", "gradients_by_channel", 1536),
            ("rwkv7", "chain_states", 1024),
            ("rwkv7", "chain_gradients", 1024),
            ("rwkv7", "pairs_by_channel", 512),
            ("rwkv7", "gradients_by_channel", 3072),
            ("gated_delta_rule", "half_gradients_by_channel", 304),
            ("rwkv7", "half_pairs_by_channel", 192),
            ("rwkv7", "half_gradients_by_channel", 400),
        )
    },
    ("gated_linear_attention", "triton", "scan_chunks", "sm_86"): (176, "as sm_89's"),
    ("gated_linear_attention", "triton", "scan_chunks", "sm_80"): (1208, "as sm_89's"),
    ("gated_linear_attention", "triton", "scan_chunks", "sm_120"): (820, "as sm_89's, and of v with a gate per head"),
    ("linear_attention", "triton", "scan_chunks", "sm_100"): (24, "two registers in float32; tiles untimed there"),
    ("linear_attention", "triton", "scan_chunks", "sm_120"): (24, "as sm_100's"),
    ("rwkv6", "triton", "scan_chunks", "sm_89"): (176, "as sm_86's"),
    ("rwkv6", "triton", "scan_chunks", "sm_80"): (104, "the gradient of k at 64 columns; tiles untimed there"),
    ("rwkv6", "triton", "scan_chunks", "sm_120"): (120, "the gradient of k at 64 columns; tiles untimed there"),
    ("int4_linear", "triton", "_fwd", "sm_120"): (8, "one register of float32 in ieee precision"),
    ("rwkv6", "triton", "scan_chunks", "sm_86"): (240, "the gradient of r at 64 columns; tiles untimed there"),
    ("rwkv6", "triton", "scan_chunks", "sm_100"): (456, "the gradient of r at 64 columns; tiles untimed there"),
    ("attention", "triton", "_fwd", "sm_100"): (8, "one register at D 64 without a mask, of tiles untimed there"),
    ("matmul", "triton", "_fwd", "sm_90"): (
        16,
        "two registers of float32 in ieee precision at 67x45 @ 45x35, whose 256 threads have 80",
    ),
    ("matmul", "triton", "_fwd", "sm_100"): (16, "as sm_90's"),
    ("linear", "triton", "_fwd", "sm_80"): (16, "one register of float32 in ieee precision with silu, as matmul's"),
    ("linear", "triton", "_fwd", "sm_90"): (16, "as sm_80's"),
    ("linear", "triton", "_fwd", "sm_100"): (16, "as matmul's, and one register of a tile with silu, untimed there"),
    ("gated_linear", "triton", "_fwd", "sm_90"): (16, "matmul's kernel, in float32 at 67x45 -> 40"),
    ("gated_linear", "triton", "_fwd", "sm_100"): (16, "as sm_90's"),
    ("attention", "gluon", "_fwd", "sm_90"): (
        192,
        "a softcap at D 256, 133 us where `triton` takes 318; 88 a window at D 128, masks in the loop",
    ),
    ("attention", "gluon", "_bwd", "sm_90"): (
        1720,
        "a softcap at D 128, 1.7 ms where `triton` takes 2.9; 384 a window: sums and two tiles are 192 of 208",
    ),
    ("attention", "gluon", "_bwd_wide", "sm_90"): (
        232,
        "a softcap; 208 before and after loops, but for some of dQ's: dV or dK and a tile are 160 of 208",
    ),
    ("quantize_fp8", "triton", "_tiles", "sm_80"): (
        192,
        "blocks of 128 x 128 whose rows begin anywhere, encoded without an instruction for it",
    ),
    **{
        ("decode_attention", "triton", "_attend", arch): (
            184,
            "eight queries of eight heads, before the loop; untimed there",
        )
        for arch in ("sm_80", "sm_86", "sm_89", "sm_120")
    },
    ("decode_attention", "triton", "_attend", "sm_100"): (96, "six registers of an int8 cache; untimed there"),
    ("mla_decode", "triton", "_attend_latent", "sm_100"): (
        528,
        "64 rows of 512 columns, whose sums leave tensor memory to be rescaled; untimed there",
    ),
    ("mla_decode", "triton", "_attend_latent", "sm_120"): (32, "four registers in blocks; untimed there"),
    ("moe", "triton", "_fwd", "sm_90"): (64, "gate's and up's 128 x 128 sums in 256 threads; untimed there"),
    ("moe", "triton_tma", "_fwd", "sm_90"): (16, "gpt-oss's biases beside sums of 128 x 256: 900 us, 604 TFLOP/s"),
    ("moe", "triton", "_fwd", "sm_120"): (80, "ten registers of 32 rows of int4 at 1024 tokens; untimed there"),
    ("moe", "triton", "_fwd", "sm_100"): (16, "two registers of the same sums; untimed there"),
    ("mla_decode", "triton", "_attend_latent", "sm_90"): (8, "one register in 16 rows of bfloat16; untimed there"),
    ("softmax", "triton", "_fwd", "sm_90"): (
        8,
        "one register at 16 columns in float32, of a tile that the rule makes of short rows",
    ),
    ("radix_sort", "cuda", "radix_onesweep", "sm_100"): (8, "one register of pairs of 4 bytes; untimed there"),
    ("attention_varlen", "triton", "_bwd", "sm_80"): (12, "a register at D 256"),
    ("attention_varlen", "triton", "_bwd", "sm_90"): (
        528,
        "D 256, which is Gluon's there; 24 at D 128, as attention's",
    ),
    ("attention_varlen", "triton", "_bwd_dq", "sm_90"): (40, "as attention's"),
    ("attention_varlen", "gluon", "_fwd", "sm_90"): (12, "as attention's"),
    ("attention_varlen", "gluon", "_bwd", "sm_90"): (256, "as attention's"),
    ("attention_varlen", "gluon", "_bwd_wide", "sm_90"): (160, "as attention's, and what a piece is"),
    ("flex_attention", "triton", "_fwd", "sm_90"): (16, "two registers with documents at D 128; untimed"),
    ("flex_attention", "triton", "_bwd", "sm_90"): (
        304,
        "alibi at D 128 in attention's tiles; 224 with softcap's slope, 184 with masks; untimed",
    ),
    ("flex_attention", "triton", "_delta", "sm_80"): (8, "one register of softcap at D 16 in float16; untimed there"),
    ("flex_attention", "triton", "_fwd", "sm_100"): (180, "documents at D 64; untimed there"),
    ("flex_attention", "triton", "_bwd_dq", "sm_100"): (16, "a register of documents at D 64; untimed there"),
    **{
        ("flex_attention", "triton", "_bwd_dq", arch): (20, "three registers of softcap at D 16; untimed there")
        for arch in ("sm_80", "sm_86", "sm_89", "sm_120")
    },
    **{
        ("flex_attention", "triton", "_bwd", arch): (most, "documents, alibi and softcap at D 64; untimed there")
        for arch, most in (("sm_80", 64), ("sm_86", 64), ("sm_89", 64), ("sm_100", 212), ("sm_120", 132))
    },
    ("add_layer_norm", "triton", "_fwd", "sm_86"): (16, "as sm_80's"),
    ("add_layer_norm", "triton", "_fwd", "sm_89"): (16, "as sm_80's"),
    ("add_layer_norm", "triton", "_fwd_wide", "sm_86"): (8, "one register at 50257 columns in bfloat16; untimed there"),
    ("add_layer_norm", "triton", "_fwd_wide", "sm_89"): (8, "as sm_86's"),
    ("add_rms_norm", "triton", "_bwd", "sm_120"): (12, "a register at 50257 columns in bfloat16; untimed there"),
    ("attention", "triton", "_fwd", "sm_86"): (28, "four registers in float32, one at D 128; untimed there"),
    ("attention", "triton", "_fwd", "sm_89"): (28, "as sm_86's"),
    ("attention_varlen", "triton", "_fwd", "sm_86"): (16, "two registers in float32; untimed there"),
    ("attention_varlen", "triton", "_fwd", "sm_89"): (16, "as sm_86's"),
    ("attention_varlen", "triton", "_bwd", "sm_86"): (24, "three registers at D 64; untimed there"),
    ("attention_varlen", "triton", "_bwd", "sm_89"): (24, "as sm_86's"),
    ("attention_varlen", "triton", "_bwd", "sm_120"): (16, "two registers at D 64; untimed there"),
    ("attention_varlen", "triton", "_bwd_dq", "sm_86"): (24, "three registers in float32; untimed there"),
    ("attention_varlen", "triton", "_bwd_dq", "sm_89"): (24, "as sm_86's"),
    ("sparse_matmul", "triton", "_fwd", "sm_100"): (16, "two registers for training at 8192; untimed there"),
    ("conv2d", "triton", "_conv", "sm_120"): (8, "one register of 128 x 64 tiles with ReLU; untimed there"),
    ("conv2d", "triton", "_conv", "sm_90"): (
        176,
        "where SiLU's input is stored; 8 warps spill none and take 1.3 times",
    ),
    ("conv2d", "triton_fused", "_conv", "sm_90"): (
        176,
        "where SiLU's input is stored; 8 warps spill none and take 1.3 times",
    ),
    ("cross_entropy", "triton", "_bwd", "sm_120"): (12, "two registers at 33x129 in half precision"),
    ("gemv", "triton", "_few", "sm_120"): (8, "one register for 8 rows of x in bfloat16; untimed there"),
    ("gemv", "triton", "_fwd", "sm_120"): (8, "one register at 33x129 in float16"),
    ("group_norm", "triton", "_fwd_wide", "sm_120"): (32, "1024 threads of 64 registers, channels last in float32"),
    ("nms", "triton", "_walk", "sm_90"): (32, "four registers at a program's start, outside its loops"),
    ("group_norm", "triton", "_bwd_wide", "sm_86"): (8, "one register for SiLU; untimed there"),
    ("group_norm", "triton", "_bwd_wide", "sm_89"): (8, "as sm_86's"),
    ("group_norm", "triton", "_bwd_wide", "sm_120"): (48, "six registers for SiLU; untimed there"),
    ("group_norm", "triton", "_bwd_wide", "sm_80"): (8, "as sm_86's"),
    ("group_norm", "triton", "_bwd_wide", "sm_90"): (8, "one register for SiLU; clusters serve there"),
    ("group_norm", "triton", "_bwd_wide", "sm_100"): (56, "seven registers for SiLU; clusters serve there"),
    ("linear", "triton", "_fwd", "sm_86"): (16, "as sm_80's"),
    ("linear", "triton", "_fwd", "sm_89"): (16, "as sm_80's"),
    ("matmul", "triton", "_fwd", "sm_120"): (12, "two registers of 128 x 256 tiles at 2048; one of float32 at 4096"),
    ("matmul", "triton_persistent", "_stay", "sm_120"): (8, "one register of 128 x 64 tiles; untimed there"),
    ("quantize_fp8", "triton", "_tiles", "sm_86"): (216, "as sm_80's"),
    ("quantize_fp8", "triton", "_tiles", "sm_89"): (8, "one register at 33x129 in float32"),
    ("sgemm", "cuda_v9", "sgemm_v9", "sm_120"): (68, "128 registers for two blocks a multiprocessor; untimed there"),
    ("silu_mul", "triton", "_columns", "sm_86"): (12, "two registers at 33x129 in half precision"),
    ("silu_mul", "triton", "_columns", "sm_89"): (12, "as sm_86's"),
    ("weighted_sum", "triton", "_bwd_dw", "sm_120"): (
        56,
        "33x129 in float16, of a tile that the rule makes of short rows",
    ),
}
# The Triton of requirements.lock. Other versions may spill a few registers more, and many more in Gluon's kernels:
# Triton 3.9 up to 1016 bytes in attention's backward; 3.6 120 bytes in quantize_int8 of 33x129 for sm_100.
OWN = "3.7.1"
if triton.__version__ == "3.6.0":
    SPILLS |= {
        ("attention", "triton", "_fwd", "sm_90"): (
            512,
            "a mask or a bias at D 16, whose tiles are in shared memory as often as the keys'",
        ),
        ("reduce_sum", "triton", "_fwd", "gfx942"): (136, "rows of 33x129 single bytes"),
    }
if triton.__version__ == "3.9.0":
    wide = "D 200 and 256, which are Gluon's there: a mask or the rung by name comes here"
    SPILLS |= {
        ("attention", "triton", "_fwd", "sm_90"): (152, wide),
        ("attention", "triton", "_bwd_dq", "sm_90"): (104, wide),
        ("attention", "triton", "_bwd", "sm_90"): (844, wide),
        ("attention_varlen", "triton", "_bwd", "sm_90"): (1068, wide),
        ("matmul", "triton", "_fwd", "sm_80"): (24, "six registers of float32 in ieee precision at 4096"),
    }
MORE = {OWN: {}, "3.6.0": {"gluon": 128, "triton": 128}, "3.9.0": {"gluon": 2048}}.get(triton.__version__, {})
MOVED = 0 if triton.__version__ == OWN else 64
REGISTERS = 65536  # of a multiprocessor, each thread's by eights: a block that asks for more does not start
REFUSED = {
    (op, arch) for op in ("fp8_matmul", "fp8_linear", "w4a8_linear") for arch in ("sm_80", "sm_86")
}  # no 8-bit floating-point units
REFUSED |= {("w4a8_linear", "gfx942")}  # its 8-bit numbers have another bias
CHECKS = 2  # small cases of an op, beside its benchmarks
# Ops whose kernels take seconds each to compile: implementations share what is compiled.
LARGE = ("attention", "attention_varlen")
# Ops with one kernel in dozens of forms: one of each kind is compiled everywhere.
MANY = ("linear_attention", "gated_linear_attention", "rwkv6", "ssd", "gated_delta_rule", "rwkv7")
MANY += ("moe", "conv2d", "batch_norm", "flex_attention", "fp8_linear")
FULL = "sm_90"  # what results are recorded of: benchmarks' kernels are compiled, and one of each kind; elsewhere these
NEWER = ("sm_120", "sm_86", "sm_89")  # one of them for each op, in turn
OTHERS = ("sm_80", "sm_100", "gfx942")  # likewise, in the same turn

MEMO = Path(__file__).with_name("kernels_that_fit.txt")
SEED = int(os.environ.get("SEED", 0))

pytestmark = pytest.mark.compiles


def runs(implementation: Implementation, arch: str) -> bool:
    """Whether an implementation can run on the first card of an architecture."""
    i, card = implementation, device.known(arch)
    if not i.is_kernel or (i.op.name, arch) in REFUSED:
        return False
    if card.backend == "hip":
        return i.kind == "triton" and not i.arch
    return i.arch <= card.capability <= (i.newest or card.capability) and i.shared <= card.shared_memory


def targets(implementation: Implementation, turn: int, every: bool) -> list[str]:
    """The architectures to compile an implementation for. turn: a number of its op."""
    able = [arch for arch in inspect.ARCHES if runs(implementation, arch)]
    mine = {FULL}
    for some in (NEWER, OTHERS):
        mine |= set([a for a in (*some[turn % 3 :], *some[: turn % 3]) if a in able][:1])
    return [arch for arch in able if every or arch in mine]


def turns() -> list[tuple[Implementation, int]]:
    """Every implementation with its op's turn, which comes from the name: a new op moves no other one's."""
    return [(i, crc32(o.name.encode())) for o in op.registry().values() for i in o.implementations.values()]


def rungs(every: bool) -> list[tuple[Implementation, str]]:
    """Returns which kernels are compiled for which GPUs."""
    return [(i, arch) for i, turn in turns() for arch in targets(i, turn, every)]


def names() -> set[str]:
    """The tests of which kernels_that_fit.txt may hold digests."""
    return {f"{i.op.name}-{i.name}-{arch}" for i, arch in rungs(False)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_kernels_fit:
        found = rungs(metafunc.config.getoption("every_kernel"))
        ids = [f"{i.op.name}-{i.name}-{arch}" for i, arch in found]
        metafunc.parametrize(("implementation", "arch"), found, ids=ids)


def calls(
    implementation: Implementation, arch: str, small: int | None = CHECKS
) -> Iterator[tuple[Launch, dict[str, Any]]]:
    """The launches of benchmarks and some small cases (None: all), and the facts of their calls; bfloat16 first."""
    o = implementation.op
    bench = [case for case in o.cases if case.use == "bench"]
    for case in bench + [case for case in o.cases if case.use != "bench"][:small]:
        for dtype in sorted(case.dtypes):
            facts = {"implementation": implementation, "case": case.name, "bench": case.use == "bench", "dtype": dtype}
            try:
                for direction, launch in inspect.launches(o, implementation, case, dtype, arch):
                    yield launch, facts | {"direction": direction}
            except RidgelineError:
                continue  # a case or dtype that the implementation refuses, as test_ops checks


def spelled_out(constants: dict[str, Any]) -> list[tuple[str, Any]]:
    """The constants of a launch, with those in a NamedTuple one by one."""
    found: list[tuple[str, Any]] = []
    for name, value in constants.items():
        found += value._asdict().items() if hasattr(value, "_asdict") else [(name, value)]
    return found


def one_of_each(found: Iterable[tuple[Launch, dict[str, Any]]]) -> list[tuple[Launch, dict[str, Any]]]:
    """The launches that show something new: an option, a dtype, a kind of argument, or in benchmarks a size.

    Benchmarks come first, those with the most options before others.
    """

    def kinds(arg: Any, at: tuple[int, ...] = ()) -> Iterator[Any]:
        if isinstance(arg, tuple):
            for n, part in enumerate(arg):
                yield from kinds(part, (*at, n))
        else:
            yield at, arg.dtype.is_floating_point if isinstance(arg, torch.Tensor) else type(arg)

    def order(one: tuple[Launch, dict[str, Any]]) -> tuple[bool, int]:
        launch, facts = one
        return not facts["bench"], -sum(value is True for _, value in spelled_out(launch.constants)) * facts["bench"]

    kept, seen = [], set()
    for launch, facts in sorted(found, key=order):
        constants = spelled_out(launch.constants)
        new = {(k, v) for k, v in constants if v is True or (facts["bench"] and type(v) in (int, bool))}
        new |= {facts["dtype"], *kinds(launch.args)}
        new = {(id(launch.kernel), one) for one in new} - seen
        if new:
            kept.append((launch, facts))
            seen |= new
    return kept


Chosen = list[tuple[Launch, dict[str, Any]]]


def chosen(implementation: Implementation, arch: str, every: bool) -> Chosen:
    """Launches of an implementation, over its benchmarks, small cases and dtypes, forward and backward. With `every`
    all that differ."""
    if implementation.op.name in LARGE and not every:  # what implementations share is compiled for the first of them
        able = [i for name in LARGE for i in op.registry()[name].implementations.values() if runs(i, arch)]
        all_of_them = (one for i in able for one in calls(i, arch, None if arch == FULL else 0))
        found = [one for one in one_of_each(all_of_them) if one[1]["implementation"] is implementation]
    else:
        found = [*calls(implementation, arch)]
    different = {inspect.signature(launch): (launch, facts) for launch, facts in found}
    if implementation.op.name not in LARGE and not every:
        some = {inspect.signature(launch) for launch, _ in one_of_each(found)}
        if arch == FULL and implementation.op.name not in MANY:
            some |= {inspect.signature(launch) for launch, facts in found if facts["bench"]}
        different = {signature: one for signature, one in different.items() if signature in some}
    return [*different.values()]


def kernels(implementation: Implementation, arch: str, found: Chosen) -> list[inspect.Resources]:
    """What the kernels of these launches take."""
    inspect.compile_side_by_side([launch for launch, _ in found], arch)
    made = []
    for launch, facts in found:
        whose = {"op": implementation.op.name, "implementation": implementation.name}
        code = inspect.of_launch(launch)
        if "wgmma" in code.texts.get("ptx", "") and arch == FULL:  # `unwritten` reads SASS
            code = inspect.of_launch(launch, disassemble=True)
        made.append(replace(code, **whose, **{k: facts[k] for k in ("case", "dtype", "direction")}))
    return made


def faults(implementation: Implementation, arch: str, found: Chosen) -> list[str]:
    """What is wrong with the kernels of these launches, a sentence each."""
    wrong = []
    for r in kernels(implementation, arch, found):
        listed = SPILLS.get((r.op, r.implementation, r.kernel, arch), (0, ""))[0]
        allowed = listed + MORE.get(implementation.kind, MOVED)
        what = f"{r.kernel} ({r.case} {r.dtype} {r.direction}, {r.constants})"
        if r.stack and r.spill_loads + r.spill_stores > allowed:
            wrong.append(f"{what} spills {r.spill_stores} bytes out and {r.spill_loads} in; {allowed} allowed")
        if r.shared > device.known(arch).shared_memory:
            most = device.known(arch).shared_memory
            wrong.append(f"{what} takes {r.shared:,} bytes of shared memory; {arch} has {most:,}")
        if r.threads > 1024:
            wrong.append(f"{what} has {r.threads} threads per block; 1024 is the most")
        if r.kind == "cuda" and -(-r.registers // 8) * 8 * r.threads > REGISTERS:
            wrong.append(
                f"{what} has {r.threads} threads of {r.registers} registers; a multiprocessor has {REGISTERS:,}"
            )
        if arch == FULL and implementation.kind in ("triton", "gluon") and r.unwritten:
            wrong.append(f"{what} reads {', '.join(r.unwritten)} before it writes them: the assembler's fault")
        if "packed" in implementation.name and implementation.op.case(r.case).use == "bench" and r.widest_load < 16:
            wrong.append(f"{what} has no load of 16 bytes")
    return wrong


def stamp(value: Any) -> Any:
    """A constant by what it says; a function by its source, with that of all it calls."""
    if isinstance(value, tuple):
        return type(value).__name__, getattr(value, "_fields", ()), [stamp(part) for part in value]
    return getattr(value, "cache_key", None) or repr(value)


@cache
def judges() -> list[Any]:
    """What compiles a kernel and decides whether it fits, but for its allowances."""
    texts = [Path(str(module.__file__)).read_text() for module in (inspect, disassembly)]
    compilers = boundary.compiled, boundary._assembler, boundary._newer, cuda.compile_source
    texts += [getsource(one) for one in (*compilers, kernels, faults)]
    ptxas = triton.knobs.nvidia.ptxas
    return [*texts, MORE, MOVED, REGISTERS, FULL, triton.__version__, ptxas.version, compiled.compiler("cuda")]


def fingerprint(implementation: Implementation, arch: str, found: Chosen) -> str:
    """Names everything that `faults` of these launches depends on."""
    parts = []
    for launch, facts in found:
        kernel = digest(launch) if isinstance(launch.kernel, CudaKernel) else launch.kernel.cache_key
        constants = [(name, stamp(value)) for name, value in sorted(launch.constants.items())]
        call = [facts[name] for name in ("case", "dtype", "direction", "bench")]
        parts.append(repr((kernel, constants, inspect.signature(launch)[3:], call)))
    whose = implementation.op.name, implementation.name
    allowed = {key: most for key, (most, _) in SPILLS.items() if key[:2] == whose and key[3] == arch}
    card = repr(device.known(arch)), compiled.compiler(implementation.kind)
    said = repr((whose, arch, card, sorted(parts), sorted(allowed.items()), judges()))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@cache
def that_fit() -> dict[str, str]:
    """{test: digest} of the tests that have passed."""
    return dict(line.split() for line in MEMO.read_text().splitlines()) if MEMO.exists() else {}


def remember(test: str, name: str) -> None:
    """Adds or changes a digest. One line, written at once: other processes write to the file as well."""
    with MEMO.open("a") as file:
        file.write(f"{test} {name}\n")


def test_kernels_fit(implementation: Implementation, arch: str, request: pytest.FixtureRequest) -> None:
    every, record = (request.config.getoption(name) for name in ("every_kernel", "remember_kernels"))
    test = f"{implementation.op.name}-{implementation.name}-{arch}"
    found = chosen(implementation, arch, every)
    assert found, f"{implementation.op.name} {implementation.name} supports none of its op's cases on {arch}"
    name = fingerprint(implementation, arch, found)
    if that_fit().get(test) == name and not every and (record or (int(name, 16) + SEED) % 8):
        return
    wrong = faults(implementation, arch, found)
    assert not wrong, "\n".join(wrong)
    if record and not every:
        remember(test, name)


def test_a_fingerprint_names_what_a_kernel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for the same launches, and another for another source, constant, allowance or compiler."""
    implementation = op.registry()["gelu"].implementations["triton"]
    found = chosen(implementation, FULL, False)
    name, seen = fingerprint(implementation, FULL, found), set[str]()
    assert name == fingerprint(implementation, FULL, chosen(implementation, FULL, False))
    launch, facts = found[0]
    more = replace(launch, constants=launch.constants | {"num_warps": 16})
    seen.add(fingerprint(implementation, FULL, [(more, facts), *found[1:]]))
    seen.add(fingerprint(implementation, "sm_80", found))
    with monkeypatch.context() as patch:
        patch.setitem(SPILLS, ("gelu", "triton", launch.kernel.__name__, FULL), (8, ""))
        seen.add(fingerprint(implementation, FULL, found))
    with monkeypatch.context() as patch:
        patch.setattr(launch.kernel, "hash", "another")
        seen.add(fingerprint(implementation, FULL, found))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "compiler", lambda kind: "another")
        seen.add(fingerprint(implementation, FULL, found))
    assert len(seen) == 5
    assert name not in seen


def test_the_digests_are_of_tests_that_exist() -> None:
    assert [*that_fit()] == sorted(that_fit()), "run: make compiled"
    assert that_fit().keys() <= names(), "run: make compiled"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [6, 64])
def test_the_newer_assembler_for_the_gates_gradients(dtype: str, width: int) -> None:
    """ptxas 12.8 found three quarters of a product's rows by registers that nothing had written: on an H200 dg was
    wrong from its 17th row on, and reads left the block's memory. `own_gradients` says that it wants the other one,
    whatever becomes of the fault as the kernel changes."""
    o = op.registry()["gated_linear_attention"]
    case = Case("small", (*(Spec(1, 37, 2, width),) * 4,), {}, (dtype,), "test")
    (one,) = [
        launch
        for _, launch in inspect.launches(o, o.implementations["triton"], case, dtype, FULL)
        if launch.kernel.__name__ == "own_gradients"
    ]
    assert one.constants["assembler"] == "newer"
    code = inspect.of_launch(one, disassemble=True)
    assert "HGMMA" in code.texts["sass"]
    assert not code.unwritten


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_in_float32_have_whole_divisions_and_float64_sums(dtype: str) -> None:
    moe, whole = op.registry()["moe"], dtype == "float32"
    case = next(c for c in moe.cases if c.kwargs.get("activation") == "swiglu_oai" and "scales" not in c.kwargs)
    found = inspect.resources(moe, moe.implementations["triton"], case, dtype, "sm_90")
    code = "".join([r.texts["ptx"] for r in found])
    assert [word in code for word in ("div.rn.f32", ".f64", "div.full.f32")] == [whole, whole, not whole]


def _ptxas(folder: Path, version: str) -> str:
    """Returns the path of a script that says it is that ptxas."""
    path = folder / f"ptxas-{version}"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    path.chmod(0o755)
    return str(path)


def test_the_newer_assembler_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel's option takes effect inside `compiled` alone, and a user's own choice stays if it is new enough."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    before = triton.knobs.nvidia.ptxas.path
    newer, option = triton.knobs.nvidia.ptxas_blackwell.path, {"ptx_options": "--opt-level=3"}
    with inspect._triton_for(FULL):
        with boundary._assembler({"num_warps": 4, "assembler": "newer"}) as constants:
            assert constants == {"num_warps": 4} | option
            assert triton.knobs.nvidia.ptxas.path == newer != before
        assert triton.knobs.nvidia.ptxas.path == before
        with boundary._assembler({"num_warps": 4}) as constants:
            assert (constants, triton.knobs.nvidia.ptxas.path) == ({"num_warps": 4}, before)
        old, new = _ptxas(tmp_path, "12.4"), _ptxas(tmp_path, "12.10")
        monkeypatch.setenv("TRITON_PTXAS_PATH", old)
        with boundary._assembler({"assembler": "newer"}) as constants:
            assert (constants, triton.knobs.nvidia.ptxas.path) == (option, newer)
        with boundary._assembler({}) as constants:
            assert (constants, triton.knobs.nvidia.ptxas.path) == ({}, old)
        monkeypatch.setenv("TRITON_PTXAS_PATH", new)
        with boundary._assembler({"assembler": "newer"}) as constants:
            assert (constants, triton.knobs.nvidia.ptxas.path) == ({}, new)
        monkeypatch.setenv("TRITON_PTXAS_PATH", old)
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", old)
        with (
            pytest.raises(op.RidgelineError, match=r"needs ptxas 12.9 or newer.* is 12.4; set TRITON_PTXAS_PATH"),
            boundary._assembler({"assembler": "newer"}),
        ):
            pass


def test_the_newer_assembler_leaves_the_keys_of_others() -> None:
    """Triton asks for the version in its keys once; other threads compile before or after, with their own ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()
    usual, seen = triton.knobs.nvidia.ptxas, []

    def other() -> None:
        with boundary._assembler({}):
            seen.append(triton.knobs.nvidia.ptxas.path)

    thread = threading.Thread(target=other)
    try:
        with inspect._triton_for(FULL), boundary._assembler({"assembler": "newer"}):
            thread.start()
            thread.join(0.2)
            assert f"release {usual.version}" in get_ptxas_version(90)
    finally:
        get_ptxas_version.cache_clear()
    thread.join()
    assert seen == [usual.path]


def test_every_kernel_is_compiled_for_a_newer_architecture() -> None:
    compiled = rungs(every=False)
    for i, turn in turns():
        able = [arch for arch in NEWER if runs(i, arch)]
        assert len([arch for one, arch in compiled if one is i and arch in NEWER]) == min(1, len(able)), i
        assert {arch for arch in targets(i, turn, every=True) if arch in NEWER} == {*able}
        if i.is_kernel and not able:
            assert i.newest == 90 or i.shared > device.known("rtx5090").shared_memory, i
    assert {arch for _, arch in compiled} == {*inspect.ARCHES}


@pytest.mark.parametrize(
    ("arch", "D"), [("sm_86", 128), ("sm_86", 256), ("sm_90", 128), ("sm_90", 256), ("sm_120", 256)]
)
def test_masks_of_wide_heads_fit(arch: str, D: int) -> None:
    """The tiles of a mask lie in shared memory beside those of keys and values."""
    attention = op.registry()["attention"]
    case = Case(
        "mask",
        (Spec(1, 2, 300, D), *[Spec(1, 2, 200, D)] * 2),
        {"mask": Spec(1, 2, 300, 200, dtype="float32", grad=False)},
    )
    for r in inspect.resources(attention, attention.implementations["triton"], case, "bfloat16", arch):
        assert r.shared <= device.known(arch).shared_memory, f"{r.kernel} takes {r.shared:,} bytes"


def test_the_kernels_of_odd_rows_compile_for_every_size_of_element() -> None:
    """Granules move elements of one and two bytes; wider ones, and rows that 4 bytes divide, move by themselves."""
    transpose = op.registry()["transpose"]
    shifted, packed = "transpose_shifted", "transpose_packed"
    for dtype, columns, name in (
        ("uint8", 137, shifted), ("bfloat16", 137, shifted), ("float32", 137, packed), ("int64", 137, packed),
        ("bfloat16", 138, shifted), ("uint8", 140, shifted),
    ):  # fmt: skip
        case = Case("odd", (Spec(3, 131, columns, grad=False),), dtypes=(dtype,))
        (kernel,) = inspect.resources(transpose, transpose.implementations["cuda_packed"], case, dtype, "sm_90")
        assert (kernel.kernel, kernel.stack, kernel.spill_stores) == (name, 0, 0), (dtype, columns)
        assert kernel.registers <= (40 if name == shifted else 64)
        assert 3 * (kernel.shared + 1024) <= 228 << 10  # blocks of a multiprocessor


def test_no_allowance_for_the_triton_that_is_locked() -> None:
    lock = Path(__file__).parents[1] / "requirements.lock"
    assert f"triton=={OWN}\n" in lock.read_text()


def test_spill_allowances_name_kernels_that_exist() -> None:
    registry = op.registry()
    for name, implementation, _, arch in SPILLS:
        assert implementation in registry[name].implementations
        assert arch in inspect.ARCHES
