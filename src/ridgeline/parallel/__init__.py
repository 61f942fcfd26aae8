"""Training on several GPUs: strategies as ladders beside torch.distributed's own, FSDP2 for our models, checkpoints.

    device = parallel.start()                                   # under torchrun
    model = parallel.apply(model, parallel.mesh(shard=8), compute_dtype=torch.bfloat16, checkpointing=True)
    saving = parallel.save("step1000", model, optimizer, 1000)  # in the background
    step = parallel.load("step1000", model, optimizer)          # on any number of ranks

Names and modules are loaded at first use. The ladders are in `collectives`, `data`, `optimizer`, `sharded`, `ways`,
`splits` and `pipeline`.
"""

from importlib import import_module
from typing import Any

# public name: its module
NAMES = {
    "start": "groups", "leave": "groups", "mesh": "groups", "spawn": "groups",
    "apply": "fsdp2", "save": "checkpoints", "load": "checkpoints",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(import_module(f"ridgeline.parallel.{NAMES[name]}"), name)
    raise AttributeError(f"ridgeline.parallel has no {name!r}; its names are {', '.join(NAMES)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
