"""Where the memory of a training step goes: predicted without running it, and measured."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline import device as devices
from ridgeline.lm import curves, lab
from ridgeline.lm.ledger import Ledger, account, embody
from ridgeline.lm.model import Layer, Transformer
from ridgeline.lm.setup import MODES, PRECISIONS, Setup, build, flags, made, named, shape, tokens_of
from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError

MIB, GIB = 2**20, 2**30


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser, mode="step")
    add = parser.add_argument
    add("--card", metavar="NAME", help="predict for this card, or cpu (the GPU here, else h100)")
    add("--grid", type=lab.wholes, metavar="N,N", help="these contexts instead, forward and step, in both precisions")
    add("--picture", type=Path, metavar="FILE", help="write the timeline by kind: .svg, or .html with the tables")
    add("--snapshot", type=Path, metavar="FILE", help="record allocations on a GPU, for PyTorch's memory viewer")
    lab.record_flag(parser)


@dataclass
class Use:
    """The memory of a step, in bytes. kinds: at the peak. activations: at the peak, by module, over all layers.

    events, curve: the timeline, by kind."""

    peak: int
    kinds: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    events: list[int] = field(default_factory=list)
    curve: dict[str, list[int]] = field(default_factory=dict)


def place(module: str) -> str:
    """Returns a module's name for all layers: "layers.mlp"."""
    return re.sub(r"^model\.|\.\d+", "", module) or "loss"


def cast(options: argparse.Namespace) -> Any:
    return torch.autocast("cpu", PRECISIONS[options.autocast]) if options.autocast else nullcontext()


def optimizer_temporaries(model: nn.Module, impl: str, card: str | None) -> int:
    """Returns the bytes that a step of the optimizer needs beside the moments. Ours needs none; torch's makes a square
    root of the second moment, on a GPU of all parameters at once, on a CPU twice of each."""
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    if impl == "ridgeline":
        return 0
    return sum(sizes) if card else 2 * max(sizes)


def predicted(size: Size, options: argparse.Namespace, card: str | None) -> Use:
    """Predicts the memory of a step of the options' model without running it.

    card: the name of a card, or None for the CPU."""
    mode, dtype = options.mode, PRECISIONS[options.precision]
    with torch.device("meta"):
        model = made(size, options).to(dtype)
    with account(card) as ledger:
        ledger.kind = "weights"
        embody(model)
        ledger.kind = "moments"
        moments = [torch.empty_like(p) for p in model.parameters() for _ in range(2)] if mode == "step" else []
        ledger.kind = "data"
        tokens, target = (torch.zeros(options.batch, options.context, dtype=torch.int64) for _ in range(2))
        ledger.kind = "temporaries"
        ledger.watch(model, set(model.model.layers))
        start = ledger.events
        with torch.set_grad_enabled(mode != "forward"), cast(options):
            loss = model(tokens, target)
        if mode != "forward":
            loss.backward()
            for p in model.parameters():
                record = ledger.of(p.grad) if p.grad is not None else None
                if record is not None:
                    record.kind = "gradients"
            if mode == "step" and (extra := optimizer_temporaries(model, options.impl, card)):
                temporary = torch.empty(extra, dtype=torch.uint8)
                del temporary
        use = summed(ledger, start)
        del moments, loss
    return use


def summed(ledger: Ledger, since: int) -> Use:
    """Returns what a ledger holds from an event on."""
    events, curve = ledger.curve(since)
    totals = [sum(values) for values in zip(*curve.values())]
    top = max(range(len(totals)), key=totals.__getitem__)
    activations: Counter[str] = Counter()
    for record in ledger.live_at(events[top]):
        if record.kind == "activations":
            activations[place(record.module)] += record.nbytes
    kinds = {kind: values[top] for kind, values in curve.items()}
    return Use(totals[top], kinds, dict(activations.most_common()), events, curve)


def saved_by_block(size: Size, options: argparse.Namespace, card: str | None) -> list[dict[str, Any]]:
    """Returns what autograd saves for one layer behind another one, the largest first: bytes, shape, dtype, its maker.

    Each storage counts once, and parameters do not count."""
    dtype = PRECISIONS[options.precision]
    flow = PRECISIONS[options.autocast] if options.autocast else dtype
    with torch.device("meta"):
        layer, rotations = Layer(size, options.impl).to(dtype), Transformer.rotations
        whole = Transformer(size, options.impl)
    found: dict[int, tuple[torch.Tensor, str, str]] = {}
    with account(card) as ledger:
        embody(layer)
        given = (options.batch, options.context, size.width)
        x, stream = (torch.empty(given, dtype=flow, requires_grad=True) for _ in range(2))
        cos, sin = rotations(whole, options.context, torch.device("cpu"))
        own = {t.untyped_storage()._cdata for t in (*layer.parameters(), cos, sin)}
        ledger.watch(layer, {layer})

        def pack(t: torch.Tensor) -> torch.Tensor:
            key, record = t.untyped_storage()._cdata, ledger.of(t)
            if key not in own and key not in found:
                found[key] = t, record.module if record else "", record.op if record else ""
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cast(options):
            out = layer(x, stream, cos, sin)
        rows = [
            {"bytes": t.untyped_storage().nbytes(), "shape": list(t.shape), "dtype": str(t.dtype)[6:],
             "module": module or "the layer", "op": op}
            for t, module, op in found.values()
        ]  # fmt: skip
        del out
    return sorted(rows, key=lambda row: -row["bytes"])


def residual_stream(size: Size, batch: int, context: int, itemsize: int) -> int:
    """Returns the bytes of one tensor of the residual stream."""
    return batch * context * size.width * itemsize


def measured(setup: Setup, mode: str, run: Callable[[], Any] | None = None) -> int:
    """Runs a step after a warm-up, and returns the peak of memory, in bytes, with everything that lived before it.

    run: what to run in place of the step that follows the warm-up.

    On a GPU by PyTorch's allocator; what libraries keep beside our tensors is left out. On a CPU by the profiler."""
    setup.step(mode)
    return peak_of(setup, mode, run)


def peak_of(setup: Setup, mode: str, run: Callable[[], Any] | None = None) -> int:
    """As `measured`, without the warm-up."""
    setup.graphs.pop(mode, None)  # a graph takes its memory when it is made
    run = run or partial(setup.step, mode)
    kept = [*setup.plain.parameters(), setup.tokens, setup.target]
    if mode == "step":
        kept += [t for s in setup.optimizer.state.values() for name, t in s.items() if name.startswith("exp_avg")]
    cuda = setup.tokens.device.type == "cuda"
    resting = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}.values())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before + resting
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results  # the events without their operations
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak + resting


def snapshot(setup: Setup, options: argparse.Namespace) -> None:
    """Writes the allocations of a step, for https://pytorch.org/memory_viz."""
    if setup.tokens.device.type != "cuda":
        raise RidgelineError("lm: --snapshot records PyTorch's allocator on a GPU, and this runs on the CPU")
    setup.step(options.mode)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    setup.step(options.mode)
    torch.cuda.memory._dump_snapshot(str(options.snapshot))
    torch.cuda.memory._record_memory_history(enabled=None)


def card_of(options: argparse.Namespace) -> str | None:
    """Returns the card to predict for, or None for the CPU. Raises RidgelineError if it is unknown."""
    if options.card == "cpu" or (options.card is None and options.device == "cpu"):
        return None
    if options.card is None:
        here = devices.here()
        return "h100" if here.backend == "cpu" else here.arch
    devices.known(options.card)
    return options.card


def gib(nbytes: float) -> str:
    """Returns bytes as text in MiB or GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"


def beside(options: argparse.Namespace, use: Use) -> dict[str, Any]:
    """Returns what is measured beside a prediction, or why nothing is; nothing for a card that is not here."""
    gpu = torch.cuda.is_available() and options.device != "cpu"
    if options.card is not None if gpu else card_of(options) is not None:
        return {}
    if not gpu and use.peak > 4 * GIB:
        return {"measured_bytes": None, "why": "not measured: it is above 4 GiB on a CPU"}
    try:
        return {"measured_bytes": measured(build(options), options.mode)}
    except torch.OutOfMemoryError:
        return {"measured_bytes": None, "why": "not measured: the GPU's memory ran out"}
    finally:
        lab.release(torch.device("cuda" if gpu else "cpu"))


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that the verb prints: the prediction, the measurement if this is its machine, the block."""
    size, card = shape(options), card_of(options)
    use = predicted(size, options, card)
    block = saved_by_block(size, options, card)
    total = sum(row["bytes"] for row in block)
    item = PRECISIONS[options.autocast or options.precision].itemsize
    row: dict[str, Any] = {
        "size": options.size, "mode": options.mode, "context": options.context, "batch": options.batch,
        "card": card or "cpu", "peak_bytes": use.peak, "kinds": use.kinds, "activations": use.activations,
        "stream_bytes": residual_stream(size, options.batch, options.context, item),
        "block_bytes": total, "block": [r | {"share": r["bytes"] / total} for r in block[:5]],
        "block_gradient_bytes": size.per_layer * PRECISIONS[options.precision].itemsize,
    }  # fmt: skip
    return row | beside(options, use) | {"use": use}


def lines(row: dict[str, Any]) -> list[str]:
    """Returns a report as text."""
    found = [f"{row['size']}, {row['mode']}, {row['batch']} x {row['context']} tokens, on {row['card']}"]
    found.append(f"peak, predicted: {gib(row['peak_bytes'])}")
    if row.get("measured_bytes"):
        off = row["peak_bytes"] / row["measured_bytes"] - 1
        found.append(f"peak, measured:  {gib(row['measured_bytes'])} (the prediction is {off:+.1%} off)")
    elif "why" in row:
        found.append(row["why"])
    kinds = [(kind, gib(n), f"{n / row['peak_bytes']:.1%}") for kind, n in row["kinds"].items() if n]
    found.append(lab.table_text(None, ["kind"], ["at the peak", "share"], kinds))
    if row["activations"]:
        largest = [(name, gib(n)) for name, n in list(row["activations"].items())[:8]]
        found.append(lab.table_text("activations at the peak, all layers together", ["module"], ["size"], largest))
    found.append(f"one tensor of the residual stream: {gib(row['stream_bytes'])}")
    found.append(f"one layer saves {gib(row['block_bytes'])} for backward, and its weights' gradients take "
                 f"{gib(row['block_gradient_bytes'])}; its five largest tensors:")  # fmt: skip
    tensors = [
        (r["module"], r["op"], "x".join(map(str, r["shape"])), r["dtype"], gib(r["bytes"]), f"{r['share']:.1%}")
        for r in row["block"]
    ]
    found.append(lab.table_text(None, ["module", "op", "shape", "dtype"], ["size", "share"], tensors))
    return found


def picture(row: dict[str, Any]) -> str:
    """Returns the timeline by kind, as SVG."""
    use: Use = row["use"]
    kinds = {kind: [n / MIB for n in values] for kind, values in use.curve.items() if any(values)}
    title = f"Memory of {row['size']}, {row['mode']}, {row['batch']} x {row['context']} tokens, {row['card']}"
    steps = [float(n) for n in range(len(use.events))]
    return curves.stacked(title, steps, kinds, "allocations and releases", "predicted, live", "MiB")


def grid(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the peaks of the assignment's table, predicted and, on this machine, measured: contexts, forward and step,
    float32 and bfloat16."""
    for context in options.grid:
        for mode in (MODES[0], MODES[-1]):
            for precision in ("float32", "bfloat16"):
                given = argparse.Namespace(**vars(options) | {"context": context, "mode": mode, "precision": precision})
                use = predicted(shape(given), given, card_of(given))
                stream = residual_stream(shape(given), given.batch, context, PRECISIONS[precision].itemsize)
                row = {"context": context, "mode": mode, "precision": precision, "peak_bytes": use.peak,
                       "kinds": use.kinds, "stream_bytes": stream}  # fmt: skip
                yield row | beside(given, use)


def show_grid(options: argparse.Namespace) -> None:
    """Prints the table of a grid, and records each row as it comes."""
    about, rows = named(options) | {"card": card_of(options) or "cpu"}, []
    for row in grid(options):
        rows.append(row)
        if options.record:
            lab.record(options.record, [about | row], "memory")
    if options.json:
        print(json.dumps(rows))
        return
    shown = []
    for row in rows:
        rest = sum(row["kinds"][kind] for kind in ("weights", "moments", "gradients"))
        there = row.get("measured_bytes")
        off = [gib(there), f"{row['peak_bytes'] / there - 1:+.1%}"] if there else ["-", "-"]
        sizes = gib(row["peak_bytes"]), *off, *map(gib, (rest, row["kinds"]["activations"], row["stream_bytes"]))
        shown.append([str(row["context"]), row["mode"], row["precision"], *sizes])
    title = f"{options.size}, batch {options.batch}, peaks on {card_of(options) or 'cpu'}"
    figures = "predicted", "measured", "off", "weights and more", "activations", "residual stream"
    lab.print_table(title, ["context", "mode", "precision"], figures, shown)
    for why in dict.fromkeys(row["why"] for row in rows if "why" in row):
        lab.say(why)


def main(options: argparse.Namespace) -> int:
    """Prints where the memory goes; writes a picture or a snapshot."""
    if options.picture and options.picture.suffix not in (".svg", ".html"):
        raise RidgelineError(f"lm: --picture writes .svg or .html, and got {options.picture}")
    for path in (options.picture, options.snapshot):
        if path and not path.parent.is_dir():
            raise RidgelineError(f"lm: {path} is in a folder that does not exist")
    tokens_of(options)
    lab.above_zero("memory", grid=options.grid or [])
    lab.recordable(options.record)
    if options.snapshot:
        snapshot(build(options), options)
        print(f"{options.snapshot}: open it at https://pytorch.org/memory_viz")
    if options.grid is not None:
        show_grid(options)
        return 0
    row = report(options)
    drawn = picture(row)
    told = {name: value for name, value in row.items() if name != "use"}
    if options.record:
        lab.record(options.record, [named(options) | told], "memory")
    if options.json:
        print(json.dumps(told))
    else:
        print("\n".join(lines(row)))
    if options.picture:
        text = "\n".join(lines(row))
        page = f'<!doctype html><meta charset="utf-8"><title>Memory</title>{drawn}<pre>{escape(text)}</pre>\n'
        options.picture.write_text(drawn if options.picture.suffix == ".svg" else page)
    return 0
