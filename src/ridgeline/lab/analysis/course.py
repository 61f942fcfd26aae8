"""Answers to the assignment's problems in the guide's table, from rows that `ridgeline lm VERB --record` wrote.

A cell holds `<!-- course NAME -->…<!-- /course -->`, and `make readme` writes the answer in between. What is not
recorded is a dash, or nothing in a cell that has a predicted answer. Times of whole models come from `ridgeline lm
survey`, and those of an op from `ridgeline bench`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.measurement import store
from ridgeline.lm.setup import SHAPE
from ridgeline.op import RidgelineError

Row = dict[str, Any]
MARK = re.compile(r"(<!-- course ([\w-]+) -->).*?(<!-- /course -->)")
FOLDER = "results/course"  # a file for each GPU; the H200's comes first
SURVEY, BENCH = Path("results/lm/h200.jsonl"), Path("results/h200.jsonl")
MIB, GIB = 2**20, 2**30


def recorded(root: Path) -> list[Row]:
    """The rows of the first GPU that has any, the oldest first. Raises RidgelineError if a file is torn."""
    for path in sorted((root / FOLDER).glob("*.jsonl"), key=lambda path: (path.stem != "h200", path.stem)):
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                if row["type"].startswith("lm ") and row["machine"]["gpu"]:
                    rows.append(row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RidgelineError(f"{path} line {number} is not a row that `ridgeline lm` recorded") from error
        if rows:
            return rows
    return []


def others(root: Path) -> list[Row]:
    """The rows of whole models, as of the verb "survey", and of ops, as of "op"."""
    found: list[Row] = []
    for path, kind, named in ((SURVEY, "lm", "lm survey"), (BENCH, "bench", "lm op")):
        rows = store.load(root / path) if (root / path).is_file() else []
        found += [row | {"type": named} for row in rows if row["type"] == kind]
    return found


def filled(text: str, root: Path) -> str:
    """A text with its answers filled. Raises RidgelineError if it asks for one that there is not."""
    rows = [*recorded(root), *others(root)] if MARK.search(text) else []

    def answer(mark: re.Match[str]) -> str:
        if mark[2] not in ANSWERS:
            raise RidgelineError(f"a page wants the answer {mark[2]!r}; there are {', '.join(ANSWERS)}")
        find, otherwise = ANSWERS[mark[2]]
        said = find(rows)
        return f"{mark[1]}{otherwise if said is None else said}{mark[3]}"

    return MARK.sub(answer, text)


def of(rows: list[Row], verb: str, **facts: Any) -> list[Row]:
    """The rows of a verb that have these facts, the oldest first."""
    return [r for r in rows if r["type"] == f"lm {verb}" and all(r.get(k) == v for k, v in facts.items())]


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def warm_up(rows: list[Row]) -> str | None:
    """The mean step after each number of warm-ups, and what the first step of a process takes."""
    studied = {row["warmups"]: row for row in of(rows, "bench", size="small", autocast=None) if "seconds" in row}
    if len(studied) < 2:
        return None
    means = ", ".join(units.seconds(studied[n]["seconds"]["mean"]) for n in sorted(studied))
    counts = ", ".join(map(str, sorted(studied)))
    said = f"mean of a step after {counts} warm-ups: {means}"
    first = [row["first"] for row in of(rows, "bench", size="small") if "first" in row][-1:]
    if first:
        parts = {name: value for name, value in first[0].items() if name != "whole"}
        name = max(parts, key=parts.__getitem__)
        said += f"; the first step {units.seconds(first[0]['whole'])}, of which {name} {units.seconds(parts[name])}"
    return said


def points(rows: list[Row], impl: str, **facts: Any) -> dict[tuple[int, int], Row]:
    """The newest row of attention at each length and head dimension; it has times, or the reason for none."""
    return {(row["seq"], row["dim"]): row for row in of(rows, "attention", impl=impl, **facts)}


def milliseconds(row: Row, way: str) -> str:
    return units.seconds(row["seconds"][way]["median"])


def plain_attention(rows: list[Row]) -> str | None:
    """The longest point of the 20 that plain attention reaches, and what becomes of the next one."""
    found = points(rows, "plain", batch=8, dtype="float32", causal=False)
    done = [at for at, row in found.items() if "seconds" in row]
    if not done:
        return None
    seq, dim = max(done)
    row = found[seq, dim]
    said = f"d {dim}, context {seq}: forward {milliseconds(row, 'forward')}, backward {milliseconds(row, 'backward')}"
    said += f", {gib(row['in_use_bytes'])} before backward"
    failed = sorted(at for at, row in found.items() if at[0] > seq and "error" in row)
    return said + (f"; {failed[0][0]}: {found[failed[0]]['error'].partition(':')[0]}" if failed else "")


def against(rows: list[Row], ours: str, way: str, **facts: Any) -> str | None:
    """Two implementations of attention at the longest point that both reach."""
    mine, plain = points(rows, ours, **facts), points(rows, "plain", **facts)
    both = [at for at in mine.keys() & plain.keys() if "seconds" in mine[at] and "seconds" in plain[at]]
    if not both:
        return None
    seq, dim = max(both)
    times = f"{milliseconds(mine[seq, dim], way)}, plain {milliseconds(plain[seq, dim], way)}"
    return f"{facts['dtype']}, d {dim}, context {seq}, {way}: {ours} {times}"


def scale(rows: list[Row]) -> str | None:
    """The exponents of time against size."""
    made = {row["name"]: row for row in of(rows, "scale") if row.get("exponent") is not None}
    return ", ".join(f"{name}^{row['exponent']:.2f}" for name, row in made.items()) or None


def lecture(rows: list[Row]) -> str | None:
    """The last of the lecture's products and of its MLPs, and our kernels."""
    found = {row["description"].partition("(")[0]: row for row in of(rows, "lecture6")}
    shown = [found[name] for name in ("matmul", "run_mlp", "triton_gelu", "triton_softmax") if name in found]
    return ", ".join(f"`{row['description']}` {units.seconds(row['seconds']['median'])}" for row in shown) or None


# A step of xl as the assignment has it: with nothing of the model changed by flags.
STEP: Row = dict.fromkeys((*SHAPE, "autocast")) | {"size": "xl", "context": 2048, "batch": 4, "mode": "step"}
STEP |= {"precision": "float32", "compile": False}


def memory(rows: list[Row], **facts: Any) -> str | None:
    """The measured peak of a step of xl at context 2048."""
    found = [row for row in of(rows, "memory", **STEP | {"checkpoint": 0} | facts) if row.get("measured_bytes")]
    return f"; measured peak of a step {gib(found[-1]['measured_bytes'])}" if found else None


def checkpoint(rows: list[Row]) -> str | None:
    """The measured peak and time of each way that the predictions name."""
    found = {row["way"]: row for row in of(rows, "checkpoint", **STEP)}
    names = {"keep everything": "all kept", "1 a checkpoint": "a checkpoint a layer", "cheap results again": "cheap"}
    said = [
        f"{name} {gib(found[way]['measured_bytes'])} and {units.seconds(found[way]['seconds'])}"
        for way, name in names.items()
        if way in found and found[way].get("measured_bytes")
    ]
    return f"; measured: {', '.join(said)}" if said else None


def seconds_of(rows: list[Row], verb: str, **facts: Any) -> float | None:
    """The newest median of a verb's rows that have these facts."""
    found = [row["seconds"]["median"] for row in of(rows, verb, **facts) if row.get("seconds")]
    return found[-1] if found else None


def timed(times: dict[str, float | None]) -> str | None:
    """Names with their times, without those that are not recorded; None if the first is not."""
    there = [f"{name} {units.seconds(s)}".strip() for name, s in times.items() if s is not None]
    return ", ".join(there) if there and next(iter(times.values())) is not None else None


def models(rows: list[Row], direction: str, *impls: str) -> str | None:
    """Times of xl in bfloat16 by implementation: ours, plain, compiled."""
    facts = {"part": "bench", "case": "xl 4 x 512", "dtype": "bfloat16", "direction": direction}
    return timed({impl: seconds_of(rows, "survey", impl=impl, **facts) for impl in impls})


def whole_models(rows: list[Row]) -> str | None:
    """Forward, backward and step of xl, ours and plain."""
    names = {"forward": "forward", "forward and backward": "backward", "step": "step"}
    said = [f"{name}: {found}" for name, way in names.items() if (found := models(rows, way, "ours", "plain"))]
    return f"xl, bfloat16: {'; '.join(said)}" if said else None


def compiled_models(rows: list[Row]) -> str | None:
    """The longest part of a step of xl that was timed compiled too."""
    for way in ("step", "backward", "forward"):
        if found := models(rows, way, "compiled", "plain", "ours"):
            return f"xl, bfloat16, {way}: {found}"
    return None


def kinds(rows: list[Row]) -> str | None:
    """Shares of training's time by kind of work, in plain PyTorch."""
    found = of(rows, "profile", size="medium", context=512, impl="naive", precision="float32", device="cuda")
    if not found:
        return None
    us = {kind: sum(times.values()) - times["inference"] for kind, times in found[-1]["kinds"].items()}
    whole = sum(us.values())
    largest = sorted(us, key=us.__getitem__, reverse=True)[:4]
    shares = ", ".join(f"{kind} {units.percent(us[kind] / whole)}" for kind in largest)
    halves = found[-1]["attention"]
    times, work = (halves["softmax"][what] / halves["products"][what] for what in ("us", "flops"))
    return (
        f"medium, float32: {shares} of training; softmax takes {times:.1f} times as long as attention's products, "
        f"with {units.percent(work)} of their operations"
    )


def autocast(rows: list[Row]) -> str | None:
    """A step under autocast of each size."""
    facts = {"mode": "step", "autocast": "bfloat16", "context": 512, "impl": "ridgeline"}
    found = {size: seconds_of(rows, "bench", size=size, **facts) for size in ("small", "medium")}
    said = timed(found)
    return f"step: {said}" if said else None


def board(rows: list[Row]) -> str | None:
    """The leaderboard's step, with its interval, its floor and its peak."""
    found = of(rows, "leaderboard", board="step", size="leaderboard", impl="ridgeline")
    if not found:
        return None
    row = found[-1]
    floor, peak = sum(row["floor_seconds"].values()), row["peak_memory_bytes"] / 1e9
    times = f"{units.seconds(row['seconds']['median'])} {units.spread(row['seconds'])}"
    return f"{times}, floor {units.seconds(floor)}, peak {peak:.1f} GB"


def attention_board(rows: list[Row]) -> str | None:
    """Attention alone: ours, PyTorch's own, and the floor."""
    found = of(rows, "leaderboard", board="attention")
    if not found:
        return None
    ours, own = (units.seconds(found[-1]["seconds"][impl]["median"]) for impl in ("ridgeline", "torch"))
    return f"{ours}; PyTorch's own {own}, floor {units.seconds(found[-1]['floor_seconds'])}"


def peaks(rows: list[Row]) -> str | None:
    """The measured peaks of the assignment's table for xl, and how far off the predictions are."""
    facts = {"size": "xl", "batch": 4, "impl": "ridgeline", "heads": None, "checkpoint": 0}
    found = {
        (row["context"], row["mode"], row["precision"]): row
        for row in of(rows, "memory", **facts)
        if row.get("measured_bytes")
    }
    said = []
    for context in (128, 2048):
        for mode in ("forward", "step"):
            both = [found.get((context, mode, precision)) for precision in ("float32", "bfloat16")]
            if all(both):
                said.append(f"{context} {mode} {' and '.join(gib(row['measured_bytes']) for row in both if row)}")
    if not said:
        return None
    worst = max(abs(row["peak_bytes"] / row["measured_bytes"] - 1) for row in found.values())
    return f"xl in float32 and bfloat16: {', '.join(said)}; predicted within {worst:.1%}"


def weighted_sum(rows: list[Row]) -> str | None:
    """The kernel of the assignment's example against PyTorch's formula."""
    facts: Row = {"op": "weighted_sum", "case": "16384x4096", "dtype": "float32"}
    said = []
    for way in ("forward", "backward"):
        times = {name: seconds_of(rows, "op", impl=impl, direction=way, **facts)
                 for name, impl in (("", "triton"), ("PyTorch's", "torch"))}  # fmt: skip
        if found := timed(times):
            said.append(f"{way} {found}")
    return f"16384 x 4096, float32: {'; '.join(said)}" if said else None


def flash(rows: list[Row], way: str) -> str | None:
    """The Triton kernels against the plain formula, at the longest point that both reach."""
    return against(rows, "triton", way, batch=1, dtype="bfloat16")


# What finds an answer, and what stands where there is none.
ANSWERS: dict[str, tuple[Callable[[list[Row]], str | None], str]] = {
    "warm-up": (warm_up, units.DASH),
    "attention": (plain_attention, units.DASH),
    "compiled": (lambda rows: against(rows, "compiled", "forward", batch=8, dtype="float32"), units.DASH),
    "flash": (lambda rows: flash(rows, "both"), units.DASH),
    "flash-forward": (lambda rows: flash(rows, "forward"), units.DASH),
    "flash-backward": (lambda rows: flash(rows, "backward"), units.DASH),
    "weighted-sum": (weighted_sum, units.DASH),
    "models": (whole_models, units.DASH),
    "compiled-models": (compiled_models, units.DASH),
    # measured before rows of these were kept
    "profile": (kinds, "medium, float32: products 67% of training, attention 19%, optimizer 5.7%, norms 3.2%"),
    "autocast": (autocast, "step: small 29.6 ms, medium 43.5 ms"),
    "leaderboard": (board, "8.74 s ± 1.6%, peak 137.8 GB"),
    "attention-board": (attention_board, "3.20 ms; PyTorch's own 4.26, floor 2.92"),
    "peaks": (peaks, "xl, context 512, bfloat16 step: 25.8 GiB, predicted 25.6; plain 35.2, predicted 35.0"),
    "scale": (scale, units.DASH),
    "lecture": (lecture, units.DASH),
    "memory": (lambda rows: memory(rows, heads=None, impl="ridgeline"), ""),
    "residuals": (lambda rows: memory(rows, heads=16, impl="ridgeline"), ""),
    "checkpoint": (checkpoint, ""),
}
