"""The README's figures: three headlines, and ten ops in a table and a chart, all taken from recorded rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from ridgeline.lab import units
from ridgeline.lab.measurement.model import table as model_table
from ridgeline.lab.measurement.results import Work
from ridgeline.lab.presentation.served import PEERS, Comparison, Row, comparisons, largest, serving
from ridgeline.op import Op, RidgelineError

TEN = (
    "attention",
    "cross_entropy",
    "linear_cross_entropy",
    "rms_norm",
    "layer_norm",
    "softmax",
    "rope",
    "gated_linear",
    "fp8_matmul",
    "adamw",
)
LOSS, STEP = "8192x128256", "8192x4096x128256"  # the benchmarks of the losses that the headlines quote
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}


def ten(found: dict[Work, list[Row]], ops: dict[str, Op]) -> list[Comparison]:
    """The largest case of each of ten well-known ops, in a fixed order, forward before backward."""
    named = {name: ops[name] for name in TEN if name in ops}
    compared = comparisons(largest(found, named), named)
    return sorted(compared, key=lambda c: (TEN.index(c.op), c.direction != "forward"))


def table(compared: list[Comparison], page: str) -> str:
    """A Markdown table with one line per op. page: the page of all cases, which the cases link to."""
    lines = [
        "| op | case | forward | share | speed-up over fastest peer | backward | share | speed-up over fastest peer |",
        "|---|---|--:|--:|---|--:|--:|---|",
    ]
    for op, case, dtype in dict.fromkeys((c.op, c.case, c.dtype) for c in compared):
        directions = {c.direction: c for c in compared if (c.op, c.case, c.dtype) == (op, case, dtype)}
        cells = [f"[`{op}`](docs/ops.md#{op})", f"[{case}, {SHORT.get(dtype, dtype)}]({page}#{op})"]
        if "both" in directions:
            cells += [*_figures(directions["both"]), "included", "", ""]
        else:
            cells += [*_figures(directions.get("forward")), *_figures(directions.get("backward"))]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [note for note in map(_unlike, compared) if note]
    if any(c.op == "attention" for c in compared):
        notes.insert(0, "The case of `attention` is batch x query heads / key heads x tokens x head dimension.")
    return "\n".join(lines) + "\n" + (f"\n{' '.join(notes)}\n" if notes else "")


def _unlike(compared: Comparison) -> str:
    """A sentence where the fastest peer promises less than the default does: gradients that may differ in each run."""
    if compared.direction != "backward" or compared.peer is None:
        return ""
    for row in compared.rungs:
        if row["impl"] == f"{compared.peer['impl']}_deterministic":
            return (
                f"The backward pass of `{compared.op}` is bitwise reproducible by default. {compared.against}'s is "
                f"not; with its deterministic option it takes {units.seconds(row['seconds']['median'])}."
            )
    return ""


def _figures(compared: Comparison | None) -> list[str]:
    if compared is None:
        return ["", "", ""]
    ratio = compared.speedup
    against = f"**{units.times(ratio)}** {compared.against}" if ratio else ""
    return [units.seconds(compared.ours["seconds"]["median"]), f"{compared.ours['share']:.2f}", against]


def headline(
    found: dict[Work, list[Row]], ops: dict[str, Op], gpu: str, models: Sequence[Row] = (), where: str = ""
) -> str:
    """Three Markdown bullets, each a figure with its condition: attention, the loss, and the loss's memory.

    models: rows of whole training steps; if they hold one with a peer, a fourth bullet comes first. where: said of its
    speed, if it ran on another GPU.
    Raises RidgelineError if a figure's rows are missing.
    """
    step = model_table.headline([*models], where)
    lines = [*([step] if step else []), _attention(found, ops), _loss(found, ops), _memory(found, ops)]
    unless = " unless another GPU is named" if where else ""
    return f"Measured in bfloat16 on one {gpu}{unless}:\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def points(op: Op, deterministic: bool) -> list[str]:
    """The cases of the grid that attention kernels are compared on, by name.

    16k tokens in a batch, heads of 64 or 128 dimensions that make 2048 together, full and causal.
    """
    names = []
    for case in op.cases:
        q, k = case.args[0].shape, case.args[1].shape
        plain = set(case.kwargs) <= {"causal", "deterministic"} and case.kwargs.get("deterministic") is deterministic
        square = q == k and q[0] * q[2] == 16384 and q[1] * q[3] == 2048 and q[3] in (64, 128)
        if case.use == "bench" and plain and square:
            names.append(case.name)
    return names


def _attention(found: dict[Work, list[Row]], ops: dict[str, Op]) -> str:
    def ratios(direction: str, deterministic: bool) -> list[Comparison]:
        some = {}
        for name in points(ops["attention"], deterministic):
            rungs = found.get(("attention", name, "bfloat16", direction), [])
            if deterministic:  # a peer that is not reproducible does another job
                rungs = [row for row in rungs if not row["peer"] or row["impl"].endswith("_deterministic")]
            some["attention", name, "bfloat16", direction] = rungs
        compared = [c for c in comparisons({work: r for work, r in some.items() if r}, ops) if c.peer]
        if not compared:
            raise _missing("attention", direction)
        return compared

    def mean(some: list[Comparison]) -> str:
        return units.times(geometric_mean(c.speedup or 1 for c in some))

    def least(some: list[Comparison]) -> str:
        return units.times(min(c.speedup or 1 for c in some))

    forward, backward, fixed = ratios("forward", False), ratios("backward", False), ratios("backward", True)
    timed = {row["impl"] for c in forward + backward for row in found[c.op, c.case, c.dtype, c.direction]}
    names = [PEERS[name] for name in ("sdpa_fa2", "fa4", "sdpa_cudnn") if name in timed]
    shapes = f"{len(forward)} shapes each"
    if len(forward) != len(backward):
        shapes = f"{len(forward)} and {len(backward)} shapes"
    return (
        f"**Attention is {mean(forward)} as fast as the fastest other library forward and {mean(backward)} backward**: "
        f"geometric means over {shapes} (head dimension 64 and 128, full and causal, 1k to 16k tokens; "
        f"least {least(forward)} and {least(backward)}) against {_listed(names)}. "
        f"Backward ran with `deterministic=False`, as in the others. In its reproducible default mode it is "
        f"{mean(fixed)} as fast as FlashAttention 4's deterministic mode."
    )


def _loss(found: dict[Work, list[Row]], ops: dict[str, Op]) -> str:
    gains = {}
    for (op, case, dtype, direction), rungs in found.items():
        if (op, dtype, direction) == ("cross_entropy", "bfloat16", "both"):
            ours, compiled = _pair(rungs, ops["cross_entropy"], "compile")
            gains[case] = _ratio(ours, compiled)
    if LOSS not in gains:
        raise _missing("cross_entropy", "both")
    rungs = found["cross_entropy", LOSS, "bfloat16", "both"]
    ours, compiled = _pair(rungs, ops["cross_entropy"], "compile")
    (compared,) = comparisons({("cross_entropy", LOSS, "bfloat16", "both"): rungs}, ops)
    peer = f" The fastest other library, {compared.against}, takes {_time(compared.peer)}." if compared.peer else ""
    memory = _part(ours, compiled)
    return (
        f"**Cross-entropy is {units.times(gains[LOSS])} as fast as torch.compile, in {memory} the memory**: "
        f"forward and backward of 8192 tokens and 128256 classes take {_time(ours)} instead of {_time(compiled)}; "
        f"{units.times(min(gains.values()))} to {units.times(max(gains.values()))} over {len(gains)} sizes.{peer}"
    )


def _memory(found: dict[Work, list[Row]], ops: dict[str, Op]) -> str:
    rungs = found.get(("linear_cross_entropy", STEP, "bfloat16", "both"), [])
    if not rungs:
        raise _missing("linear_cross_entropy", "both")
    ours, compiled = _pair(rungs, ops["linear_cross_entropy"], "compile")
    return (
        f"**The last layer and its loss need {units.size(ours['peak_bytes'])} instead of "
        f"{units.size(compiled['peak_bytes'])}, at {units.times(_ratio(ours, compiled))} the speed of torch.compile**: "
        f"`linear_cross_entropy`, forward and backward of 8192 tokens, 4096 features and 128256 classes "
        f"in {_time(ours)} instead of {_time(compiled)}. Memory is the peak beyond the inputs."
    )


def _pair(rungs: list[Row], op: Op, peer: str) -> tuple[Row, Row]:
    """The default implementation's row and that peer's."""
    ours, other = serving(op, rungs), next((row for row in rungs if row["impl"] == peer), None)
    if ours is None or other is None:
        raise _missing(op.name, rungs[0]["direction"])
    return ours, other


def _ratio(ours: Row, theirs: Row) -> float:
    return theirs["seconds"]["median"] / ours["seconds"]["median"]


def _time(row: Row) -> str:
    return units.seconds(row["seconds"]["median"])


def _part(ours: Row, theirs: Row) -> str:
    """A part of the other's memory, in words or as a percentage: "half", "40% of"."""
    share = ours["peak_bytes"] / theirs["peak_bytes"]
    return "half" if abs(share - 0.5) < 0.005 else f"{units.percent(share)} of"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)


def _missing(op: str, direction: str) -> RidgelineError:
    return RidgelineError(
        f"the README's headline needs {op} ({direction}) beside its peers; "
        f"record it with: ridgeline bench --record --peers {op}"
    )
