"""Waves of tiles over multiprocessors, and shapes whose rate falls below that of their neighbours."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median

from ridgeline.lab import units
from ridgeline.lab.analysis.mamf.shapes import Shape

ASSUMED = (128, 256)  # the tile of a kernel whose name holds none
DEEP = 0.05  # a dip is at least so much below its neighbours
NEAR = 0.5  # waves explain a dip if they predict at least so much of it
TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?!\d)")


@dataclass(frozen=True)
class Waves:
    """How tiles fill a GPU. fill: the share of the multiprocessors' turns in which they have a tile."""

    tiles: int
    waves: int
    last: float
    fill: float


@dataclass(frozen=True)
class Dip:
    """A shape below its neighbours. depth: the share of their rate that is missing."""

    shape: Shape
    rate: float
    expected: float
    neighbours: tuple[Shape, ...]

    @property
    def depth(self) -> float:
        return 1 - self.rate / self.expected


def waves(shape: Shape, tile: tuple[int, int], multiprocessors: int) -> Waves:
    """The waves of a product if each tile of the result is one block, and each multiprocessor holds one block.

    tile: columns and rows of the result, as in the names of cuBLAS's kernels, which compute the transposed result.
    """
    m, n, _ = shape
    tiles = ceil(n / tile[0]) * ceil(m / tile[1])
    rounds = ceil(tiles / multiprocessors)
    last = (tiles - (rounds - 1) * multiprocessors) / multiprocessors
    return Waves(tiles, rounds, last, tiles / (rounds * multiprocessors))


def useful(shape: Shape, tile: tuple[int, int], multiprocessors: int) -> float:
    """The share of the multiprocessors' work that belongs to the result: filled waves, and tiles inside the edges."""
    m, n, _ = shape
    found = waves(shape, tile, multiprocessors)
    return found.fill * m * n / (found.tiles * tile[0] * tile[1])


def tile_of(kernel: str | None) -> tuple[int, int] | None:
    """The tile in the name of a kernel of cuBLAS or CUTLASS, or None."""
    found = TILE.search(re.sub(r"tilesize|tile_", " ", kernel or ""))
    return (int(found[1]), int(found[2])) if found else None


def neighbours(shapes: Iterable[Shape]) -> dict[Shape, tuple[Shape, ...]]:
    """The nearest shapes of each below and above in every direction, or along the squares if all are square."""
    given = sorted(shapes)
    lines: dict[tuple[int, ...], list[Shape]] = defaultdict(list)
    square = all(len({*shape}) == 1 for shape in given)
    for shape in given:
        for side in (0,) if square else range(3):
            key = () if square else (side, *shape[:side], *shape[side + 1 :])
            lines[key].append(shape)
    found: dict[Shape, tuple[Shape, ...]] = dict.fromkeys(given, ())
    for line in lines.values():
        for before, after in pairwise(line):
            found[before] += (after,)
            found[after] += (before,)
    return found


def dips(rates: dict[Shape, float], most: int = 5) -> list[Dip]:
    """The shapes furthest below the median of their neighbours, the deepest first; corners are left out."""
    found, beside = [], neighbours(rates)
    for shape, rate in rates.items():
        near = beside[shape]
        if min(near, default=shape) < shape < max(near, default=shape):  # small products are slow, and no dips
            dip = Dip(shape, rate, median(rates[s] for s in near), near)
            if dip.depth >= DEEP:
                found.append(dip)
    return sorted(found, key=lambda dip: -dip.depth)[:most]


def explain(dip: Dip, kernel: str | None, multiprocessors: int, width: int) -> str:
    """Why a shape is slow, in sentences. kernel: the name of what computed it, if known. width: bytes of a number."""
    tile = tile_of(kernel) or ASSUMED
    known = f"tiles of {tile[0]} x {tile[1]}" + ("" if tile_of(kernel) else " (assumed)")
    name = " x ".join(map(str, dip.shape))
    lead = (
        f"{name}: {units.scaled(dip.rate, 'FLOP/s')}, {units.percent(dip.depth)} below its neighbours "
        f"({units.scaled(dip.expected, 'FLOP/s')})."
    )
    odd = [side for side in dip.shape[1:] if side * width % 16]
    if odd:
        return (
            f"{lead} Rows of {odd[0]} numbers of {width} bytes do not begin at multiples of 16 bytes, "
            "so the wide loads of the fast kernels cannot be used."
        )
    own = waves(dip.shape, tile, multiprocessors)
    here = useful(dip.shape, tile, multiprocessors)
    there = median(useful(s, tile, multiprocessors) for s in dip.neighbours)
    many = "one wave" if own.waves == 1 else f"{own.waves} waves"
    said = (
        f"{lead} With {known} the result is {own.tiles} tiles on {multiprocessors} multiprocessors: {many}, the last "
        f"with work for {units.percent(own.last)} of them, so {units.percent(here)} of the machine's turns are of use; "
        f"its neighbours have {units.percent(there)}."
    )
    predicted = 1 - here / there
    if predicted >= NEAR * dip.depth:
        return f"{said} Waves explain {units.percent(min(1.0, predicted / dip.depth))} of the dip."
    return f"{said} Waves do not explain it; perhaps another kernel was chosen here, or the clock fell."
