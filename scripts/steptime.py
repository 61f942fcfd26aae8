import time, sys
import torch
from ridgeline.ops.recurrent import _step
T0 = time.time()
sys.path.insert(0, "scripts")
from convtime import timed

H, D = 32, 128
d = dict(device="cuda", dtype=torch.bfloat16)
for B in (64, 256):
    q, k, v = (torch.randn(B, 1, H, D, **d) for _ in range(3))
    g = -torch.rand(B, 1, H, device="cuda")
    s = torch.randn(B, H, D, D, device="cuda")
    o = torch.empty_like(v)
    print(B, "mul_", timed(lambda: s.mul_(0.999)), flush=True)
    choices = [(128, 32, 4), (128, 32, 2), (128, 32, 8), (128, 64, 8), (128, 64, 4), (128, 128, 16), (128, 128, 8), (128, 16, 2), (128, 16, 1), (128, 16, 4)] if B == 64 else [(128, 32, 4), (128, 64, 8), (128,64,4)]
    for c in choices:
        _step.tiles = lambda *_: c
        fn = lambda: _step.start(o, s, _step.Token(q, k, v, g), s, 0.1)
        print(B, c, round(timed(fn), 1), f"[{time.time()-T0:.0f} s]", flush=True)
