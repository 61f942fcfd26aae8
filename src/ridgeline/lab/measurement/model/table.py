"""Tables of whole training steps in a terminal, from rows of the type "model"."""

from __future__ import annotations

from typing import Any

from ridgeline.lab import units
from ridgeline.lab.tables import console, figure, print_table, table, timing

Row = dict[str, Any]
PEERS = {"liger": "Liger", "compile": "torch.compile", "eager": "plain transformers"}
LONGEST = 8  # kernels that are listed of a variant


def newest(rows: list[Row]) -> list[Row]:
    """The last "model" row of each model, batch, sequence length and variant."""
    found = {place(row): row for row in rows if row["type"] == "model"}
    return list(found.values())


def place(row: Row) -> tuple[Any, ...]:
    """What a row timed: model, batch, tokens of a sequence, and variant."""
    return row["model"], row["batch"], row["seq"], row["variant"]


def show(rows: list[Row]) -> None:
    """Prints for each model and batch the figures, the time by kind of work, the losses, and what was not timed."""
    out = console()
    works = dict.fromkeys(place(row)[:3] for row in rows)
    for work in works:
        group = [row for row in rows if place(row)[:3] == work]
        timed = [row for row in group if row.get("seconds") and row["status"] == "ok"]
        title = f"{group[0]['title']}, {work[1]} x {work[2]} tokens, bfloat16"
        if timed:
            _figures(out, title, timed)
            _by_kind(out, [row for row in timed if "kinds" in row])
        _losses(out, [row for row in group if row.get("losses")])
        for row in group:
            if row["status"] != "ok" or row.get("undetailed"):
                reason = row["reason"] if row["status"] != "ok" else f"not all figures: {row['undetailed']}"
                status = row["status"] if row["status"] != "ok" else "ok"
                style = "dim" if status in ("unsupported", "skipped", "ok") else "red"
                out.print(f"{row['variant']}: {status}: {reason}", style=style, markup=False, highlight=False)
        for row in timed[:1]:
            _kernels(out, row)


HEADS = ("step", "tokens/s", "95% interval", "of floor", "lasting", "peak", "host")


def cells(row: Row) -> list[str]:
    """A timed row's figures as text, in the order of HEADS."""
    rate = row["tokens_per_second"]
    made = [timing(row["seconds"]), f"{rate['median']:,.0f}", f"{rate['low']:,.0f} to {rate['high']:,.0f}"]
    made += [units.percent(row["share"]), units.percent(row["share_lasting"]), units.size(row["peak_bytes"])]
    return [*made, figure(row.get("host_us"), lambda us: units.seconds(us / 1e6))]


def timed(rows: list[Row]) -> dict[str, list[Row]]:
    """The timed rows of each model, batch and sequence length, fastest first, by a title."""
    found: dict[str, list[Row]] = {}
    for row in newest(rows):
        if row["status"] == "ok" and row.get("seconds"):
            found.setdefault(f"{row['title']}, {row['batch']} x {row['seq']} tokens", []).append(row)
    return {title: sorted(some, key=lambda row: row["seconds"]["median"]) for title, some in found.items()}


def markdown(rows: list[Row]) -> str:
    """Markdown tables of whole training steps, one for each model and batch; empty if none was timed."""
    text = []
    for title, some in timed(rows).items():
        text += [f"### {title}", ""]
        text += [f"| variant | {' | '.join(HEADS)} |", f"|---|{'--:|' * len(HEADS)}"]
        text += [f"| {row['variant']} | {' | '.join(cells(row))} |" for row in some] + [""]
    return "\n".join(text).strip()


def headline(rows: list[Row], where: str = "") -> str | None:
    """A sentence on the first model whose step was timed for Ridgeline and a peer, or None.

    The fastest policy of memory stands for Ridgeline. where: said of the speed, such as " on one H200"."""
    for title, some in timed(rows).items():
        mine = [row for row in some if row["variant"].startswith("ridgeline")]
        ours = min(mine, key=lambda row: row["seconds"]["median"], default=None)
        peers = [(PEERS[row["variant"]], row) for row in some if row["variant"] in PEERS]
        if ours and peers:
            seconds, peak = ours["seconds"]["median"], units.size(ours["peak_bytes"])
            said = [f"{units.times(row['seconds']['median'] / seconds)} as fast as {name}" for name, row in peers]
            rate = f"{ours['tokens_per_second']['median']:,.0f} tokens/s"
            what = f"**A training step of {title} runs at {rate}**{where}: {', '.join(said)}."
            memory = ours["variant"].partition("memory=")[2].rstrip(")").split(",")[0]
            call = f' The model is patched with `hf.patch(model, memory="{memory}")`.' if memory else ""
            return f"{what} That is {units.percent(ours['share'])} of the fastest possible speed, in {peak}.{call}"
    return None


def _milli(seconds: float) -> str:
    return units.digits(seconds * 1e3)


def _figures(out: Any, title: str, rows: list[Row]) -> None:
    from rich.text import Text

    made = table(title, ["variant"], [*HEADS, "1x512"])
    best = min(row["seconds"]["median"] for row in rows)
    for row in rows:
        small = figure(row.get("host_small_us"), lambda us: units.seconds(us / 1e6))
        style = "green" if row["seconds"]["median"] == best else ""
        made.add_row(Text(row["variant"]), *cells(row), small, style=style)
    out.print(made)
    least = rows[0]["floor"]
    out.print(
        f"floor: {units.seconds(least['seconds'])} at the burst rate of matrix products, "
        f"{units.seconds(least['lasting'])} at the lasting one; waiting variants kept their state {rows[0]['between']}",
        style="dim",
        highlight=False,
    )


def _by_kind(out: Any, rows: list[Row]) -> None:
    if not rows:
        return
    kinds = list(rows[0]["kinds"])
    shown = []
    for row in rows:
        cells = [_milli(row["kinds"][kind]) for kind in kinds]
        shown.append((row["variant"], *cells, _milli(sum(row["kinds"].values())), str(row["launches"])))
    least = rows[0]["floor"]
    cells = [_milli(least[kind]) if kind in least else "" for kind in kinds]
    shown.append((f"floor (memory-bound: {_milli(least['memory'])})", *cells, _milli(least["seconds"]), ""))
    print_table("ms of a step by kind of work", ["variant"], [*kinds, "sum", "kernels"], shown, out)


def _losses(out: Any, rows: list[Row]) -> None:
    if not rows:
        return
    rates = sorted({f"{row['learning_rate']:g}" for row in rows if "learning_rate" in row})  # older rows have none
    beside = ", ".join([f"beside {rows[0].get('reference', units.DASH)}", *[f"learning rate {rate}" for rate in rates]])
    title = f"losses of the first steps ({beside})"
    shown = [(row["variant"], *[figure(loss, "{:.4f}".format) for loss in row["losses"]]) for row in rows]
    print_table(title, ["variant"], [str(n) for n in range(1, len(rows[0]["losses"]) + 1)], shown, out)
    for row in rows:
        if row.get("routing"):
            share, steps = units.percent(row["routing"]["elsewhere"]), row["followed"]
            line = f"{row['variant']}: follows the choice of experts of {row['reference']} in {steps} steps"
            out.print(f"{line}; its own differs for {share} of tokens", style="dim", markup=False, highlight=False)


def _kernels(out: Any, row: Row) -> None:
    if not row.get("kernels"):
        return
    shown = [
        (line["name"][:50], line["owner"][:34], line["kind"], str(line["calls"]), _milli(line["seconds"]))
        for line in row["kernels"][:LONGEST]
    ]
    print_table(f"longest kernels of {row['variant']}", ["name", "started by", "kind"], ["calls", "ms"], shown, out)
