"""race: the kernel whose sums' scratch lay in a tile beside the mended one. law: verdicts. time: kernels by the profiler."""
import sys, time, importlib, contextlib
import torch, ridgeline
from ridgeline import tuning
from ridgeline.lab.measurement.law import Law
from ridgeline.ops.recurrent import _delta_chunks as dc, _delta_hopper as hopper
mod = importlib.import_module("ridgeline.ops.recurrent.gated_delta_rule")
dev = "cuda"; T0 = time.time()

def make(B, T, H, HV, dtype, gates, seed=0):
    dice = torch.Generator(dev).manual_seed(seed)
    n = lambda *s: torch.randn(s, device=dev, generator=dice)
    q, k, v = n(B, T, H, 128), n(B, T, H, 128), n(B, T, HV, 128)
    if gates == "strong":
        g = -60 * torch.rand(B, T, HV, device=dev, generator=dice)
        g = torch.where(torch.rand(g.shape, device=dev, generator=dice) < 0.6, g / 600, g)
    else:
        g = torch.nn.functional.logsigmoid(n(B, T, HV) + 2) * gates
    beta = 2 * n(B, T, HV).sigmoid()
    return [t.to(dtype) for t in (q, k, v, g, beta)], n(B, T, HV, 128).to(dtype)

version = [-100]
@contextlib.contextmanager
def using(serve=True, chunks=None, span=None):
    saved = hopper.serves, hopper.chunk_gradients, dc.span
    begun = hopper.start_gradients
    version[0] -= 1
    tuning.version = version[0]
    if not serve: hopper.serves = lambda call: False
    started = hopper.launch
    if chunks is not None:
        hopper.chunk_gradients = chunks
        module = sys.modules[chunks.fn.__module__]
        if hasattr(module, "AHEAD"):
            import ahead
            ahead.patch(hopper, module)
        warps = getattr(sys.modules[chunks.fn.__module__], "WARPS", 4)
        middle = started
        if hasattr(sys.modules[chunks.fn.__module__], "PERSISTENT"):
            def middle(kernel, grid, *a, **k):
                if kernel is chunks:
                    return started(kernel, (min(264, grid[0] * grid[1]),), *a, grid[0], grid[0] * grid[1], **k)
                return started(kernel, grid, *a, **k)
        hopper.launch = lambda kernel, *a, **k: middle(kernel, *a, **(k | (({"num_warps": warps} | ({"maxnreg": 128} if warps == 8 else {})) if kernel is chunks else {})))
    if span is not None: dc.span = lambda *_: span
    try: yield
    finally: hopper.launch = started; hopper.start_gradients = begun; hopper.serves, hopper.chunk_gradients, dc.span = saved

def grads(args, do, **kw):
    leaves = [a.clone().requires_grad_() for a in args]
    o = ridgeline.gated_delta_rule(*leaves, normalize=True, impl="triton", **kw)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]

def race(dtype):
    import old_gradients as old
    for gates in (0.01, 1.0):
        args, do = make(4, 2048, 16, 16, dtype, gates)
        with using(): new = [grads(args, do) for _ in range(8)]
        with using(chunks=old.chunk_gradients): was = [grads(args, do) for _ in range(8)]
        print(dtype, "gates", gates, "mended: reruns that differ", sum(not all(torch.equal(a, b) for a, b in zip(new[0], x)) for x in new[1:]))
        for n, x in enumerate(was):
            dk = (x[2].float() - new[0][2].float()); dg = x[4].float() - new[0][4].float()
            bad = (dk != 0) | ~dk.isfinite()
            if bad.any():
                columns = bad.flatten(0, 2).any(0).nonzero().flatten().tolist()
                print(f"   before, run {n}: {int(bad.any(-1).sum())} rows of dk differ, columns {columns[:3]}..{columns[-3:]} ({len(columns)}); nonfinite dk {int((~dk.isfinite()).sum())} dg {int((~dg.isfinite()).sum())} max {dk[dk.isfinite()].abs().max():.2e}")
        if not any(not torch.equal(x[2], new[0][2]) for x in was): print("   before: the same bits in all runs")
        sys.stdout.flush()

def law(cases):
    for name, shape, dtype, gates, opts in cases:
        B, T, H, HV = shape
        args, do = make(B, T, H, HV, dtype, gates, opts.get("seed", 0))
        if opts.get("single"): args[3:] = [t.float() for t in args[3:]]
        kw = {"normalize": True}
        if "ends" in opts: kw["cu_seqlens"] = torch.tensor(opts["ends"], dtype=torch.int32, device=dev)
        rule = Law(mod.OP, [t.clone().requires_grad_() for t in args], kw, incoming=[do])
        for serve in (True, False):
            with using(serve, span=opts.get("span")):
                found = rule.judge(*rule.run(lambda *a, **k: ridgeline.gated_delta_rule(*a, impl="triton", **k))).findings()
            print(f"{'gluon ' if serve else 'triton'} {name} {str(dtype)[6:]} {gates} {opts}", {n: f"{f.worst:.2f} {f.where}" for n, f in found.items()}, "" if max(f.worst for f in found.values()) <= 1 else "BROKEN", flush=True)
    print(f"{time.time()-T0:.1f} s")

def timed(cases):
    from torch.profiler import profile, ProfilerActivity
    flush = torch.empty(64 << 20, dtype=torch.int32, device=dev)
    for name, (B, T, H, HV), ends in cases:
        args, do = make(B, T, H, HV, torch.bfloat16, 1.0)
        kw = {} if ends is None else {"cu_seqlens": torch.arange(ends + 1, dtype=torch.int32, device=dev) * (B * T // ends)}
        for serve in (True, False):
            with using(serve):
                for _ in range(3): grads(args, do, **kw)
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(6):
                        flush.zero_(); grads(args, do, **kw)
                    torch.cuda.synchronize()
            print("gluon " if serve else "triton", name)
            total = 0
            for e in p.key_averages():
                if "fill" in e.key.lower() or "memset" in e.key.lower(): continue
                total += e.device_time_total / 6
                if e.device_time_total / 6 > 5: print(f"      {e.device_time_total / 6:8.1f} us  {e.count / 6:.1f} x {e.key[:70]}")
            print(f"      {total:8.1f} us in all", flush=True)
    print(f"{time.time()-T0:.1f} s")

b, h = torch.bfloat16, torch.float16
if sys.argv[1] == "race":
    race(b); race(h)
elif sys.argv[1] == "law":
    ends = [0, 0, 100, 100, 101, 300]
    CASES = {
        "weak0": ((2, 512, 16, 16), 0.01, {"seed": 0}), "weak1": ((2, 512, 16, 16), 0.01, {"seed": 1}),
        "usual": ((2, 512, 16, 16), 1.0, {"seed": 2}), "strong": ((2, 320, 16, 16), "strong", {"seed": 3}),
        "remainder": ((2, 300, 4, 4), 0.01, {}), "shared": ((1, 256, 4, 8), 0.01, {}),
        "packed": ((1, 300, 4, 8), 0.01, {"ends": ends}), "packedstrong": ((1, 300, 4, 8), "strong", {"ends": ends}),
        "shared32": ((1, 512, 16, 32), 0.01, {}), "single": ((1, 512, 4, 4), 0.01, {"single": True, "seed": 5}),
        "few": ((1, 512, 8, 8), 0.01, {"seed": 7}), "weaker": ((2, 512, 4, 4), 1e-4, {"seed": 8}),
        "segments": ((1, 384, 4, 4), 0.01, {"span": 2}), "packedsegments": ((1, 300, 4, 8), 1.0, {"ends": ends, "span": 1}),
    }
    shape, gates, opts = CASES[sys.argv[3]]
    law([(sys.argv[3], shape, {"b": b, "h": h}[sys.argv[2]], gates, opts)])
elif sys.argv[1] == "time":
    timed([("packed 4x8192 16/32", (1, 32768, 16, 32), 4), ("1x32768 16/32", (1, 32768, 16, 32), None), ("8x4096x16", (8, 4096, 16, 16), None)][: int(sys.argv[2])])
elif sys.argv[1] == "variants":
    from torch.profiler import profile, ProfilerActivity
    flush = torch.empty(64 << 20, dtype=torch.int32, device=dev)
    args, do = make(8, 4096, 16, 16, b, 1.0)
    base = None
    for name in sys.argv[2:]:
        module = importlib.import_module(name.split("@")[0]) if name != "src" else None
        kernel = module and module.chunk_gradients
        if "@" in name: module.AHEAD = int(name.split("@")[1])
        with using(chunks=kernel):
            runs = [grads(args, do) for _ in range(4)]
            base = base or runs[0]
            far = [f"{((x.double() - y.double()).norm() / y.double().norm()).item():.1e}" for x, y in zip(runs[0], base)]
            same = all(torch.equal(x, y) for r in runs[1:] for x, y in zip(r, runs[0]))
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(6):
                    flush.zero_(); grads(args, do)
                torch.cuda.synchronize()
        took = sum(e.device_time_total for e in p.key_averages() if "chunk_gradients" in e.key) / 6
        print(f"variant {name}: {took:.1f} us, from src's {far}, reruns the same {same}", flush=True)
elif sys.argv[1] == "pairs":
    from torch.profiler import profile, ProfilerActivity
    import pairs_patch
    flush = torch.empty(64 << 20, dtype=torch.int32, device=dev)
    for name, (B, T, H, HV), ends in (("8x4096x16", (8, 4096, 16, 16), None), ("packed 4x8192 16/32", (1, 32768, 16, 32), 4))[: int(sys.argv[2])]:
        args, do = make(B, T, H, HV, b, 1.0)
        kw = {} if ends is None else {"cu_seqlens": torch.arange(ends + 1, dtype=torch.int32, device=dev) * (B * T // ends)}
        base = None
        for facts, ahead in ((None, 0), ({"num_warps": 4, "maxnreg": 168}, 0), ({"num_warps": 4, "maxnreg": 168}, 396), ({"num_warps": 4, "maxnreg": 128}, 0), ({"num_warps": 4, "maxnreg": 128}, 528), ({"num_warps": 8, "maxnreg": 80}, 0)):
            pairs_patch.patch(facts, ahead=ahead)
            with using():
                got = grads(args, do, **kw)
                base = base or got
                far = [f"{((x.double() - y.double()).norm() / y.double().norm()).item():.1e}" for x, y in zip(got, base)]
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(6):
                        flush.zero_(); grads(args, do, **kw)
                    torch.cuda.synchronize()
            took = sum(e.device_time_total for e in p.key_averages() if "pairs_by" in e.key) / 12
            print(f"pairs {name} {facts} {ahead}: {took:.1f} us each, from the base {far}", flush=True)
elif sys.argv[1] == "once":
    args, do = make(8, 4096, 16, 16, b, 1.0)
    grads(args, do)
    torch.cuda.synchronize()
