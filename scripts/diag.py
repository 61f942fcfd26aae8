"""Compares the delta rule's backward by Triton and by Gluon, tensor by tensor, and judges both by the law."""
import sys, time
import torch
from ridgeline.lab.measurement.law import Law
from ridgeline.ops.recurrent import _delta_chunks as dc, _delta_hopper as hopper, gated_delta_rule as mod
from ridgeline.ops.recurrent import _delta
from ridgeline.boundary import launch
from ridgeline import device as devices
import ridgeline, importlib
mod = importlib.import_module("ridgeline.ops.recurrent.gated_delta_rule")
CH = int(sys.argv[2]) if len(sys.argv) > 2 else 64
T0 = time.time()
dev = "cuda" if torch.cuda.is_available() else "cpu"

def make(B, T, H, dtype, gates, seed=0):
    dice = torch.Generator(dev).manual_seed(seed)
    n = lambda *s: torch.randn(s, device=dev, generator=dice)
    q, k, v = (n(B, T, H, 128).to(dtype) for _ in range(3))
    g = (torch.nn.functional.logsigmoid(n(B, T, H) + 2) * gates).to(dtype)
    beta = (2 * n(B, T, H).sigmoid()).to(dtype)
    do = n(B, T, H, 128).to(dtype)
    return q, k, v, g, beta, do

def parts(q, k, v, g, beta, do, walks, chunks):
    """walks, chunks: whether Gluon makes them; chunks may also be 'both' inputs given as a dict of intermediates."""
    call = dc.DeltaCall(q, k, v, g, beta, None, None, None, None, True, 128 ** -0.5, "ieee")
    plan, _ = dc.prepare(call, dc.tiles_of(call, True), None)
    plan = plan._replace(hopper=bool(walks))
    B, T, H, V = v.shape
    C = plan.form.C
    N = plan.packing.chunks
    before = torch.empty((B, H, N, V, V), dtype=v.dtype, device=dev)
    later, solved = torch.empty_like(before), torch.empty_like(v)
    dq, dk, dv = (torch.empty_like(v) for _ in range(3))
    dg, dbeta, other = (torch.empty((B, T, H), dtype=torch.float32, device=dev) for _ in range(3))
    first = None
    dc.chain(plan, call, None, dc.ChunkStates(first, None, before, None, solved, None, None, None))
    states = dc.ChunkStates(None, None, before, later, solved, None, None, None)
    grads = dc.Grads(dq, dk, dv, dg, dbeta, None, None)
    rows = call.rows(do)
    if walks:
        hopper.walk(plan, call, hopper.REVERSE, do, dv, states, later, (dbeta, other), plan.packing)
    else:
        launch(_delta.chain_gradients, plan.chains, plan.reads, rows, plan.matrices, states, grads, plan.packing, call.scale,
               form=plan.form._replace(BV=plan.tiles.chain), num_warps=plan.tiles.warps[1], num_stages=plan.tiles.stages[0])
    if walks:
        dbeta += other
    if chunks:
        hopper.start_gradients((N, B * H), call, do, plan.matrices, states, grads, plan.packing)
    else:
        dc._chunk_gradients(plan._replace(hopper=False), call, rows, states, grads, 0, N)
    return {"u": solved, "before": before, "later": later, "dv": dv, "dbeta": dbeta, "dq": dq, "dk": dk, "dg": dg}

def exact(q, k, v, g, beta, do):
    q, k, v, g, beta = [t.double().requires_grad_() for t in (q, k, v, g, beta)]
    unit = lambda t: t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    qn, kn = unit(q), unit(k)
    B, T, H, V = v.shape
    S = torch.zeros(B, H, V, V, device=dev, dtype=torch.double, requires_grad=True)  # (K, V)
    before, ends, us, os = [], [], [], []
    for t in range(T):
        if t % CH == 0:
            S = S * 1.0
            S.retain_grad(); before.append(S)
        K = kn[:, t].unsqueeze(-1)
        P = S * g[:, t].exp()[..., None, None]
        y = v[:, t].unsqueeze(-2) - (K * P).sum(-2, keepdim=True)
        us.append(y.squeeze(-2))
        S = P + K * y * beta[:, t][..., None, None]
        os.append(128 ** -0.5 * (qn[:, t].unsqueeze(-1) * S).sum(-2))
    S.retain_grad()
    o = torch.stack(os, 1)
    (o * do.double()).sum().backward()
    later = [s.grad for s in before[1:]] + [torch.zeros_like(before[0]) if S.grad is None else torch.zeros_like(S)]
    turn = lambda l: torch.stack([x.detach() for x in l], 2).transpose(-1, -2)
    return {"u": torch.stack(us, 1).detach(), "before": turn(before), "later": turn(later), "dv": v.grad, "dbeta": beta.grad,
            "dq": q.grad, "dk": k.grad, "dg": g.grad}

def where(d, name):
    i = d.abs().flatten().argmax().item()
    at = [int(x) for x in torch.unravel_index(torch.tensor(i), d.shape)]
    return at

def rel(a, b):
    return ((a.double() - b).norm() / b.norm()).item()

if dev == "cpu":
    torch.cuda.synchronize = lambda: None
    if len(sys.argv) > 2:
        dc.delta_tiles = lambda *a: dc.Tiles(int(sys.argv[2]), 128, 64, 128, (4, 8, 8), (1, 1))
CONFIGS = {"triton": (0, 0), "gluon chains": (1, 0), "gluon chunks": (0, 1), "gluon": (1, 1)}
if dev == "cpu":
    CONFIGS = {"triton": (0, 0)}
BH = (2, 4) if dev == "cuda" else (1, 2)
for dtype in ({'b': torch.bfloat16, 'h': torch.float16}[sys.argv[1]],):
    for gates in (0.01, 1.0):
        args = make(BH[0], 512, BH[1], dtype, gates)
        ref = exact(*args)
        print(f"== {dtype} gates x {gates}  {time.time()-T0:.1f} s", flush=True)
        got = {}
        for name, (w, c) in CONFIGS.items():
            got[name] = parts(*args, w, c)
            torch.cuda.synchronize()
            same = {n: 0 for n in ref}
            for _ in range(5 if dev == 'cuda' else 0):
                again = parts(*args, w, c)
                for n in ref:
                    same[n] += not torch.equal(again[n], got[name][n])
            print(f"{name:14}", " ".join(f"{n} {rel(got[name][n], ref[n]):.2e}" for n in ref), "reruns differ:", {n: s for n, s in same.items() if s},
                  "nonfinite:", {n: int((~t.isfinite()).sum()) for n, t in got[name].items() if not t.isfinite().all()}, flush=True)
        for name in list(CONFIGS)[1:]:
            for n in ref:
                d = got[name][n].double() - got["triton"][n].double()
                if d.abs().max() > 0:
                    print(f"   {name} - triton: {n} max {d.abs().max():.3e} (of max {ref[n].abs().max():.3e}, rms {ref[n].square().mean().sqrt():.3e}) at {where(d, n)}"
                          f" rel {(d.norm() / ref[n].norm()).item():.2e}")
        for name in CONFIGS:  # errors of dk by row in a chunk
            e = (got[name]["dk"].double() - ref["dk"]).square().sum((0, 2, 3)).view(8, 64)
            nrm = ref["dk"].square().sum((0, 2, 3)).view(8, 64)
            print(f"   {name} dk error by chunk", [f"{x:.1e}" for x in (e.sum(1) / nrm.sum(1)).sqrt().tolist()], "by 8 rows", [f"{x:.1e}" for x in (e.view(8, 8, 8).sum((0, 2)) / nrm.view(8, 8, 8).sum((0, 2))).sqrt().tolist()])
        q, k, v, g, beta, do = args
        given = [t.clone().requires_grad_() for t in args[:5]]
        law = Law(mod.OP, given, {"normalize": True}, incoming=[do])
        for name, (w, c) in CONFIGS.items():
            # judged from the pieces
            p = got[name]
            o = [law.outputs[0].oracle.view(v.shape).to(dtype)]
            verdict = law.judge(o, [p["dq"], p["dk"], p["dv"], p["dg"].to(dtype), p["dbeta"].to(dtype)])
            print(f"   law {name}:", {n: f"{f.worst:.2f} {f.where}" for n, f in verdict.grads.items()}, flush=True)
        s = law.grads[1]
        print("   allowed of dk relative to norm: whole", f"{s.whole / s.norm.whole:.2e}", "row", f"{(s.row / s.norm.row).max():.2e}", flush=True)
        law.judge(*law.run(lambda *a, **kw: ridgeline.gated_delta_rule(*a, impl="triton", **kw)))
        verdict = law.judge(*law.run(lambda *a, **kw: ridgeline.gated_delta_rule(*a, impl="triton", **kw)))
        print("   law public:", {n: f"{f.worst:.2f} {f.where}" for n, f in verdict.findings().items()}, flush=True)
for H, seed in ((16, 0), (16, 1)) if dev == 'cuda' else ():
    args = make(2, 512, H, dtype, 0.01, seed)
    p = parts(*args, 1, 1)
    print("16 heads, nonfinite:", {n: int((~t.isfinite()).sum()) for n, t in p.items()})
    base = parts(*args, 0, 0)
    print("   gluon - triton", {n: f"{((p[n].double() - base[n].double()).norm() / base[n].double().norm()).item():.2e}" for n in p})
print(f"done {time.time()-T0:.1f} s")
