"""Realistic rows of two machines, made from a few measured facts: what the report's tests and its author look at."""

import json
import random
from pathlib import Path

from ridgeline.lab.measurement.store import SCHEMA

HOSTILE = "<script>alert(1)</script>"
H100 = {"read": 3.09e12, "write": 2.98e12, "copy": 3.03e12, "add": 3.05e12}
LAPTOP = {"read": 24e9, "write": 11e9, "copy": 17e9, "add": 19e9}
H100_RATES = {"float32": 5.1e13, "float16": 7.3e14, "bfloat16": 7.5e14}
LAPTOP_RATES = {"float32": 1.4e11, "bfloat16": 4.0e10}
WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2}
RUNGS = {
    "gelu": [
        ("naive", "eager", 0.094),
        ("torch", "eager", 0.975),
        ("compile", "compile", 0.965),
        ("cuda_double", "cuda", 0.31),
        ("cuda", "cuda", 0.90),
        ("cuda_packed", "cuda", 0.984),
        ("triton", "triton", 0.979),
    ],
    "softmax": [
        ("naive", "eager", 0.19),
        ("torch", "eager", 0.71),
        ("compile", "compile", 0.82),
        ("triton_row", "triton", 0.86),
        ("triton", "triton", 0.955),
        ("cuda_cluster", "cuda", 0.972),
    ],
    "mul": [
        ("torch", "eager", 0.968),
        ("cuda", "cuda", 0.93),
        ("cuda_packed", "cuda", 0.985),
        ("triton", "triton", 0.98),
    ],
    "matmul": [("torch", "eager", 0.97), ("triton", "triton", 0.83)],
}
CASES = {
    "gelu": [("16384x16384", 16384 * 16384), ("1024x1024", 1 << 20)],
    "softmax": [("16384x16384", 16384 * 16384), ("32768x1024", 1 << 25), ("1024x262144", 1 << 28)],
    "mul": [("512 Mi", 1 << 29), ("32 Mi", 1 << 25)],
    "matmul": [("4096", 4096), ("8192", 8192)],
}
FLOPS = {"gelu": 14, "softmax": 5, "mul": 1}


def _around(value: float, noise: float, dice: random.Random) -> dict[str, float]:
    median = value * dice.gauss(1, noise)
    return {"median": median, "low": median * (1 - noise), "high": median * (1 + noise)}


def _machine(gpu: bool, name: str) -> dict:
    common = {"python": "3.12.3", "os": "Linux 6.8", "memory_bytes": 128 << 30 if gpu else 8 << 30}
    if gpu:
        return {"gpu": name, "arch": "sm_90", "cpu": "Intel Xeon Platinum 8480C", "cores": 16, "driver": "580.65",
                "cuda": "13.0", "torch": "2.11.0+cu130", "triton": "3.6.0", **common}  # fmt: skip
    return {
        "gpu": None,
        "arch": "cpu",
        "cpu": "AMD EPYC 7R13",
        "cores": 2,
        "driver": None,
        "cuda": None,
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        **common,
    }


def steps(seed: int, *variants: tuple[str, float]) -> list[dict]:
    """A run that timed whole training steps: of each variant one in those seconds."""
    facts = [row for row in rows(seed=seed) if row["type"] in ("run", "roof")]
    floor = {"products": 0.15, "attention": 0.02, "memory": 0.03, "seconds": 0.2, "lasting": 0.22}
    common = {
        "schema": SCHEMA,
        "type": "model",
        "run": facts[0]["run"],
        "status": "ok",
        "reason": None,
        "model": "llama-1b",
        "title": "Llama 3.2 1B",
        "batch": 4,
        "seq": 4096,
        "dtype": "bfloat16",
        "peak_bytes": 27 << 30,
        "host_us": 32000.0,
        "losses": [11.7, 11.2],
        "reference": "eager",
        "floor": floor,
        "kinds": {"products": 0.17, "norms": 0.004},
        "kernels": [],
        "launches": 900,
        "between": "on the GPU",
    }
    made = []
    for name, median in variants:
        seconds = {"median": median, "low": 0.9 * median, "high": 1.1 * median}
        rate = {"median": 16384 / median, "low": 16384 / seconds["high"], "high": 16384 / seconds["low"]}
        shares = {"share": floor["seconds"] / median, "share_lasting": floor["lasting"] / median}
        made.append(common | {"variant": name, "seconds": seconds, "tokens_per_second": rate} | shares)
    return [*facts, *made]


def rows(
    gpu: bool = True,
    seed: int = 0,
    hostile: bool = False,
    slower: float = 1.0,
    name: str = "NVIDIA H100 80GB HBM3",
    ops: tuple = (),
) -> list[dict]:
    """A whole run. hostile: put markup into names. slower: a factor on every kernel's time. ops: only these."""
    dice = random.Random(seed)
    bandwidth, rates = (H100, H100_RATES) if gpu else (LAPTOP, LAPTOP_RATES)
    run = f"2026112{seed}-021500-abc1234"
    machine = _machine(gpu, name) | ({"cpu": HOSTILE} if hostile else {})
    out = [
        {"type": "run", "time": f"2026-11-2{seed}T02:15:00+00:00", "commit": "abc1234", "dirty": False,
         "command": "bench", "machine": machine},
        {"type": "roof", **{k: _around(v, 0.002, dice) for k, v in bandwidth.items()}, "launch_us": 2.3 if gpu else 0.0,
         "matmul": {d: {**_around(v, 0.01, dice), "shape": [8192, 8192, 8192]} for d, v in rates.items()}},
    ]  # fmt: skip
    for op, rungs in ((op, rungs) for op, rungs in RUNGS.items() if not ops or op in ops):
        for case, count in CASES[op]:
            for dtype in rates:
                for direction in ("forward", "backward") if op in ("gelu", "softmax") else ("forward",):
                    elements = count if gpu else count // 256
                    if op == "matmul":
                        n = count if gpu else count // 8
                        read, write, flops = 2 * n * n * WIDTH[dtype], n * n * WIDTH[dtype], 2 * n**3
                    else:
                        inputs = 1 + (op == "mul") + (direction == "backward")
                        read, write = inputs * elements * WIDTH[dtype], elements * WIDTH[dtype]
                        flops = FLOPS[op] * elements
                    memory, compute = (read + write) / bandwidth["copy"], flops / rates[dtype]
                    roof = max(memory, compute)
                    best = None
                    for impl, kind, share in rungs:
                        row = {
                            "type": "bench",
                            "op": op,
                            "case": case,
                            "dtype": dtype,
                            "direction": direction,
                            "impl": impl,
                            "kind": kind,
                            "peer": impl in ("torch", "compile"),
                            "status": "ok",
                            "reason": None,
                            "read": read,
                            "write": write,
                            "bytes": read + write,
                            "flops": flops,
                            "roof_seconds": roof,
                            "bound": "memory" if roof == memory else "compute",
                            "cached": (read + write) < 200e6,
                            "mhz": 1980.0,
                            "throttled": False,
                        }
                        if not gpu and kind in ("cuda", "triton"):
                            row |= {
                                "status": "unsupported",
                                "reason": "CUDA C++ runs on an NVIDIA GPU, and this is CPU",
                            }
                        elif impl == "compile" and not gpu:
                            row |= {
                                "status": "unsupported",
                                "reason": "torch.compile on a CPU needs a C++ compiler (g++), and none is installed",
                            }
                        else:
                            seconds = _around(roof / share * (slower if kind != "eager" else 1) + 2e-6, 0.004, dice)
                            row |= {
                                "seconds": seconds,
                                "host_us": dice.uniform(9, 30),
                                "peak_bytes": write * (6 if impl == "naive" else 1),
                                "law": dice.uniform(0.2, 0.7),
                                "share": roof / seconds["median"],
                                "ratio": None,
                            }
                            if row["peer"]:
                                best = min(best or 1e9, seconds["median"])
                        out.append(row)
                    for row in out[-len(rungs) :]:
                        if row["status"] == "ok" and best:
                            row["ratio"] = best / row["seconds"]["median"]
                    out += [
                        {
                            "type": "check",
                            "op": op,
                            "case": case,
                            "dtype": dtype,
                            "impl": impl,
                            "ok": True,
                            "reason": None,
                            "outputs": {"y": {"error": 1e-3, "allowed": 3e-3, "worst": 0.4, "where": "row"}},
                        }
                        for impl, kind, _ in rungs
                        if gpu or kind != "cuda"
                    ]
    timed = [row for row in out if row["type"] == "bench" and row["kind"] == "cuda" and row["direction"] == "forward"]
    place = ("op", "case", "dtype", "direction", "impl")
    out += [
        {
            "type": "counter",
            **{name: row[name] for name in place},
            "status": "ok",
            "counter": "smsp__inst_executed.sum",
            "value": 1.25e6,
            "unit": "inst",
            "kernel": f"{row['op']}_fwd",
        }
        for row in timed
    ]
    if hostile:
        out.append(out[2] | {"op": HOSTILE, "impl": f"evil{HOSTILE}", "case": '"><img src=x onerror=alert(2)>'})
        out.append(out[2] | {"impl": "</script><script>alert(3)</script>", "status": "wrong", "reason": HOSTILE})
    return [{"schema": SCHEMA, "run": run, **row} for row in out]


def write(path: Path, **facts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(**facts)))
    return path
