"""Builds the archives of a release, and tries the installed wheel.

python tests/release.py build FOLDER    the wheel and the source archive, by setuptools
python tests/release.py try README      in the environment to try: the README's example, the commands, a tiny model
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(folder: Path) -> None:
    """Makes both archives, and checks that they hold the package, whole."""
    from setuptools import build_meta

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    wheel = folder / build_meta.build_wheel(str(folder))
    source = folder / build_meta.build_sdist(str(folder))
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [p for p in (ROOT / "src/ridgeline").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    missing = [name for p in files if (name := str(p.relative_to(ROOT / "src"))) not in held]
    assert not missing, f"{wheel.name} lacks {', '.join(missing)}"
    strangers = [name for name in held if not name.startswith("ridgeline") and ".dist-info/" not in name]
    assert not strangers, f"{wheel.name} holds {', '.join(strangers[:3])}"
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [p for p in inside if p.startswith("src/ridgeline/")]
    assert {"pyproject.toml", "README.md", "LICENSE"} <= inside
    assert len(wanted) >= len([name for name in held if name.startswith("ridgeline/")])
    print(f"built {wheel.name} and {source.name}: {len(held)} files in the wheel")


def attempt(readme: Path) -> None:
    """Runs the README's first example, the commands and `hf.patch`, all from the installed package."""
    import ridgeline

    home = Path(ridgeline.__file__)
    assert home.is_relative_to(sys.prefix), f"ridgeline comes from {home}, not from the environment {sys.prefix}"
    sys.path.insert(0, str(ROOT / "tests"))
    import pages

    first, second = [b for b in pages.blocks(readme) if b.language == "python"]
    here: dict[str, object] = {}
    exec(compile(first.replaced(first.text), "README.md", "exec"), here)
    exec(compile(second.marks["setup"] + "\n" + second.text, "README.md", "exec"), here)
    model, torch = here["model"], here["torch"]
    ids = torch.randint(256, (1, 16))  # type: ignore[attr-defined]
    model(input_ids=ids, labels=ids).loss.backward()  # type: ignore[operator]
    ridgeline.hf.unpatch(model)
    command = Path(sys.executable).with_name("ridgeline")
    lines = ["--version", "--help", "list gelu", "explain softmax --device h100", "check mul --dtype float32"]
    lines += ["inspect gelu --impl cuda_packed --arch sm_90", "lm sizes"]
    for line in lines:
        done = subprocess.run([command, *line.split()], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"ridgeline {line}: {done.stderr[-500:]}"
        print(f"ridgeline {line}: ok")
    print(f"ridgeline {ridgeline.__version__} works from {home.parent}")


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    {"build": build, "try": attempt}[verb](Path(path))
