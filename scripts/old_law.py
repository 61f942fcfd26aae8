import sys; which = sys.argv[1]; sys.argv = ["x", "none"]; exec(open("scripts/check.py").read().split("b, h = torch.bfloat16")[0])
b, h = torch.bfloat16, torch.float16
for dtype in ((b, h)[which == 'h'],):
    for shape in ((2, 512, 16, 16), (1, 512, 32, 32), (8, 512, 16, 16)):
        for gates in (0.01, 1.0):
            args, do = make(*shape, dtype, gates)
            with using(False): right = grads(args, do)
            bad = 0
            for n in range(5):
                with using(): got = grads(args, do)
                d = (got[2].double() - right[2].double()); e = (d.norm() / right[2].double().norm()).item()
                far = (d.abs() > 0.02 * right[2].double().abs().max()) | ~d.isfinite()
                if far.any() or e > 3e-3 or not got[4].isfinite().all():
                    bad += 1
                    if bad <= 2: print("   ", n, f"dk off by {e:.1e}; far: {int(far.sum())} at columns {far.flatten(0, 2).any(0).nonzero().flatten().tolist()[:10]} rows mod 64 {sorted(set((far.any(-1).any(-1).any(0).nonzero().flatten() % 64).tolist()))[:10]}; dg not finite {int((~got[4].isfinite()).sum())}")
            print(dtype, shape, gates, "bad runs", bad, f"dk {e:.1e}", flush=True)
