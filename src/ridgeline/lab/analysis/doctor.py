"""Describe this machine: hardware, software, what can run, measured bandwidth and FLOP/s."""

from __future__ import annotations

import argparse
import json
from typing import Any

import ridgeline.device as devices
from ridgeline.lab.analysis.cards import STATES, kernels, names, pretended, state
from ridgeline.lab.analysis.catalogue import explain
from ridgeline.lab.measurement.limits import SEGMENTS
from ridgeline.lab.measurement.machine import default_device, facts

Row = dict[str, Any]
KINDS = {"eager": "plain PyTorch", "compile": "torch.compile", "cuda": "CUDA C++", "triton": "Triton", "gluon": "Gluon"}


def what_runs(device: str) -> dict[str, str | None]:
    """Per kind of implementation: None if it runs on a device, else the reason why not.

    device: "cpu", "cuda", or the name of a known card or architecture.
    """
    from ridgeline.select import cannot_run

    target = _target(device)
    reasons = {kind: cannot_run(kind, target) for kind in KINDS}
    for kind, (can, count) in (kernels(target) if target.backend != "cpu" else {}).items():
        if not can:
            reasons[kind] = reasons[kind] or f"none of the {count} implementations runs on {target.arch}"
    return reasons


def _target(device: str) -> devices.Device:
    if device == "cpu":
        return devices.CPU
    return devices.here() if device.startswith("cuda") else devices.known(device)


def arguments(parser: argparse.ArgumentParser) -> None:
    card = f"or a card or architecture that need not be here: {names()}"
    parser.add_argument("--device", help=f"cpu or cuda (default: the GPU if there is one), {card}")
    parser.add_argument(
        "--topology",
        action="store_true",
        help="say what nvidia-smi tells of clocks, power, ECC, PCIe, NVLink and NUMA, and what utilisation means",
    )
    parser.add_argument("--quick", action="store_true", help="measure bandwidth and FLOP/s in a third of the time")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ridgeline.lab.measurement.roof import measure_roof

    if options.topology:
        return _topology(options)
    if known := pretended(options.device):
        about = card(known)
        print(json.dumps(about)) if options.json else show_card(about)
        return 0
    device = default_device(options.device)
    machine, runs = facts(device), what_runs(device)
    with Console(stderr=True).status("") as status:
        roof = measure_roof(device, options.quick, lambda text: status.update(f"measuring: {text}"))
    if options.json:
        print(json.dumps({"machine": machine, "runs": runs, "roof": roof}))
    else:
        show(machine, runs, roof)
    return 0


def _topology(options: argparse.Namespace) -> int:
    """Prints what nvidia-smi tells, and what its utilisation says of three loads where PyTorch has a GPU."""
    import torch

    from ridgeline.lab.analysis import topology, utilisation
    from ridgeline.op import RidgelineError

    if options.device not in (None, "cuda"):
        raise RidgelineError(f"--topology is about this machine's GPUs, and --device names {options.device!r}")
    found = topology.everything() | {"utilisation": utilisation.shown() if torch.cuda.is_available() else []}
    print(json.dumps(found)) if options.json else show_topology(found)
    return 0


def show_topology(found: Row) -> None:
    """Prints the sentences, then the table of loads."""
    from rich.table import Table
    from rich.text import Text

    from ridgeline.lab import units
    from ridgeline.lab.tables import console, figure, print_table

    out = console()
    grid = Table.grid(padding=(0, 2))
    names = {f"GPU{gpu['index']}": f"GPU{gpu['index']} {gpu['name']}" for gpu in found["gpus"]}
    before = None
    for line in found["said"]:
        name = names.get(line["about"], line["about"]) if line["about"] != before else ""
        before = line["about"]
        grid.add_row(Text(name, style="dim"), Text(line["text"], style="yellow" if line["amiss"] else ""))
    out.print(grid)
    for gpu in found["gpus"]:
        if gpu.get("utilization.gpu") is not None:
            share = gpu["utilization.gpu"]
            out.print(f"GPU{gpu['index']}: any kernel ran in {share}% of the last sample's time.", markup=False)
    rows = []
    for row in found["utilisation"]:
        rate = units.scaled(row["rate"], row["unit"]) if row["rate"] else units.DASH
        shares = [figure(row.get(name), units.percent) for name in ("working", "occupancy")]
        rows.append((row["load"], f"{row['utilization.gpu'] or units.DASH}%", *shares, rate, f"{row['clocks.sm']} MHz"))
    if rows:
        heads = ["utilisation", "multiprocessors at work", "occupancy", "rate", "clock"]
        print_table("Utilisation: the share of time in which any kernel ran, however small", ["load"], heads, rows, out)
        if not any("working" in row for row in found["utilisation"]):
            out.print("Multiprocessors at work and occupancy need Nsight Compute (ncu).", markup=False)


def card(name: str) -> Row:
    """A known card: its facts, how far Ridgeline is tested on it, what runs there, and each op's default."""
    gpu = devices.known(name)
    about = {fact: getattr(gpu, fact) for fact in ("name", "arch", "multiprocessors", "shared_memory", "l2")}
    counts = {kind: {"run": can, "of": count} for kind, (can, count) in kernels(gpu).items()}
    tested = state(gpu)
    return {
        "card": about,
        "state": tested,
        "tested": STATES[str(tested)],
        "runs": what_runs(name),
        "kernels": counts,
        "ops": defaults(name),
    }


def show_card(about: Row) -> None:
    from rich.text import Text

    from ridgeline.lab import units
    from ridgeline.lab.tables import console, print_table

    out, gpu = console(), about["card"]
    facts = {
        "gpu": gpu["name"],
        "arch": gpu["arch"],
        "multiprocessors": str(gpu["multiprocessors"]),
        "shared memory": f"{units.size(gpu['shared_memory'])} per block",
        "L2": units.size(gpu["l2"]),
        "tested": f"{about['state']}: {about['tested']}",
    }
    out.print(_facts(facts))
    out.print()
    notes = {kind: f"{n['run']} of {n['of']} implementations run" for kind, n in about["kernels"].items()}
    out.print(_kinds(about["runs"], notes))
    shown = []
    for row in about["ops"]:
        default = Text(row["impl"]) if row["impl"] else Text("none: name one", style="yellow")
        shown.append((row["op"], default, KINDS.get(row["kind"], ""), f"{row['case']}, {row['dtype']}"))
    print_table("What a call runs if it names no implementation", ["op", "default", "kind", "case"], [], shown, out)


def _facts(found: dict[str, str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, text in found.items():
        grid.add_row(Text(name, style="dim"), Text(text))
    return grid


def _kinds(runs: dict[str, str | None], notes: dict[str, str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for kind, reason in runs.items():
        word = Text(notes.get(kind, "runs"), style="green") if reason is None else Text(reason, style="yellow")
        grid.add_row(KINDS[kind], word)
    return grid


def show(machine: Row, runs: dict[str, str | None], roof: Row) -> None:
    from ridgeline.lab import units
    from ridgeline.lab.tables import console, print_table

    out = console()
    found = {
        name.removesuffix("_bytes"): units.size(value) if name == "memory_bytes" else str(value or units.DASH)
        for name, value in machine.items()
    }
    if machine["gpu"]:
        tested = state(devices.here())
        found["tested"] = f"{tested}: {STATES[tested]}" if tested else f"no: {machine['arch']} is not supported"
    out.print(_facts(found))
    out.print()
    out.print(_kinds(runs, {}))
    shown = [
        (name, units.scaled(roof[name]["median"], "B/s"), units.spread(roof[name]), f"{share:.0%} writes")
        for share, name in SEGMENTS
        if name in roof
    ]
    for dtype, figure in roof["matmul"].items():
        shape = "x".join(map(str, figure["shape"]))
        dtype += f", twice {figure['twice']}" if "twice" in figure else ""
        rate = units.scaled(figure["median"], "FLOP/s")
        shown.append((f"matrix product, {dtype}", rate, units.spread(figure), shape))
    shown.append(("an empty kernel", units.seconds(roof["launch_us"] * 1e-6), "", ""))
    print_table(None, ["roof"], ["measured", "interval", "at"], shown, out)


def defaults(card: str) -> list[Row]:
    """What runs by default on a known card, for each op: its first benchmark, in bfloat16 if that has it, forward.

    impl is None if nothing does: then a call must name an implementation.
    """
    from ridgeline.lab.analysis.inspect import default_case
    from ridgeline.op import registry

    found = []
    for op in registry().values():
        case, dtype = default_case(op, None, None)
        rungs = explain(op, case, dtype, card)["rungs"]
        chosen = next((row for row in rungs if row["serves"]), {"impl": None, "kind": None})
        about = {"op": op.name, "family": op.family, "case": case.name, "dtype": dtype}
        found.append({**about, "impl": chosen["impl"], "kind": chosen["kind"]})
    return found
