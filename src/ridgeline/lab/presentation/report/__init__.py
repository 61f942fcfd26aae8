"""Check and time everything on this machine, and write one HTML page.

`command` gathers, `measure` measures in processes (`worker`) within one time `budget`, `view` says what the rows mean,
`page` lays it out.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write index.html there (default: report)")
    parser.add_argument("--minutes", type=float, help="the time to keep to (default: 5.5, with --quick 1.25)")
    parser.add_argument("--quick", action="store_true", help="small cases, short timing and a short time to keep to")
    parser.add_argument("--run", nargs="+", metavar="RUN", help="measure nothing: show these runs, by file or name")


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.presentation.report.command import run

    return run(options)
