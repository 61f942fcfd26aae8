"""Writes the sources of the site into build/site: python -m ridgeline.lab.presentation.site [--ops OP ...]."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ridgeline.lab.measurement import store
from ridgeline.lab.presentation.site import checked, pages

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m ridgeline.lab.presentation.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=store.HOUSE / "build/site", help="the folder (default: build/site)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: at most 2)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="time for kernels and for checks without recorded figures"
    )
    options = parser.parse_args()
    process = checked.start(store.HOUSE, options.seconds)
    pages.write(store.HOUSE, options.out, options.jobs, options.seconds, lambda: checked.collect(process))
    print(f"wrote the site's sources into {options.out}")
    sys.exit(0)
