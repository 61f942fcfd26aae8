import sys, time, os, torch
from ridgeline.lab.measurement import law as L
t0 = time.time()
name, case, flag = sys.argv[1:4]
def say(*a): print(f"   {name}[{time.time()-t0:.1f}]", *a, flush=True)
import importlib
op = importlib.import_module(f"ridgeline.ops.recurrent.{name}").OP
law = L.Law.of(op, case, "bfloat16", "cuda", seed=int(os.environ.get("SEED", 0)))
say("law made", torch.cuda.max_memory_allocated() >> 20, "MiB")
impl = op.implementations["triton"]
outs, grads = law.run(impl)
again = law.run(impl)
say("bits again", all(torch.equal(a, b) for a, b in zip([*outs, *grads], [*again[0], *again[1]]) if a is not None))
for n, f in law.judge(outs, grads).findings().items(): say(n, f"{f.worst:.3f}", f)
open(flag, "w").close()
if len(sys.argv) > 4:
    law.forget()
    while not os.path.exists(sys.argv[4]): time.sleep(0.1)
    from torch.profiler import profile, ProfilerActivity
    args = [a.detach().requires_grad_() for a in law.args]; do = law.incoming[0]
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for back in (False, True):
        def go():
            o = impl(*args, **law.kwargs)
            if back: torch.autograd.grad(o, args, do)
        for _ in range(2): go()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(4): flush.fill_(1); go()
            torch.cuda.synchronize()
        say("with backward" if back else "forward")
        for e in sorted(p.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
            if "Memset" in e.key or "FillFunctor" in e.key: continue
            say(f"     {e.self_device_time_total/4:9.1f} us  x{e.count//4} {e.key[:60]}")
