"""The law with an initial state and a gradient of the last one."""
import sys; which = sys.argv[1]; sys.argv = ["x", "none"]; exec(open("scripts/check.py").read().split("b, h = torch.bfloat16")[0])
dtype = {"b": torch.bfloat16, "h": torch.float16}[which]
args, do = make(2, 512, 4, 4, dtype, 0.01)
state = torch.randn(2, 4, 128, 128, device=dev)
dlast = torch.randn(2, 4, 128, 128, device=dev)
def call(q, k, v, g, beta, s, impl="triton", **kw):
    return ridgeline.gated_delta_rule(q, k, v, g, beta, normalize=True, initial_state=s, return_state=True, impl=impl)
import types
from ridgeline.lab.measurement import law as L
rule = Law(mod.OP, [t.clone().requires_grad_() for t in args], {"normalize": True, "initial_state": state, "return_state": True}, incoming=[do, dlast])
for serve in (True, False):
    with using(serve):
        found = rule.judge(*rule.run(lambda *a, **k: ridgeline.gated_delta_rule(*a, impl="triton", **k))).findings()
    print("gluon " if serve else "triton", which, "states, weak", {n: f"{f.worst:.2f} {f.where}" for n, f in found.items()}, flush=True)
