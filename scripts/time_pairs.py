import sys, torch, ridgeline
from ridgeline.ops.recurrent import _delta_chunks as D
dev = "cuda"
g = torch.Generator(dev).manual_seed(0)
n = lambda *s: torch.randn(s, device=dev, generator=g).bfloat16()
q, k, v = (n(8, 4096, 16, 128) for _ in range(3))
gate = torch.nn.functional.logsigmoid(n(8, 4096, 16, 128).float() + 2).bfloat16()
beta = (2 * n(8, 4096, 16).float().sigmoid()).bfloat16()
launch0 = D.launch
from ridgeline.ops.recurrent import _delta_hopper as Hp
WHAT, R, W = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def launch(kernel, *args, **facts):
    if WHAT in kernel.__name__ and kernel.__name__ in ("solve_pairs", "channel_pairs"):
        facts |= {"num_warps": W, "maxnreg": R}
        if R == 255: facts.pop("maxnreg")
    return launch0(kernel, *args, **facts)
Hp.launch = launch
D.launch = launch
flush = torch.empty(1 << 28, dtype=torch.uint8, device=dev)
def go():
    with torch.no_grad(): ridgeline.gated_delta_rule(q, k, v, gate, beta, normalize=True, impl="triton")
for _ in range(2): go()
torch.cuda.synchronize()
import os, time
while not os.path.exists(sys.argv[1]): time.sleep(0.05)
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CUDA]) as p:
    for _ in range(4): flush.fill_(1); go()
    torch.cuda.synchronize()
for e in p.key_averages():
    if "pairs" in e.key: print("  time_pairs", sys.argv[2:], e.key[:20], f"{e.self_device_time_total/4:9.1f} us", flush=True)
