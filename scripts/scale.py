import sys
import torch
import triton
import triton.language as tl
sys.path.insert(0, "scripts")
from convtime import timed


@triton.jit
def scaled(x, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    for i in range(LOOPS):
        at = (tl.program_id(0) * LOOPS + i) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at) * 0.999)


@triton.jit
def columns(x, BV: tl.constexpr):
    S: tl.constexpr = 128 // BV
    at = tl.program_id(0) // S * 16384 + tl.arange(0, 128)[:, None] * 128 + tl.program_id(0) % S * BV + tl.arange(0, BV)[None, :]
    tl.store(x + at, tl.load(x + at) * 0.999)


for B in (64, 256):
    s = torch.randn(B * 32 * 16384, device="cuda")
    n = s.numel()
    print(B, "mul_", round(timed(lambda: s.mul_(0.999)), 1))
    for b, w, l in ((512, 4, 1), (1024, 4, 1), (2048, 4, 1), (4096, 4, 1), (4096, 8, 1), (8192, 4, 1), (8192, 8, 1), (16384, 16, 1), (16384, 8, 1), (2048, 4, 8), (4096, 8, 4), (512, 1, 1), (1024, 2, 1)):
        print(B, "scaled", b, w, l, round(timed(lambda: scaled[(n // b // l,)](s, b, l, num_warps=w)), 1), flush=True)
    for bv, w in ((32, 4), (32, 8), (64, 8), (128, 16)):
        print(B, "columns", bv, w, round(timed(lambda: columns[(n // 128 // bv,)](s, bv, num_warps=w)), 1), flush=True)
