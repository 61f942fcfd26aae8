"""Measure the card's own numbers: latency, bandwidth, conflicts, instructions, atomics, launches.

`command` measures or finds a record, `tables` and `pictures` show it, in a terminal and in the report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PARTS = "latency, chase, bandwidth, banks, coalescing, occupancy, instructions, matrix, atomics, launches and streams"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these parts (default: all): {PARTS}")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print the record as JSON, or write it to a file"
    )
    parser.add_argument(
        "--record", action="store_true", help="keep the record in results/micro/, in place of older parts"
    )
    parser.add_argument(
        "--device", metavar="CARD", help="measure nothing: show the recorded run of a card, such as h200"
    )
    parser.add_argument("--run", type=Path, metavar="FILE", help="measure nothing: show a record that --json wrote")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the pictures there, as SVG and PNG")
    parser.add_argument(
        "--commit", metavar="SHA", help="the commit of a source tree without git; the run is marked `dirty`"
    )


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.presentation.micro.command import run

    return run(options)
