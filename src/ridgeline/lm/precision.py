"""Number formats in training: what sums lose, which dtype autocast gives each part, ranges and roundings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ridgeline.lm import curves, lab
from ridgeline.op import RidgelineError


class Format(NamedTuple):
    """A floating-point format: bits of exponent and fraction, the largest number and the smallest normal one."""

    exponent: int
    fraction: int
    largest: float
    normal: float
    rounded: Callable[[torch.Tensor], torch.Tensor]  # float32 to the nearest number of this format, in float32

    @property
    def least(self) -> float:
        """The smallest number above 0."""
        return self.normal * 2.0**-self.fraction

    @property
    def spacing(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.fraction


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Returns float32 rounded to ten bits of fraction, to the nearest and ties to even."""
    bits = x.view(torch.int32)
    kept = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), kept.view(torch.float32), x)


def _format(dtype: torch.dtype, exponent: int, fraction: int) -> Format:
    info = torch.finfo(dtype)
    return Format(exponent, fraction, info.max, info.smallest_normal, lambda x: x.to(dtype).float())


FORMATS = {
    "float32": _format(torch.float32, 8, 23),
    "tf32": Format(8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126, tf32),
    "bfloat16": _format(torch.bfloat16, 8, 7),
    "float16": _format(torch.float16, 5, 10),
    "e4m3": _format(torch.float8_e4m3fn, 4, 3),
    "e5m2": _format(torch.float8_e5m2, 5, 2),
}
SHOWN = (0.1, 1 / 3, 1.001, 300.7, 70_000.0, 1e-6)  # rounded to each format in the table


def accumulated() -> list[dict[str, Any]]:
    """Returns the assignment's four sums of 0.01, a thousand times."""
    wide, half = torch.float32, torch.float16
    found = []
    for name, total, term, raised in (
        ("float32 += float32", wide, wide, False),
        ("float16 += float16", half, half, False),
        ("float32 += float16", wide, half, False),
        ("float32 += float32(float16)", wide, half, True),
    ):
        s = torch.tensor(0, dtype=total)
        for _ in range(1000):
            x = torch.tensor(0.01, dtype=term)
            s += x.type(wide) if raised else x
        found.append({"sum": name, "value": s.item(), "error": s.item() - 10})
    return found


class ToyModel(nn.Module):
    """The assignment's model: two linear layers around ReLU and LayerNorm. Its dtypes are noted in `seen`."""

    def __init__(self, inputs: int = 20, outputs: int = 5) -> None:
        super().__init__()
        self.fc1, self.ln = nn.Linear(inputs, 10, bias=False), nn.LayerNorm(10)
        self.fc2, self.relu = nn.Linear(10, outputs, bias=False), nn.ReLU()
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.note("fc1's output", self.fc1(x))
        x = self.note("relu's output", self.relu(x))
        x = self.note("ln's output", self.ln(x))
        return self.note("logits", self.fc2(x))

    def note(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.seen[name] = x.dtype
        return x


def autocast_dtypes(dtype: torch.dtype, device: str) -> dict[str, str]:
    """Returns the dtype of each part of `ToyModel` under autocast. device: "cuda" or "cpu", whose rules differ."""
    torch.manual_seed(0)
    model = ToyModel().to(device)
    x, target = torch.randn(4, 20, device=device), torch.arange(4, device=device)
    with torch.autocast(device, dtype):
        model.seen["parameters"] = model.fc1.weight.dtype
        loss = model.note("loss", nn.functional.cross_entropy(model(x), target))
    loss.backward()
    assert model.fc1.weight.grad is not None
    model.seen["gradients"] = model.fc1.weight.grad.dtype
    order = ("parameters", "fc1's output", "relu's output", "ln's output", "logits", "loss", "gradients")
    return {name: str(model.seen[name])[6:] for name in order}


def table() -> list[dict[str, Any]]:
    """Returns each format's range, spacing at 1 and the roundings of SHOWN."""
    given = torch.tensor(SHOWN)
    return [
        {
            "format": name, "exponent": f.exponent, "fraction": f.fraction, "largest": f.largest, "normal": f.normal,
            "least": f.least, "spacing": f.spacing, "rounded": f.rounded(given).tolist(),
        }
        for name, f in FORMATS.items()
    ]  # fmt: skip


def picture() -> str:
    """Returns the formats' ranges as SVG: normal numbers dark, subnormal ones light, over powers of ten."""
    low, high = -46.0, 40.0

    def at(value: float) -> float:
        return 110 + (math.log10(value) - low) / (high - low) * 660

    parts = [curves.STYLE, '<text x="20" y="24" font-weight="600">Range and spacing of number formats</text>']
    for power in range(-40, 41, 10):
        x = at(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="330"/>')
        parts.append(f'<text x="{x:.1f}" y="348" text-anchor="middle">1e{power}</text>')
    for n, (name, f) in enumerate(FORMATS.items()):
        y, colour = 50 + 46 * n, curves.COLOURS[n]
        for start, end, opacity in ((f.least, f.normal, 0.35), (f.normal, f.largest, 0.9)):
            parts.append(f'<rect x="{at(start):.1f}" y="{y}" width="{at(end) - at(start):.1f}" height="18" '
                         f'fill="{colour}" fill-opacity="{opacity}"/>')  # fmt: skip
        said = f"up to {f.largest:.4g}, from {f.normal:.3g} ({f.least:.3g}), spacing {f.spacing:.3g} at 1"
        parts.append(f'<text x="20" y="{y + 14}">{escape(name)}</text><text x="112" y="{y + 33}">{said}</text>')
    return curves.picture(parts, 360)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), help="whose autocast; the GPU's if there is one")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="write the ranges as a picture")
    lab.record_flag(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Prints the sums, the dtypes under autocast and the table of formats."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("lm: --device cuda needs a GPU, and PyTorch sees none")
    if options.picture and not options.picture.parent.is_dir():
        raise RidgelineError(f"lm: --picture {options.picture} is in a folder that does not exist")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lab.recordable(options.record)
    sums, formats = accumulated(), table()
    cast = {str(d)[6:]: autocast_dtypes(d, device) for d in (torch.float16, torch.bfloat16)}
    if options.picture:
        options.picture.write_text(picture())
    row = {"sums": sums, "device": device, "autocast": cast, "formats": formats}
    if options.record:
        lab.record(options.record, [row], "precision")
    if options.json:
        print(json.dumps(row))
        return 0
    added = [(row["sum"], f"{row['value']:.6f}", f"{row['error']:+.6f}") for row in sums]
    lab.print_table("0.01 added a thousand times; the sum is 10", ["sum"], ["value", "error"], added)
    parts = [(part, cast["float16"][part], cast["bfloat16"][part]) for part in cast["float16"]]
    lab.print_table(f"dtypes under autocast on {device}", ["part", "float16", "bfloat16"], [], parts)
    if device == "cpu":
        print("On a GPU autocast runs LayerNorm in float32, so that ln's output is float32 there.\n")
    facts = [
        (
            row["format"],
            f"{row['exponent']}+{row['fraction']}",
            *[f"{row[fact]:.3g}" for fact in ("largest", "normal", "least")],
            f"{row['spacing']:.2g}",
        )
        for row in formats
    ]
    lab.print_table("formats", ["format"], ["bits", "largest", "normal", "least", "spacing"], facts)
    rounded = [(row["format"], *[f"{x:.5g}" for x in row["rounded"]]) for row in formats]
    lab.print_table("numbers rounded to each", ["format"], [f"{x:.4g}" for x in SHOWN], rounded)
    return 0
