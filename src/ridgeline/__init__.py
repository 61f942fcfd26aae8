"""Fast GPU kernels for language models, as differentiable PyTorch functions, and a lab that measures them.

Functions such as `ridgeline.rms_norm` are loaded at first use: importing ridgeline does not import torch.
So are the modules `ridgeline.nn`, `ridgeline.optim`, `ridgeline.hf`, `ridgeline.formats`, `ridgeline.parallel`,
`ridgeline.lab` and `ridgeline.op`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"


def register_all() -> None:
    """Imports every op, so that `torch.export.load` finds them in a fresh process."""
    import_module("ridgeline.op").registry()


_SUBMODULES = "nn", "optim", "hf", "formats", "parallel", "lab", "op"


_OTHERS = {  # what functions take that is no tensor, by the module that has it
    "BlockMask": "ridgeline.ops.attention.flex.blocks",
    "block_mask": "ridgeline.ops.attention.flex.blocks",
    "ScoreMod": "ridgeline.ops.attention.flex.score",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in _SUBMODULES:
        return import_module(f"ridgeline.{name}")
    op = import_module("ridgeline.op")
    if name == "RidgelineError":
        return op.RidgelineError
    ops = op.op_modules()
    if name in _OTHERS:
        found = globals()[name] = getattr(import_module(_OTHERS[name]), name)
        return found
    if name not in ops:
        raise AttributeError(
            f"ridgeline has no {name!r}; its ops are {', '.join(ops)}, its modules {', '.join(_SUBMODULES)}"
        )
    found = globals()[name] = op.get(name).function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_OTHERS, "RidgelineError", *import_module("ridgeline.op").op_modules()})
