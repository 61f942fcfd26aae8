"""Other people's kernels, timed beside ours with `--peers`: one module per package.

A module has `PACKAGE` (what Python imports), `INSTALL` (what pip installs), `KIND` (as of implementations) and
`PEERS`: {op: function of the op's public arguments}, which imports the package when it is called; or of several functions by the
names of what they are, as a package, PyTorch itself among them, may have more than one kernel for an op.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridgeline.op import Implementation, Op


class Peer(Implementation):
    """Another package's function for an op; it stands beside the ladder, not in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.call
        return self.call(*args, **kwargs)


def of(op: Op) -> list[tuple[Peer, str | None]]:
    """Every known peer of an op, with the reason why it cannot be asked (its package is missing), or None."""
    found: list[tuple[Peer, str | None]] = []
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = import_module(f"{__name__}.{path.stem}")
        if op.name in module.PEERS:
            missing = f"the package {module.PACKAGE} is not installed (pip install {module.INSTALL})"
            functions = module.PEERS[op.name]
            for name, function in (functions if isinstance(functions, dict) else {path.stem: functions}).items():
                peer = Peer(op, name, f"{name}'s own kernel", module.KIND, function)
                found.append((peer, None if _installed(module.PACKAGE) else missing))
    return found


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that is missing there are no modules to look for
        return False
