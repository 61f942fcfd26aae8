"""What the page of `ridgeline lm report` shows of a run's rows: sections of tables, pictures and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.lm import curves, precision
from ridgeline.lm.lab import units
from ridgeline.lm.sizes import SIZES

Row = dict[str, Any]
MIB = 2**20
NAMES = {"ridgeline": "ours", "naive": "plain", "torch": "PyTorch's"}
PHASES = ("inference", "forward", "recompute", "backward", "optimizer")


@dataclass
class Table:
    """A table: its heads, and rows of cells. A cell is a text, or a share that is drawn as a bar."""

    title: str
    heads: Sequence[str]
    rows: list[list[Any]]
    more: bool = False  # folded away until the reader opens it


@dataclass
class Shown:
    """What a section shows of one run."""

    tables: list[Table] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def time(seconds: dict[str, float] | None) -> str:
    return units.DASH if not seconds else f"{units.seconds(seconds['median'])} {units.spread(seconds)}"


def us(value: float) -> str:
    return units.seconds(value / 1e6) if value else units.DASH


def off(predicted: float | None, measured: float | None) -> str:
    """Returns how far a prediction is off."""
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else units.DASH


def sizes() -> Shown:
    rows = [
        [name, f"{s.parameters / 1e6:,.1f} M", str(s.layers), str(s.width), str(s.hidden), f"{s.heads}/{s.groups}",
         str(s.dim), f"{s.vocabulary:,}", units.scaled(s.step(1, 512), "FLOP")]
        for name, s in SIZES.items()
    ]  # fmt: skip
    heads = (
        "Size",
        "Parameters",
        "Layers",
        "Width",
        "Hidden",
        "Heads/keys",
        "Head",
        "Vocabulary",
        "A step of 512 tokens",
    )
    return Shown([Table("", heads, rows)])


def bench(rows: list[Row]) -> Shown:
    """Forward, backward and the step: each size, dtype and implementation is a row."""
    guesses = {place(r): r["predicted_bytes"] for r in rows if r["part"] == "bench" and "predicted_bytes" in r}
    cells, out = [], []
    works: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "bench" and row.get("seconds"):
            works.setdefault((row["case"], row["dtype"], row["impl"]), {})[row["direction"]] = row
        elif row["part"] == "bench" and row["status"] not in ("ok", "left out"):
            out.append(f"{row['case']} {row['dtype']} {row['impl']}: {row['status']}, {row.get('reason', '')}")
    for (case, dtype, impl), ways in works.items():
        step = ways.get("step", {})
        guess = guesses.get((case, dtype, impl, "step"))
        rate = f"{step['tokens_per_second']:,.0f}" if step else units.DASH
        mfu = units.percent(step["mfu"]) if step and step["mfu"] else units.DASH
        times = [time(ways[way]["seconds"]) if way in ways else units.DASH for way in ("forward", "backward", "step")]
        peak = step.get("peak_bytes")
        said = f"{units.size(guess)} ({off(guess, peak)})" if guess and peak else units.size(guess)
        cells.append([f"{case} {dtype}", impl, *times, rate, mfu, units.size(peak), said])
    heads = ("Work", "Ops", "Forward", "Forward and backward", "Step", "Tokens/s", "MFU", "Peak, measured",
             "Peak, predicted")  # fmt: skip
    shown = Shown([Table("", heads, cells)] if cells else [])
    largest = [r for r in rows if r["part"] == "context" and "fits" in r]
    if largest:
        found = [[f"{r['case']} {r['dtype']}", r["impl"], f"{r['fits']:,}", f"{r['fails']:,}" if r["fails"] else "none"]
                 for r in largest]  # fmt: skip
        shown.tables.append(
            Table("Largest context whose step fits", ("Work", "Implementation", "Fits", "Does not"), found)
        )
    for row in rows:
        if row["part"] == "first" and "data" in row:
            parts, whole = row["data"], row["data"]["whole"]
            cells = [[name, units.seconds(s), s / whole] for name, s in parts.items() if s]
            title = f"The first step of a process, {row['case']} {row['dtype']}"
            shown.tables.append(Table(title, ("Part", "Time", "Share"), cells))
        if row["part"] == "overhead" and "overhead" in row:
            shown.said.append(f"With the ranges of lm profile, and without tracing, a step of {row['case']} takes "
                              f"{time(row['seconds'])}: {row['overhead']:+.2%} against a step without.")  # fmt: skip
    shown.said += out
    return shown


def place(row: Row) -> tuple[str, str, str, str]:
    return row["case"], row["dtype"], row["impl"], row["direction"]


def profile(rows: list[Row]) -> Shown:
    """Kinds of work, layers and modules by phase; kernels; softmax against products; gaps and reads."""
    shown = Shown()
    found = {r["impl"]: r for r in rows if r["part"] == "profile" and "data" in r}
    if row := found.get("ridgeline"):
        data = row["data"]
        where = "GPU time" if data["device"] == "cuda" else "CPU time"
        for name, title in (("kinds", "kind of work"), ("layers", "layer"), ("modules", "module")):
            shown.tables.append(phases(f"{where} a step, by {title}", data[name], name == "modules"))
        for name, kernels in data["kernels"].items():
            cells = [[k["name"][:90], k["kind"], f"{k['calls']:g}", us(k["us"])] for k in kernels]
            heads = ("Kernel or operator", "Kind", "Calls", "Time")
            shown.tables.append(Table(f"Longest in {name}, per step", heads, cells, more=name == "inference"))
        for name, timer in data["timer"].items():
            share = units.percent(data["products_share"][name])
            shown.said.append(
                f"{name.capitalize()} takes {us(timer['timed'])} by the timer without the profiler, and "
                f"{us(timer['summed'])} by the sum of its parts. Matrix products take {share} of it."
            )
        gaps = data["gaps"] or []
        cells = [[g["host"], str(g["gaps"]), us(g["us"])] for g in gaps[:8]]
        if cells:
            columns = ("The host did", "Gaps", "The GPU waited")
            shown.tables.append(Table("Gaps in which the GPU waited for the host, all profiled steps", columns, cells))
        elif data["gaps"] is None:
            shown.said.append("On a CPU there are no gaps: no GPU waits for the host.")
        reads = "; ".join(f"{n} a step at {line}" for line, n in data["reads"].items())
        shown.said.append(f"Synchronisations: {reads or 'none: the host reads no value in a step'}.")
        if data["device"] == "cuda" and (demo := data.get("demo")):  # on a CPU the host waits for nothing
            quiet, loud = (units.seconds(demo[name]) for name in ("quiet", "printing"))
            shown.said.append(f"A loop of steps takes {quiet} a step. One that prints each loss takes {loud}: the host "
                              "waits there for the whole step.")  # fmt: skip
        over = data["overhead"]
        shown.said.append(f"The {over['ranges']} ranges of a step cost at most {over['share']:.2%} of it.")
    if (row := found.get("naive")) and (halves := row["data"].get("attention")):
        cells = [[name, us(h["us"]), units.scaled(h["flops"], "FLOP")] for name, h in halves.items()]
        columns = ("Half of attention, forward, by the formulas", "Time", "Operations")
        shown.tables.append(Table("Softmax against products", columns, cells))
    shown.said += [f"{r['impl']}: {r['reason']}" for r in rows if r["part"] == "profile" and r["status"] != "ok"]
    return shown


def phases(title: str, rows: dict[str, dict[str, float]], more: bool) -> Table:
    there = [p for p in PHASES if any(row[p] for row in rows.values())]
    whole = sum(row[p] for row in rows.values() for p in PHASES[1:]) or 1.0
    cells = [
        [name, *(us(row[p]) for p in there), sum(row[p] for p in PHASES[1:]) / whole] for name, row in rows.items()
    ]
    return Table(title, ("Part", *(p.capitalize() for p in there), "Share of training"), cells, more)


def memory(rows: list[Row]) -> Shown:
    shown = Shown()
    for row in (r for r in rows if r["part"] == "memory" and "data" in r):
        data, measured = row["data"], row.get("peak_bytes")
        title = f"{row['case']} {row['dtype']}"
        peak = f"A step of {title} peaks at {units.size(row['predicted_bytes'])} by prediction"
        wrong = off(row["predicted_bytes"], measured)
        there = f"measured: {units.size(measured)} (the prediction is {wrong} off)"
        shown.said.append(f"{peak}; {there if measured else data.get('why', 'not measured here')}.")
        curve = {kind: [n / MIB for n in values] for kind, values in data["curve"].items()}
        if curve:
            points = [float(n) for n in range(len(next(iter(curve.values()))))]
            drawn = curves.stacked(
                f"Memory of {title}", points, curve, "allocations and releases", "predicted, live", "MiB"
            )
            shown.pictures.append(drawn)
        whole = data["peak_bytes"] or 1
        kinds = [[kind, units.size(n), n / whole] for kind, n in data["kinds"].items() if n]
        shown.tables.append(Table("At the peak, by kind", ("Kind", "Bytes", "Share"), kinds))
        saved = [["x".join(map(str, r["shape"])), r["dtype"], f"{r['op']} in {r['module']}", units.size(r["bytes"]),
                  r["share"]] for r in data["block"]]  # fmt: skip
        heads = ("Shape", "Dtype", "Made by", "Bytes", "Share of the layer's")
        title = f"The five largest of {units.size(data['block_bytes'])} that one layer saves for backward"
        shown.tables.append(Table(title, heads, saved))
        stream, gradients = units.size(data["stream_bytes"]), units.size(data["block_gradient_bytes"])
        shown.said.append(f"One tensor of the residual stream takes {stream}, a layer's gradients {gradients}.")
    return shown


def attention(rows: list[Row]) -> Shown:
    works: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in (r for r in rows if r["part"] == "attention"):
        works.setdefault((row["case"], row["dtype"], row["impl"]), {})[row["direction"]] = row
    cells, why = [], []
    for (case, dtype, impl), ways in works.items():
        if wrong := ways.get("all"):
            cells.append([f"{case} {dtype}", impl, wrong["status"], *[units.DASH] * 5])
            why.append(f"{case} {dtype}, {impl}: {wrong['status']}, {wrong['reason']}")
            continue
        both = ways["both"]
        times = [time(ways[way]["seconds"]) for way in ("forward", "backward", "both")]
        rate = units.scaled(both["flops_per_second"], "FLOP/s")
        cells.append(
            [f"{case} {dtype}", impl, *times, rate, units.size(both["held_bytes"]), units.size(both["formula_bytes"])]
        )
    heads = (
        "Batch x length x head",
        "Implementation",
        "Forward",
        "Backward",
        "Both",
        "Rate",
        "Before backward",
        "By formula",
    )
    return Shown([Table("", heads, cells)] if cells else [], said=list(dict.fromkeys(why))[:12])


def checkpoint(rows: list[Row]) -> Shown:
    cells = []
    for row in (r for r in rows if r["part"] == "checkpoint" and "data" in r):
        data = row["data"]
        took = units.seconds(data["seconds"]) if data.get("seconds") else units.DASH
        there = units.size(row.get("peak_bytes")) if row["status"] == "ok" else row["status"]
        cells.append([row["impl"], units.size(data["peak_bytes"]), there, units.size(data["kept_bytes"]),
                      units.scaled(data["operations"], "FLOP"), f"{data['more']:.2f}x", took])  # fmt: skip
    heads = ("Way", "Peak, predicted", "Peak, measured", "Activations", "Operations", "Of a plain step's", "Time")
    return Shown([Table("", heads, cells)] if cells else [])


def formats(rows: list[Row]) -> Shown:
    row = next((r for r in rows if r["part"] == "precision" and "data" in r), None)
    if row is None:
        return Shown()
    data = row["data"]
    sums = [[s["sum"], f"{s['value']:.6f}", f"{s['error']:+.6f}"] for s in data["sums"]]
    cast = data["autocast"]
    parts = [[part, cast["float16"][part], cast["bfloat16"][part]] for part in cast["float16"]]
    table = [[f["format"], f"{f['exponent']}+{f['fraction']}", f"{f['largest']:.3g}", f"{f['normal']:.3g}",
              f"{f['least']:.3g}", f"{f['spacing']:.2g}"] for f in data["formats"]]  # fmt: skip
    return Shown(
        [
            Table("0.01 added a thousand times; the sum is 10", ("Sum", "Result", "Error"), sums),
            Table(f"Dtypes under autocast on {data['device']}", ("Part", "float16", "bfloat16"), parts),
            Table("Formats", ("Format", "Bits", "Largest", "Smallest normal", "Smallest", "Spacing at 1"), table),
        ],
        [precision.picture()],
    )


def scale(rows: list[Row]) -> Shown:
    tables = []
    mine = [r for r in rows if r["part"] == "scale"]
    said = []
    for fit in (r for r in mine if r["direction"] == "fit"):
        name, data = fit["case"], fit["data"]
        title = "Square matrix products, by side" if name == "products" else f"MLP, by {name}"
        cells = [[r["case"].split()[-1], time(r["seconds"]), units.scaled(r["flops_per_second"], "FLOP/s")]
                 for r in mine if r["direction"] != "fit" and r["case"].startswith(f"{name} ")]  # fmt: skip
        tables.append(Table(title, ("Size", "Time", "Rate"), cells))
        if data["exponent"] is not None:
            larger = data["exponent_of_larger_half"]
            half = "" if larger is None else f", as size^{larger:.2f} over the larger half"
            over = us(data["overhead_ms"] * 1e3) if data["overhead_ms"] > 0 else "nothing"
            said.append(f"{title}: time grows as size^{data['exponent']:.2f}{half}; overhead of the smallest: {over}.")
    return Shown(tables, said=said)


def leaderboard(rows: list[Row]) -> Shown:
    cells, tables = [], []
    for row in (r for r in rows if r["part"] == "leaderboard"):
        if row["direction"] == "plan":
            plan = row["data"]
            parts = [[name, f"{n / 1e9:.1f} GB"] for name, n in (plan["bytes"] | {"peak": plan["peak_bytes"]}).items()]
            floor = plan["floor_seconds"] | {"floor": sum(plan["floor_seconds"].values())}
            times = [[name, units.seconds(value)] for name, value in floor.items()]
            tables.append(Table(f"Planned memory of a step, {row['case']} tokens", ("Part", "Bytes"), parts))
            tables.append(Table("A step by formula, on an H200", ("Part", "Time"), times))
        elif row.get("seconds"):
            floor = row.get("floor_seconds")
            share = floor / row["seconds"]["median"] if floor else units.DASH
            cells.append([row["case"], NAMES.get(row["impl"], row["impl"]), time(row["seconds"]),
                          units.seconds(floor) if floor else units.DASH, share,
                          units.size(row.get("peak_bytes"))])  # fmt: skip
    heads = ("Work", "Implementation", "Time", "Floor", "Share of the floor", "Peak")
    return Shown([*([Table("", heads, cells)] if cells else []), *tables])


# (id, short title, title, what it says, the function from rows).
View = Callable[[list[Row]], Shown]
SECTIONS: list[tuple[str, str, str, str, View]] = [
    (
        "bench", "Times", "Forward, backward, step",
        "Medians with half their 95% interval. “Ours” are Ridgeline’s ops, “plain” the formulas in PyTorch, “compiled” "
        "these through torch.compile, “graph” ours as a CUDA graph. MFU is the share of the rate of matrix products "
        "measured just before.", bench,
    ),
    (
        "profile", "Profile", "Where the time goes",
        "Backward’s work belongs to the module whose forward call caused it.", profile,
    ),
    (
        "memory", "Memory", "Where the memory goes",
        "The prediction runs the same code on fake tensors and needs no GPU.", memory,
    ),
    (
        "checkpoint", "Checkpoints", "Keep less for backward",
        "Each way of keeping less, with the operations that it repeats.", checkpoint,
    ),
    (
        "attention", "Attention", "Attention alone",
        "Times of forward, backward and both, and the memory in use before backward.", attention,
    ),
    (
        "precision", "Formats", "What number formats do",
        "Dark bars are normal numbers, light bars subnormal ones.", formats,
    ),
    ("scale", "Scale", "How time grows with size", "Exponents are fitted to the medians.", scale),
    (
        "leaderboard", "Leaderboard", "The leaderboard’s step",
        "8.1 B parameters, 2 x 32768 tokens; and attention alone, 16 heads of 64. Beside them the floor by formula.",
        leaderboard,
    ),
]  # fmt: skip
