import sys, os; sys.path.insert(0, os.path.dirname(__file__))
from overlap import placed, overlaps
from ridgeline.op import registry
from ridgeline.lab.analysis import inspect
from ridgeline.boundary import *
done = set()
for name, op in registry().items():
    if sys.argv[1:] and name not in sys.argv[1:]: continue
    for i in op.implementations.values():
        if not i.is_kernel or i.arch > 90 or (i.newest and i.newest < 90): continue
        if i.kind != "gluon" and name not in ("gated_delta_rule",): continue
        for case in op.cases:
            if case.use != "bench": continue
            for dtype in case.dtypes:
                try: made = inspect.launches(op, i, case, dtype, "sm_90")
                except Exception as e: print(name, i.name, case.name, repr(e)[:80]); continue
                for direction, launch in made:
                    sig = inspect.signature(launch)
                    if sig in done: continue
                    done.add(sig)
                    if type(launch.kernel).__name__ != "GluonJITFunction": continue
                    if (launch.kernel.__name__, dtype, i.name) in done: continue
                    done.add((launch.kernel.__name__, dtype, i.name))
                    r = inspect.of_launch(launch)
                    try: found, t, s = overlaps(placed(r.texts["ttgir"]))
                    except Exception as e: print(name, launch.kernel.__name__, repr(e)[:200]); continue
                    print(name, i.name, launch.kernel.__name__, dtype, t, "tiles", s, "scratch", found, flush=True)
