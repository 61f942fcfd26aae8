import sys, time
from concurrent.futures import ProcessPoolExecutor
T0 = time.time()
import torch
from pathlib import Path
from ridgeline.cuda import CudaKernel, compile_source

P = Path("src/ridgeline/ops/recurrent/causal_conv1d.cu")
FWD = CudaKernel(P, "conv_forward", "PPPPPPPiiq")
BWD = CudaKernel(P, "conv_backward", "PPPPPPPPPPiiiiq")
BASE = dict(C=4096, WIDTH=4, SILU=1, HALF=0, FILTER="__nv_bfloat16", BIAS="__nv_bfloat16")
# HIGH WARPS BLOCKS
F = [(8, 8, 2), (8, 4, 4), (8, 4, 3), (8, 4, 5), (8, 16, 1), (16, 4, 2), (16, 4, 3), (4, 8, 2), (4, 4, 5), (8, 2, 8), (8, 1, 16), (12, 4, 3), (6, 8, 2), (5, 4, 5)]
# GROUP AHEAD WARPS BLOCKS length
B = [(4, 2, 4, 2, 64), (4, 2, 4, 2, 32), (4, 2, 4, 2, 128), (4, 2, 4, 2, 512), (4, 3, 4, 2, 64), (4, 2, 2, 4, 64), (4, 2, 8, 1, 64), (4, 2, 3, 2, 64), (4, 2, 4, 2, 48), (4, 3, 3, 2, 64), (4, 2, 4, 3, 64), (4, 2, 5, 2, 64)]


def facts(v):
    if len(v) == 3:
        return BASE | dict(HIGH=v[0], WARPS=v[1], BLOCKS=v[2], GROUP=4, AHEAD=2)
    g, a, w, b, _ = v
    return BASE | dict(GROUP=g, AHEAD=a, WARPS=w, BLOCKS=b, HIGH=8)


def comp(v):
    compile_source(P, "sm_90", tuple(facts(v).items()))


def timed(fn, runs=10):
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    fn(); fn()
    ps = []
    torch.cuda.synchronize()
    for _ in range(runs):
        scratch.fill_(1)
        torch.cuda._sleep(200_000)
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); fn(); b.record()
        ps.append((a, b))
    torch.cuda.synchronize()
    t = sorted(a.elapsed_time(b) * 1e3 for a, b in ps)
    return t[len(t) // 2]


def main():
    with ProcessPoolExecutor(12) as pool:
        todo = [pool.submit(comp, v) for v in F + B]
        for t in todo: t.result()
    print("compiled", time.time() - T0, flush=True)
    from ridgeline.boundary import launch
    import ridgeline
    torch.manual_seed(0)
    d = dict(device="cuda", dtype=torch.bfloat16)
    x, dy = torch.randn(8, 4096, 4096, **d), torch.randn(8, 4096, 4096, **d)
    w, b = torch.randn(4096, 4, **d) / 2, torch.randn(4096, **d) / 2
    y = torch.empty_like(x)
    print("copy", timed(lambda: y.copy_(x)), flush=True)
    n = 132

    def fwd(v, y):
        count = 8 * -(-4096 // (v[0] * v[1]))
        launch(FWD, (16 * count,), y, x, w, b, None, None, None, 4096, 8, 4096, **facts(v), block=32 * v[1])

    ref = ridgeline.causal_conv1d(x, w, b, impl="triton")
    print("triton fwd", timed(lambda: ridgeline.causal_conv1d(x, w, b, impl="triton")), flush=True)
    for v in F:
        y.zero_(); fwd(v, y)
        err = ((y.float() - ref.float()).norm() / ref.float().norm()).item()
        print("fwd", v, f"err {err:.1e}", round(timed(lambda: fwd(v, y)), 1), flush=True)
    del ref
    xs, ws, bs = (t.clone().requires_grad_() for t in (x, w, b))
    out = ridgeline.causal_conv1d(xs, ws, bs, impl="triton")
    grads = torch.autograd.grad(out, (xs, ws, bs), dy, retain_graph=True)
    print("triton bwd", timed(lambda: torch.autograd.grad(out, (xs, ws, bs), dy, retain_graph=True)), flush=True)
    dx = torch.empty_like(x)

    def bwd(v, dx, parts):
        g, a, wp, bl, length = v
        count = 8 * -(-4096 // length)
        launch(BWD, (16 * parts.shape[0],), dx, parts, None, dy, None, x, w, b, None, None, 4096, 8, length, count, 4096, **facts(v), block=32 * wp, shared=max(wp * 2 * g * a * 512, wp * 5 * 1024))

    for v in B:
        parts = torch.empty(v[3] * n // 16, 5, 4096, device="cuda")
        dx.zero_(); bwd(v, dx, parts)
        errs = [((dx.float() - grads[0].float()).norm() / grads[0].float().norm()).item()]
        s = parts.sum(0)
        errs.append(((s[:4].t() - grads[1].float()).norm() / grads[1].float().norm()).item())
        errs.append(((s[4] - grads[2].float()).norm() / grads[2].float().norm()).item())
        print("bwd", v, "err", *[f"{e:.1e}" for e in errs], round(timed(lambda: bwd(v, dx, parts)), 1), flush=True)
    for impl in ("triton", "cuda", None):
        out = ridgeline.causal_conv1d(xs, ws, bs, impl=impl)
        print("op", impl, timed(lambda: ridgeline.causal_conv1d(x, w, b, impl=impl)), timed(lambda: torch.autograd.grad(out, (xs, ws, bs), dy, retain_graph=True)), flush=True)
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        torch.autograd.grad(out, (xs, ws, bs), dy, retain_graph=True)
        torch.cuda.synchronize()
    for e in prof.events():
        if e.device_time: print("  ", e.name[:80], e.device_time, flush=True)


if __name__ == "__main__":
    main()
