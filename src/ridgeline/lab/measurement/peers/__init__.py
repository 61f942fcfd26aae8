"""Peers: kernels of other packages, timed beside ours with `bench --peers`.

There is one module per package. It has `PACKAGE` (the name to import), `INSTALL` (the name for pip), `KIND` (as in
`Implementation`) and `PEERS`: {op: function of the op's public arguments}. The function imports the package when it is
called. In its place may stand {name: function}, since a package, or PyTorch itself, may have several kernels for an op.
`FORWARD_ALONE`, if it is there, names the ops for which the package has no backward.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ridgeline.op import Implementation, Op


class Peer(Implementation):
    """Another package's function for an op. It is timed beside the op's own implementations and never chosen."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.call
        return self.call(*args, **kwargs)


def of(op: Op) -> list[tuple[Peer, str | None]]:
    """Returns every known peer of an op, each with None or the reason why it cannot run (its package is missing)."""
    found: list[tuple[Peer, str | None]] = []
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = import_module(f"{__name__}.{path.stem}")
        if op.name in module.PEERS:
            missing = f"the package {module.PACKAGE} is not installed (pip install {module.INSTALL})"
            functions = module.PEERS[op.name]
            for name, function in (functions if isinstance(functions, dict) else {path.stem: functions}).items():
                alone = op.name in getattr(module, "FORWARD_ALONE", ())
                peer = Peer(op, name, f"{name}'s own kernel", module.KIND, function, differentiable=not alone)
                found.append((peer, None if _installed(module.PACKAGE) else missing))
    return found


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # raised for a submodule of a missing package
        return False
