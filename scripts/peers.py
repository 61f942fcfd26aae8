"""Few chains, and the causal product in float32, against fla-core 0.6.0. Its guard for Hopper is off, for times only.

peers.py CASE ...: N children compile FLA's configurations, a share each, and one compiles ours. Then FLA chooses, and
both are timed. A case is a name, or name:fwd. Environment: CHILDREN, WARM (seconds until children end), FOLDER."""

import os
import sys
import time
import types

T0 = time.time()
os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
import torch  # noqa: E402
import triton  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

CASES = sys.argv[1:]
LIMIT = float(os.environ.get("KERNEL_LIMIT", "3"))
N, WARM, FOLDER = (os.environ.get(n, d) for n, d in (("CHILDREN", "14"), ("WARM", "40"), ("FOLDER", "/tmp")))
N, WARM, MODE, TUNERS = int(N), float(WARM), "time", []

made = Autotuner.__init__


def init(self, fn, arg_names, configs, *args, **options):
    made(self, fn, arg_names, configs, *args, **options)
    self._do_bench = lambda f, quantiles: triton.testing.do_bench(f, warmup=1, rep=5, quantiles=quantiles)
    self.began = {}
    TUNERS.append(self)


bench = Autotuner._bench
skipped = {}


def limited(self, *args, config, **meta):
    key = id(self.nargs)
    since = self.began.setdefault(key, [time.time(), 0])
    if MODE != "warm" and since[1] and time.time() - since[0] > LIMIT:
        skipped[self.base_fn.__name__] = skipped.get(self.base_fn.__name__, 0) + 1
        return [float("inf")] * 3
    try:
        found = bench(self, *args, config=config, **meta)
    except Exception as error:  # noqa: BLE001
        print("config failed", self.base_fn.__name__, config, str(error)[:80], flush=True)
        return [float("inf")] * 3
    since[1] += found[0] < 1e9
    return found


Autotuner.__init__, Autotuner._bench = init, limited

import ridgeline  # noqa: E402

print(f"imports {time.time() - T0:.1f} s", flush=True)


def load():
    """Imports FLA, which initialises CUDA: after forks."""
    global chunk_gla, chunk_gated_delta_rule, chunk_delta_rule, chunk_linear_attn
    root = next(p + "/fla" for p in sys.path if os.path.exists(p + "/fla/ops"))
    for name in ("fla", "fla.ops", "fla.modules"):  # their __init__ would import all ops
        module = types.ModuleType(name)
        module.__path__, module.__version__ = [root + name[3:].replace(".", "/")], "0.6.0"
        sys.modules[name] = module
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.IS_NVIDIA_HOPPER = False
    from fla.ops.delta_rule.chunk import chunk_delta_rule
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
    from fla.ops.gla.chunk import chunk_gla
    from fla.ops.linear_attn.chunk import chunk_linear_attn

    print(f"[{time.time() - T0:.1f} s] imported", flush=True)


def timed(name, fn, runs=12):
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        fn()
    pairs = []
    for _ in range(runs):
        scratch.fill_(1)
        torch.cuda._sleep(8_000_000)
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        fn()
        b.record()
        pairs.append((a, b))
        torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)
    print(f"{name}: {times[len(times) // 2]:.0f} us ({times[0]:.0f} to {times[-1]:.0f})", flush=True)


def inputs(case):
    if case == "linear":
        B, T, H, D, dtype = 8, 4096, 16, 64, torch.float32
    else:
        B, T, H, D, dtype = 1, 32768, 4, 128, torch.bfloat16
    q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=dtype) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
    gate = None
    if case == "gla":
        gate = (torch.nn.functional.logsigmoid(torch.randn(B, T, H, D, device="cuda")) / 16).to(dtype)
    if case == "gdn":
        gate = torch.nn.functional.logsigmoid(torch.randn(B, T, H, device="cuda")) / 16
    beta = torch.rand(B, T, H, device="cuda").to(dtype)
    return [t.requires_grad_() if t is not None else None for t in (q, k, v, gate, beta)]


def theirs(case, q, k, v, g, beta):
    if case == "gla":
        return chunk_gla(q, k, v, g)[0]
    if case == "gdn":
        return chunk_gated_delta_rule(q, k, v, g, beta)[0]
    if case == "delta":
        return chunk_delta_rule(q, k, v, beta)[0]
    return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


def ours(case, q, k, v, g, beta):
    if case == "gla":
        return ridgeline.gated_linear_attention(q, k, v, g)
    if case == "gdn":
        return ridgeline.gated_delta_rule(q, k, v, g, beta)
    if case == "delta":
        return ridgeline.gated_delta_rule(q, k, v, torch.zeros_like(beta, dtype=torch.float32), beta)
    return ridgeline.linear_attention(q, k, v, scale=1.0)


def passes(who, case, given, backward):
    fn = {"fla": theirs, "ridgeline": ours}[who]
    a = time.time()
    with torch.no_grad():
        out = fn(case, *given)
    torch.cuda.synchronize()
    print(f"[{time.time() - T0:.1f} s] {who} {case}: first forward {time.time() - a:.1f} s", flush=True)
    if MODE == "time":
        with torch.no_grad():
            timed(f"{who} {case} forward", lambda: fn(case, *given))
    if not backward:
        return out, None
    wanted = [t for t in given if t is not None and not (t is given[4] and case in ("gla", "linear"))]
    a = time.time()
    y = fn(case, *given)
    torch.manual_seed(1)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    torch.cuda.synchronize()
    print(f"[{time.time() - T0:.1f} s] {who} {case}: first backward {time.time() - a:.1f} s", flush=True)
    if MODE == "time":
        timed(f"{who} {case} backward", lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True))
    return out, grads


def go(who_all):
    torch.manual_seed(0)
    for one in CASES:
        case, way = one.split(":") if ":" in one else (one, "both")
        given = inputs(case)
        found = {}
        for who in who_all:
            try:
                found[who] = passes(who, case, given, way == "both")
            except Exception as error:  # noqa: BLE001
                print(f"{who} {case} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if len(found) == 2 and MODE == "time":
            a, b = found["fla"][0], found["ridgeline"][0]
            print(f"{case}: outputs differ by {(a - b).norm() / b.norm():.2e} of their norm", flush=True)
            if found["fla"][1] is not None:
                pairs = zip(found["fla"][1], found["ridgeline"][1])
                print("  gradients by", *[f"{(a - b).norm() / b.norm():.1e}" for a, b in pairs], flush=True)
        if skipped:
            print("configurations not tried:", skipped, flush=True)
            skipped.clear()
    print(f"done at {time.time() - T0:.1f} s", flush=True)


children = []
for i in range(N + 1):
    child = os.fork()
    if not child:
        MODE = "warm"
        sys.stdout = open(f"{FOLDER}/warm{i}.txt", "w")
        load()
        for t in TUNERS:
            t.configs = list({id(c): c for c in [*t.configs[i::N], t.configs[0]]}.values())
        go(["fla"] if i < N else ["ridgeline"])
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
left = set(children)
while left and time.time() - T0 < WARM:
    time.sleep(0.1)
    left = {c for c in left if os.waitpid(c, os.WNOHANG)[0] == 0}
print(f"[{time.time() - T0:.1f} s] children done, {len(left)} ended early", flush=True)
for c in left:
    os.kill(c, 9)
    os.waitpid(c, 0)
load()
go(["fla", "ridgeline"])
