"""Every code block of the README, the guide and the pages runs on a CPU, or is listed with the reason why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pages

ALL = pages.everything()


def page_id(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


def writes(page: Path) -> bool:
    """Whether a page's blocks write files of the source tree."""
    return any({"file", "append"} & set(block.marks) for block in pages.blocks(page))


PYTHON = sorted({b.page for b in ALL if b.language == "python" and b.runs and not writes(b.page)})
COMMANDS = [b for b in ALL if b.language != "python" and b.runs and not writes(b.page)]
WRITING = sorted({b.page for b in ALL if writes(b.page)})


def run(command: list[str], folder: Path, source: Path, **environment: str) -> str:
    """Runs a command, with a source tree in front of the path, and returns what it printed."""
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    known = os.environ | {"PYTHONPATH": path, "RIDGELINE_CACHE": str(folder / "cache")} | environment
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_line(line: str, folder: Path, source: Path) -> str:
    """Runs a command line of a page."""
    words = line.split()
    environment = {}
    while "=" in words[0] and words[0].split("=")[0].isupper():
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] == "ridgeline", f"{line}: the tests run only ridgeline's commands; mark the block `not run`"
    return run([sys.executable, "-m", *words], folder, source, **environment)


@pytest.mark.parametrize("page", PYTHON, ids=page_id)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = "\n".join(
        "\n".join([block.marks.get("setup", ""), block.replaced(block.text)])
        for block in pages.blocks(page)
        if block.language == "python" and block.runs
    )
    (tmp_path / "page.py").write_text(f"import torch\ntorch.manual_seed(0)\n{script}")
    run([sys.executable, "page.py"], tmp_path, pages.ROOT / "src")


@pytest.mark.parametrize("block", COMMANDS, ids=lambda b: b.name)
def test_the_commands_of_a_block_run(block: pages.Block, tmp_path: Path) -> None:
    for command in block.commands:
        run_line(block.replaced(command), tmp_path, pages.ROOT / "src")


@pytest.mark.parametrize("page", WRITING, ids=page_id)
def test_a_walk_through_works(page: Path, tmp_path: Path) -> None:
    """In a copy of the source tree, block after block."""
    shutil.copytree(pages.ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for block in pages.blocks(page):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.text)
        elif "append" in block.marks:
            with (tmp_path / block.marks["append"]).open("a") as file:
                file.write(block.text)
        elif block.runs and block.language == "python":
            run([sys.executable, "-c", block.replaced(block.text)], tmp_path, tmp_path / "src")
        elif block.runs:
            for command in block.commands:
                run_line(block.replaced(command), tmp_path, tmp_path / "src")


def test_blocks_that_do_not_run_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    left = [b for b in ALL if b.is_code and not b.runs]
    with capsys.disabled():
        print(f"\n{sum(b.runs for b in ALL)} blocks of code run; {len(left)} do not:")
        for block in left:
            print(f"  {block.name}: {'needs a GPU' if 'gpu' in block.marks else block.marks['not run']}")
    for block in left:
        assert "gpu" in block.marks or block.marks["not run"], f"{block.name} says no reason"
