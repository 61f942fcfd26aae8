"""Compiles a variant of the gradients' kernel and tells what it takes: fits.py MODULE [dtype] [case] [OUT]."""
import sys, importlib, re, os
sys.path.insert(0, os.path.dirname(__file__))
import ridgeline
from ridgeline.lab.analysis import inspect
from ridgeline.ops.recurrent import _delta_hopper as hopper
from dataclasses import replace
mod = importlib.import_module("ridgeline.ops.recurrent.gated_delta_rule")
if sys.argv[1] != "src":
    hopper.chunk_gradients = importlib.import_module(sys.argv[1]).chunk_gradients
    module = importlib.import_module(sys.argv[1])
    if hasattr(module, "AHEAD"):
        import ahead
        ahead.patch(hopper, module)
    if hasattr(module, "PERSISTENT"):
        begun = hopper.launch
        def persistent(kernel, grid, *a, **k):
            if kernel is module.chunk_gradients:
                return begun(kernel, (min(264, grid[0] * grid[1]),), *a, grid[0], grid[0] * grid[1], **k)
            return begun(kernel, grid, *a, **k)
        hopper.launch = persistent
    if hasattr(module, "WARPS"):
        started = hopper.launch
        hopper.launch = lambda kernel, *a, **k: started(kernel, *a, **(k | ({"num_warps": module.WARPS, "maxnreg": 128} if kernel is module.chunk_gradients else {})))
op = mod.OP
want = sys.argv[3] if len(sys.argv) > 3 else "8x4096x16x128 per head"
dtype = sys.argv[2] if len(sys.argv) > 2 else "bfloat16"
case = next(c for c in op.cases if c.name == want)
case = replace(case, dtypes=(dtype,))
seen = set()
for direction, launch in inspect.launches(op, op.implementations["triton"], case, dtype, "sm_90"):
    name = launch.kernel.__name__
    if len(sys.argv) > 5 and sys.argv[5] not in name: continue  # some kernels
    r = inspect.of_launch(launch, True)
    key = (name, r.registers, r.spills if hasattr(r, "spills") else None, r.shared)
    if key in seen: continue
    seen.add(key)
    d = r.to_dict()
    print(name, direction, {k: d[k] for k in d if k in ("registers", "spill_stores", "spill_loads", "spills", "shared", "instructions", "occupancy", "limit", "spilled")}, "spill" , [(k, v) for k, v in d.items() if "spill" in k])
    if len(sys.argv) > 4 and sys.argv[4] != "-":
        for k, t in r.texts.items(): open(f"{sys.argv[4]}/{name}.{direction}.{k}", "w").write(t)
