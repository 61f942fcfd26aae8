import sys, os, importlib
sys.path.insert(0, os.path.dirname(__file__))
from ridgeline.lab.analysis import inspect
import pairs_patch
from dataclasses import replace
mod = importlib.import_module("ridgeline.ops.recurrent.gated_delta_rule")
op = mod.OP
case = next(c for c in op.cases if c.name == (sys.argv[3] if len(sys.argv) > 3 else "8x4096x16x128 per head"))
for regs in map(int, sys.argv[1].split(",")):
    for store in (True, False):
        pairs_patch.patch({"num_warps": 4} | ({"maxnreg": regs} if regs else {}), store, 396)
        for direction, launch in inspect.launches(op, op.implementations["triton"], case, "bfloat16", "sm_90")[:1]:
            r = inspect.of_launch(launch, True)
            print(launch.kernel.__name__, regs, store, {k: v for k, v in r.to_dict().items() if k in ("registers", "spill_loads", "spill_stores", "shared")}, sum(1 for l in r.texts["sass"].splitlines() if "/*0" in l), flush=True)
            if len(sys.argv) > 2:
                for k, t in r.texts.items(): open(f"{sys.argv[2]}/pairs.{regs}.{k}", "w").write(t)
