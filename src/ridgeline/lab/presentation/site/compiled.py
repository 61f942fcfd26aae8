"""What the compiler made of each kernel: recorded in results/compiled/, and compiled anew where the source differs.

python -m ridgeline.lab.presentation.site.compiled    compiles what is not current, and writes the file
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis.inspect import of_launch
from ridgeline.lab.measurement import store
from ridgeline.lab.presentation.site.kernels import ARCH, Call, call, digest
from ridgeline.lab.presentation.site.recorded import shown
from ridgeline.op import registry

Row = dict[str, Any]
FIELDS = ("kernel", "threads", "registers", "spill_loads", "spill_stores", "shared", "loads", "stores", "matrix",
          "atomics", "occupancy", "limit")  # fmt: skip


@cache
def recorded(root: Path) -> dict[str, Row]:
    """The recorded figures of a source tree's kernels, by their digests; empty if there are none."""
    path = root / f"results/compiled/{ARCH}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def figures(made: Call, known: dict[str, Row], until: float) -> list[tuple[str, Row | None]]:
    """(direction, figures) of each different kernel of a call.

    known: recorded figures, to which new ones are added. until: the time after which nothing is compiled any more; the
    figures are then None.
    """
    found: dict[tuple[str, str], Row | None] = {}
    for direction, launch in made.launches:
        name = digest(launch)
        if name not in known and time.monotonic() < until:
            row = of_launch(launch, disassemble=True).to_dict()
            known[name] = {"compiler": compiler(row["kind"])} | {field: row[field] for field in FIELDS}
        found[direction, name] = known.get(name)
    return [(direction, row) for (direction, _), row in found.items()]


def compiler(kind: str) -> str:
    """The compiler of a kernel's language, with its version."""
    if kind == "cuda":
        return f"NVRTC {version('nvidia-cuda-nvrtc')}"
    return f"Triton {version('triton')}"


def write(path: Path, known: dict[str, Row]) -> None:
    """Writes figures with a line for each kernel, so that changes of two branches merge."""
    lines = [f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}" for name, row in sorted(known.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Compiles the kernels whose figures are not recorded, and drops those that no longer exist."""
    path = store.HOUSE / f"results/compiled/{ARCH}.json"
    known, kept = recorded(store.HOUSE), dict[str, Row]()
    for op in registry().values():
        case, dtype = shown(op, store.HOUSE)
        for rung in op.implementations.values():
            if rung.is_kernel:
                made = call(op, rung, case, dtype)
                figures(made, known, float("inf"))
                kept |= {name: known[name] for _, launch in made.launches if (name := digest(launch))}
        print(f"{op.name}: {len(kept)} kernels so far", flush=True)
        write(path, known)
    write(path, kept)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
