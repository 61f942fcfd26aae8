import re, sys, tempfile
from triton._C.libtriton import ir, nvidia, passes
SIZES = {"i1": 1, "i8": 1, "i32": 4, "i64": 8, "f32": 4, "bf16": 2, "f16": 2}
def placed(ttgir, capability=90):
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as f:
        f.write(ttgir); f.flush()
        ctx = ir.context(); ir.load_dialects(ctx); nvidia.load_dialects(ctx)
        mod = ir.parse_mlir_module(f.name, ctx)
    pm = ir.pass_manager(ctx)
    passes.ttgpuir.add_allocate_warp_groups(pm)
    passes.convert.add_scf_to_cf(pm)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(pm, capability, 86)
    pm.run(mod, "places")
    return str(mod)
def overlaps(text):
    tiles, scratch = [], []
    for line in text.splitlines():
        at = re.search(r"allocation\.offset = (\d+)", line)
        if not at: continue
        if "ttg.local_alloc" in line:
            shape = re.search(r"memdesc<((?:\d+x)+)(\w+),", line)
            size = SIZES.get(shape.group(2), 1)
            for n in shape.group(1).split("x")[:-1]: size *= int(n)
            tiles.append((int(at.group(1)), size, line.strip().split(" ")[0], shape.group(0)))
        else: scratch.append((int(at.group(1)), line.strip()[:60]))
    return [(s, t) for s in scratch for t in tiles if t[0] <= s[0] < t[0] + t[1]], len(tiles), len(scratch)
