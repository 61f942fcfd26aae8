import sys, time
import torch, ridgeline
from ridgeline import tuning
from ridgeline.ops.recurrent import _shared_heads
t0 = time.time()
def say(*a): print(f"[{time.time()-t0:5.1f}]", *a, flush=True)
dice = torch.Generator("cuda").manual_seed(1)
def normal(*s): return torch.randn(s, device="cuda", generator=dice)
served = _shared_heads.serves
count = [0]
def spy(call, *more):
    r = served(call, *more); count[0] += r; return r
def run(kind, impl, leaves, extras, state, ends, w, ws, new=True):
    _shared_heads.serves = spy if new else (lambda *a: False)
    tuning.version = -7 if new else -8
    ls = [t.to(kind).requires_grad_() for t in leaves]
    ex = {k: t.to(torch.float64 if kind == torch.float64 else torch.float32).requires_grad_() for k, t in extras.items()}
    st = None if state is None else state.to(torch.float64 if kind == torch.float64 else torch.float32).requires_grad_()
    y, last = ridgeline.ssd(*ls, **ex, initial_state=st, return_state=True, cu_seqlens=ends, impl=impl)
    loss = (y.double() * w).sum() + (0 if ws is None else (last.double() * ws).sum())
    names = ["x", "dt", "A", "B", "C", *ex, *([] if st is None else ["state"])]
    g = torch.autograd.grad(loss, [*ls, *ex.values(), *([] if st is None else [st])])
    return dict(zip(["y", "last", *["d" + n for n in names]], [y, last, *g]))
def compare(title, B, T, H, G, ends=None, stated=True, extra=True):
    leaves = [t.bfloat16() for t in (normal(B, T, H, 64), normal(B, T, H), -normal(H).sigmoid() * 2, normal(B, T, G, 128), normal(B, T, G, 128))]
    leaves[3], leaves[4] = leaves[3] * 0.3, leaves[4] * 0.3
    extras = {"D": normal(H), "dt_bias": normal(H)} if extra else {}
    e = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
    N = B if e is None else len(ends) - 1
    state = normal(N, H, 128, 64) if stated else None
    w, ws = normal(B, T, H, 64).double(), normal(N, H, 128, 64).double() if stated else None
    w = w.bfloat16().double()
    want = run(torch.float64, "naive", leaves, extras, state, e, w, ws)
    count[0] = 0
    new = run(torch.bfloat16, "triton_chunks", leaves, extras, state, e, w, ws)
    torch.cuda.synchronize()
    again = run(torch.bfloat16, "triton_chunks", leaves, extras, state, e, w, ws)
    calls = count[0]
    old = run(torch.bfloat16, "triton_chunks", leaves, extras, state, e, w, ws, False)
    say(title, "served", calls, "same bits", all(torch.equal(new[n], again[n]) for n in new))
    for n in want:
        norm = want[n].norm()
        f = lambda r: ((r[n].double() - want[n]).norm() / norm).item()
        print(f"   {n:9s} new {f(new):.5f} old {f(old):.5f}", flush=True)
def profile():
    leaves = [t.bfloat16() for t in (normal(8, 4096, 64, 64), normal(8, 4096, 64), -normal(64).sigmoid() * 2, normal(8, 4096, 1, 128), normal(8, 4096, 1, 128))]
    ls = [t.requires_grad_() for t in leaves]
    _shared_heads.serves = spy
    w = normal(8, 4096, 64, 64).bfloat16()
    def go():
        y = ridgeline.ssd(*ls, impl="triton_chunks")
        return torch.autograd.grad(y, ls, w)
    go(); go(); torch.cuda.synchronize()
    from torch.profiler import profile as prof, ProfilerActivity
    with prof(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5): go()
        torch.cuda.synchronize()
    for r in sorted(p.key_averages(), key=lambda r: -r.device_time_total)[:16]:
        print(f"   {r.device_time_total/5:9.1f} us x{r.count/5:.0f} {r.key[:60]}", flush=True)
def law(T, H, more=None):
    from ridgeline.lab import Law
    from ridgeline.op import get, Spec
    _shared_heads.serves = spy
    own = sys.modules[get("ssd").reference.__module__]
    specs = [Spec(1, T, H, 64), Spec(1, T, H), own.Negative(H), *(Spec(1, T, 1, 128),) * 2]
    g = torch.Generator("cuda").manual_seed(0)
    l = Law(get("ssd"), [s.make(torch.bfloat16, "cuda", g) for s in specs], more or {})
    v = l.judge(*l.run(get("ssd").implementations["triton_chunks"]))
    say("law", T, H, v.ok, v.reason())
for what in sys.argv[1:]:
    try:
        if what == "one": compare("one", 1, 128, 8, 1, stated=False, extra=False)
        if what == "some": compare("some", 2, 150, 16, 2)
        if what == "packed": compare("packed", 1, 700, 16, 1, [0, 100, 100, 429, 700])
        if what == "walk": compare("walk", 10, 150, 64, 1)
        if what == "profile": say("profile"); profile()
        if what.startswith("law"): law(int(what[3:]), 16)
    except Exception as e:
        import traceback; traceback.print_exc(limit=6); print(flush=True)
        if "CUDA" in str(e): break
say("end")
