"""Pipelines over `lm`'s model by the engine's schedules (torch.distributed.pipelining), as a ladder.

Each rank holds some layers; micro-batches pass through the ranks, forward and back. With p ranks, v stages a rank and
m micro-batches, a rank idles for about (p-1) / (v m + p-1) of the step.
Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from ridgeline.lm.model import Transformer
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups
from ridgeline.parallel.rung import Held, Traffic


@dataclass
class Live:
    """Activations, each of a stage and a micro-batch, that are kept for backward: now, and at most in this step.

    One counts until its backward begins. The first step's also has those from which the engine learns shapes."""

    now: int = 0
    most: int = 0

    def keep(self, y: torch.Tensor) -> torch.Tensor:
        if y.requires_grad:
            self.now += 1
            self.most = max(self.most, self.now)
            ends = iter((1,))  # an engine that splits a backward calls the hook again

            def begun(_: torch.Tensor) -> None:
                self.now -= next(ends, 0)

            y.register_hook(begun)
        return y


class Stage(nn.Module):
    """Some layers of a model, from `first` on; the first stage has the embedding, the last one the norm and head.

    The first takes tokens, the others the residual stream. From the last one's norm `loss` makes the loss."""

    def __init__(self, model: Transformer, first: int, count: int, live: Live | None = None) -> None:
        super().__init__()
        self.live = live or Live()
        self.begins, self.ends = first == 0, first + count == model.size.layers
        self.layers = nn.ModuleDict({str(n): model.model.layers[n] for n in range(first, first + count)})
        self.embed_tokens = model.model.embed_tokens if self.begins else None
        self.norm = model.model.norm if self.ends else None
        self.lm_head = model.lm_head if self.ends else None
        self.rotations, self.of = model.rotations, model.loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        cos, sin = (t.to(x.dtype) for t in self.rotations(x.shape[1], x.device))
        stream: Any = None
        for layer in self.layers.values():
            x, stream = layer(x, stream, cos, sin)
        return self.live.keep(x + stream if self.norm is None else self.norm(x, stream)[0])

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of the last stage's output."""
        assert self.lm_head is not None
        return self.of(y.flatten(0, 1), self.lm_head.weight, target.flatten(), dtype=torch.float32)


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that runs them."""

    def __init__(self, model: Transformer, kind: Any, microbatches: int, stages: int, group: Any = None) -> None:
        super().__init__()
        ranks, here = groups.size(group), groups.rank(group)
        count, layers = ranks * stages, model.size.layers
        if layers % count:
            raise RidgelineError(f"parallel: {layers} layers cannot be divided among {ranks} ranks of {stages} stages")
        if model.size.tied:
            raise RidgelineError(
                "parallel: a pipeline's first and last rank cannot share a tied weight; use tied=False"
            )
        each = layers // count
        numbers = [here + n * ranks for n in range(stages)]
        self.live = Live()
        self.stages = nn.ModuleList(Stage(model, n * each, each, self.live) for n in numbers)
        device = next(model.parameters()).device
        made = [pipelining.PipelineStage(own, n, count, device, group=group)
                for own, n in zip(self.stages, numbers, strict=True)]  # fmt: skip
        last = self.stages[-1]
        assert isinstance(last, Stage)
        self.begins, self.ends = here == 0, last.ends
        self.schedule = kind(made if stages > 1 else made[0], microbatches, loss_fn=last.loss if last.ends else _none)

    def step(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
        """Runs forward and backward of a batch that all ranks are given. Returns the mean loss on the last rank."""
        losses: list[torch.Tensor] = []
        given = (tokens,) if self.begins else ()
        self.live.now = self.live.most = 0
        with groups.answered("the pipeline"):
            if self.ends:
                self.schedule.step(*given, target=target, losses=losses)
            else:
                self.schedule.step(*given)
        return torch.stack(losses).mean().detach() if self.ends else None


def _none(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError("only the last stage has a loss")


@dataclass(frozen=True)
class Schedule:
    """A rung of pipelines. stages: of a rank."""

    name: str
    idea: str
    kind: str  # the engine's class
    stages: int = 1

    def wrap(self, model: Transformer, microbatches: int, group: Any = None) -> Pipeline:
        """Returns this rank's pipeline. Raises RidgelineError if the layers or micro-batches do not fit."""
        ranks = groups.size(group)
        if self.stages > 1 and microbatches % ranks:
            raise RidgelineError(
                f"parallel: {self.name} needs micro-batches in multiples of the {ranks} ranks, but got {microbatches}"
            )
        return Pipeline(model, getattr(pipelining, self.kind), microbatches, self.stages, group)

    def idle(self, ranks: int, microbatches: int) -> float:
        """Returns the share of the step in which a rank waits, were all stages equal and messages free."""
        whole = self.stages * microbatches
        waits = (ranks - 1) / 3 if "ZeroBubble" in self.kind else ranks - 1  # weight gradients fill the rest
        return waits / (whole + waits)

    def live(self, here: int, ranks: int, microbatches: int) -> int:
        """Returns the activations, each of a stage and a micro-batch, that a rank keeps for backward at most."""
        every = self.stages * microbatches
        if self.kind == "ScheduleGPipe":
            return every
        after = ranks - 1 - here
        if self.stages == 1:
            return min(every, after + 1)
        ahead = after if "ZeroBubble" in self.kind else 2 * after
        return min(every, (self.stages - 1) * ranks + ahead + 1)

    def own(self, here: int, ranks: int, layers: int) -> list[int]:
        """Returns the numbers of the layers that a rank has."""
        each = layers // (ranks * self.stages)
        return [n * each + k for n in range(here, ranks * self.stages, ranks) for k in range(each)]

    def held(self, model: Transformer, here: int, ranks: int, moments: int = 2) -> Held:
        """Returns the bytes that a rank holds, without activations."""
        own = sum(
            p.nbytes for n in self.own(here, ranks, model.size.layers) for p in model.model.layers[n].parameters()
        )
        if here == 0:
            own += model.model.embed_tokens.weight.nbytes
        if here == ranks - 1:
            own += model.lm_head.weight.nbytes + sum(p.nbytes for p in model.model.norm.parameters())
        return Held(own, own, moments * own)

    def traffic(
        self, model: Transformer, here: int, ranks: int, batch: int, context: int, microbatches: int
    ) -> Traffic:
        """Returns what a rank sends in a step: each of its stages an activation and a gradient per micro-batch."""
        traffic, last = Traffic(), ranks * self.stages - 1
        width = next(model.parameters()).element_size()
        size = batch // microbatches * context * model.size.width * width
        for n in (here + k * ranks for k in range(self.stages)):
            for there in (n < last, n > 0):  # forward to the next stage, backward to the one before
                if there:
                    traffic.add("send", microbatches * size, microbatches)
        return traffic


LADDER = [
    Schedule("gpipe", "all micro-batches forward, then all backward", "ScheduleGPipe"),
    Schedule("1f1b", "backward begins as soon as it can: p activations are held, not m", "Schedule1F1B"),
    Schedule("interleaved", "two stages a rank: half the wait, twice the messages", "ScheduleInterleaved1F1B", 2),
    Schedule("zero-bubble", "weight gradients wait until a rank would idle", "ScheduleInterleavedZeroBubble", 2),
]
