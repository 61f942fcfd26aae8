"""The flags that the verbs of the language-model lab share, and the model, data and optimizer that they name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import ridgeline.optim
from ridgeline.lm.model import IMPLS, REMAKES, Transformer
from ridgeline.lm.sizes import SIZES, Size, size
from ridgeline.op import RidgelineError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = ("layers", "width", "hidden", "heads", "key_heads", "head_dim", "vocabulary")  # what flags change of a size
MODES = ("forward", "backward", "step")  # forward alone; with backward; with backward and the optimizer


def flags(parser: argparse.ArgumentParser, *, context: int = 512, batch: int = 4, mode: str | None = "step") -> None:
    """Adds the flags that choose a model, its data and how it runs."""
    parser.add_argument("--size", default="small", metavar="NAME", help=f"one of {', '.join(SIZES)} (default: small)")
    for name in ("layers", "width", "hidden", "heads", "key-heads", "head-dim", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"instead of the size's {name.replace('-', ' ')}")
    parser.add_argument("--context", type=int, default=context, metavar="N", help=f"tokens of a sequence ({context})")
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help=f"sequences ({batch})")
    if mode:
        parser.add_argument("--mode", choices=MODES, default=mode, help=f"what runs ({mode})")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of weights and activations")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="keep float32 weights, compute in this")
    parser.add_argument("--impl", choices=IMPLS, default="ridgeline", help="whose ops (ridgeline)")
    parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    parser.add_argument("--checkpoint", type=int, default=0, metavar="LAYERS", help="layers per checkpoint; 0: none")
    parser.add_argument("--nested", action="store_true", help="nest the checkpoints by halving the layers")
    parser.add_argument("--remake", choices=REMAKES, help="recompute these results in backward, without checkpoints")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def tokens_of(options: argparse.Namespace) -> int:
    """Returns the tokens of a step. Raises RidgelineError if the flags name none."""
    for name in ("context", "batch"):
        if getattr(options, name) < 1:
            raise RidgelineError(f"lm: --{name} must be at least 1, but is {getattr(options, name)}")
    return int(options.context * options.batch)


def shape(options: argparse.Namespace) -> Size:
    """Returns the size that the flags name. Raises RidgelineError if it does not exist or does not fit together."""
    return size(options.size, **{name: getattr(options, name) for name in SHAPE})


@dataclass
class Setup:
    """A model with its data and optimizer. `step(mode)` runs one of MODES and returns the loss, on the device.

    It calls `mark` with "forward", "backward" and "optimizer" when the host has started each of them. With `graph` the
    first step of a mode makes it a CUDA graph. Later steps replay that until another mode runs, and call `mark` with
    "graph" alone."""

    size: Size
    model: Callable[..., torch.Tensor]  # compiled if asked for
    plain: Transformer
    tokens: torch.Tensor
    target: torch.Tensor
    optimizer: Any
    autocast: torch.dtype | None
    graph: bool = False
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = field(default_factory=dict)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.tokens.device.type, self.autocast)

    def step(self, mode: str, mark: Callable[[str], Any] = lambda part: None) -> torch.Tensor:
        if not self.graph:
            return self._step(mode, mark)
        if mode not in self.graphs:
            self.graphs.clear()  # the memory of another mode's
            self.graphs[mode] = self._captured(mode)
        graph, loss = self.graphs[mode]
        graph.replay()
        mark("graph")
        return loss

    def _captured(self, mode: str) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Returns a graph of a mode and the loss that it writes. Two steps before compile kernels and make moments."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self._step(mode)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            loss = self._step(mode)
        return graph, loss

    def _step(self, mode: str, mark: Callable[[str], Any] = lambda part: None) -> torch.Tensor:
        with torch.set_grad_enabled(mode != "forward"), self.context():
            loss = self.model(self.tokens, self.target)
        mark("forward")
        if mode == "forward":
            return loss
        loss.backward()
        mark("backward")
        if mode == "step":
            self.optimizer.step()
            mark("optimizer")
        self.plain.zero_grad(set_to_none=True)
        return loss.detach()


def chosen_device(options: argparse.Namespace) -> torch.device:
    """Returns the device of the flags. Raises RidgelineError if it asks for a GPU and there is none."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("lm: --device cuda needs a GPU, and PyTorch sees none; leave --device out to use the CPU")
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def named(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a recorded row says of a run: the model, with what was changed of it, and how it ran."""
    kept = ("size", "context", "batch", "mode", "precision", "autocast", "impl", "compile", "checkpoint")
    changed = {name: value for name in SHAPE if (value := getattr(options, name)) is not None}
    changed |= {"graph": True} if getattr(options, "graph", False) else {}
    return {name: getattr(options, name) for name in kept} | changed | {"device": chosen_device(options).type}


def made(size: Size, options: argparse.Namespace) -> Transformer:
    """Returns the model of the flags, on the default device."""
    return Transformer(size, options.impl, options.checkpoint, nested=options.nested, remake=options.remake)


def build(options: argparse.Namespace, device: torch.device | None = None) -> Setup:
    """Makes the model of the flags with random weights and data; on the meta device it takes no memory.

    Raises RidgelineError if the numbers do not fit together."""
    tokens_of(options)
    if options.checkpoint < 0:
        raise RidgelineError(f"lm: --checkpoint must be 0 or more, but is {options.checkpoint}")
    if options.autocast and options.precision != "float32":
        raise RidgelineError("lm: --autocast computes in half precision over float32 weights: leave --precision out")
    if options.remake and options.compile:
        raise RidgelineError("lm: torch.compile itself chooses what backward recomputes: leave --remake out")
    device, graph = device or chosen_device(options), getattr(options, "graph", False)
    if graph and device.type == "cpu":
        raise RidgelineError("lm: --graph makes a step a CUDA graph, which needs a GPU")
    found, dtype = shape(options), PRECISIONS[options.precision]
    torch.manual_seed(options.seed)
    with torch.device(device):
        plain = made(found, options).to(dtype)
        tokens = torch.randint(found.vocabulary, (options.batch, options.context))
        target = torch.randint(found.vocabulary, (options.batch, options.context))
    own = ridgeline.optim.AdamW if options.impl == "ridgeline" else torch.optim.AdamW
    model = torch.compile(plain) if options.compile else plain
    cast = PRECISIONS[options.autocast] if options.autocast else None
    optimizer = own(plain.parameters(), lr=1e-4, capturable=graph)
    return Setup(found, model, plain, tokens, target, optimizer, cast, graph)
