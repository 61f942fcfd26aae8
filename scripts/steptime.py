import sys, time
import torch
import triton
import triton.language as tl
from pathlib import Path
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel
from ridgeline.ops.recurrent import _step
T0 = time.time()
sys.path.insert(0, "scripts")
from convtime import timed

STEP = CudaKernel(Path("scripts/step.cu"), "step", "PPPPPPPif")


@triton.jit
def ahead(o, q, k, v, g, state, tiles, scale, BV: tl.constexpr):
    S: tl.constexpr = 128 // BV
    d = tl.arange(0, 128)
    cols = tl.arange(0, BV)
    step = tl.num_programs(0)
    tile = tl.program_id(0)
    pair, c = tile // S, tile % S * BV
    at = pair * 16384 + d[:, None] * 128 + c + cols[None, :]
    old = tl.load(state + at)
    tq, tk, tv, tg = tl.load(q + pair * 128 + d), tl.load(k + pair * 128 + d), tl.load(v + pair * 128 + c + cols), tl.load(g + pair)
    for now in range(tile, tiles, step):
        nxt = now + step
        more = nxt < tiles
        npair, nc = nxt // S, nxt % S * BV
        nat = npair * 16384 + d[:, None] * 128 + nc + cols[None, :]
        nold = tl.load(state + nat, mask=more, other=0.0)
        nq, nk = tl.load(q + npair * 128 + d, mask=more), tl.load(k + npair * 128 + d, mask=more)
        nv, ng = tl.load(v + npair * 128 + nc + cols, mask=more), tl.load(g + npair, mask=more)
        new = old * tl.exp(tg) + tk.to(tl.float32)[:, None] * tv.to(tl.float32)[None, :]
        found = tl.sum(tq.to(tl.float32)[:, None] * new, 0) * scale
        tl.store(state + pair * 16384 + d[:, None] * 128 + c + cols[None, :], new)
        tl.store(o + pair * 128 + c + cols, found.to(o.dtype.element_ty))
        old, tq, tk, tv, tg, pair, c = nold, nq, nk, nv, ng, npair, nc


def main():
    H, D = 32, 128
    d = dict(device="cuda", dtype=torch.bfloat16)
    for B in (64, 256):
        q, k, v = (torch.randn(B, 1, H, D, **d) for _ in range(3))
        g = -torch.rand(B, 1, H, device="cuda")
        s = torch.randn(B, H, D, D, device="cuda")
        o = torch.empty_like(v)
        print(B, "mul_", timed(lambda: s.mul_(0.999)), "copy", timed(lambda: s[: B // 2].copy_(s[B // 2 :])) * 2, flush=True)
        token = _step.Token(q, k, v, g)
        s = torch.randn(B, H, D, D, device="cuda")
        kept, mine = s.clone(), s.clone()
        _step.start(o, mine, token, kept, 0.1)
        want = o.clone()
        for w, st, bulk in ((8, 3, 0), (8, 3, 1), (16, 3, 0), (16, 3, 1), (8, 2, 0), (4, 3, 1)):
            size = st * 65536 + 2 * 1024 + 1024 + w * 512 + 64
            x = kept.clone()
            facts = dict(WARPS=w, STAGES=st, BULK=bulk, block=32 * w, shared=size)
            fn = lambda: launch(STEP, (132,), o, q, k, v, g, x, x, B * H, 0.1, **facts)
            o.zero_(); fn()
            print(B, "cuda", w, st, bulk, f"errors {(x - mine).abs().max().item():.1e} {(o - want).abs().max().item():.1e}", round(timed(fn), 1), f"[{time.time()-T0:.0f} s]", flush=True)
        print(B, "now", round(timed(lambda: _step.start(o, s, token, s, 0.1)), 1), "transposed", round(timed(lambda: _step.start(o, s.mT, token, s.mT, 0.1)), 1), flush=True)
        for bv, w, per in ((32, 4, 4), (32, 4, 5), (32, 8, 3), (64, 8, 2), (64, 8, 1), (128, 16, 1), (16, 4, 8)):
            x = kept.clone()
            tiles = B * H * 128 // bv
            fn = lambda: ahead[(132 * per,)](o, q, k, v, g, x, tiles, 0.1, BV=bv, num_warps=w)
            h = fn()
            print(B, "ahead", bv, w, per, h.n_regs, h.n_spills, f"errors {(x - mine).abs().max().item():.1e}", round(timed(fn), 1), f"[{time.time()-T0:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
