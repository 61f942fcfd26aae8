"""The time of a training step of a layout on a cluster: the cost model.

A step = m (forward + backward) (1 + (p - 1) / (v m)) + exposed communication + optimizer, for m micro-batches, p stages
of the pipeline and v parts of a stage. docs/plan.md derives each term.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ridgeline.op import RidgelineError
from ridgeline.parallel import compute, footprint, links
from ridgeline.parallel.cluster import Cluster
from ridgeline.parallel.shapes import Shape

HIDES = 0.9  # the share of compute time under which communication can hide
SLOWS = 0.07  # of the overlapped time: the multiprocessors that communication holds, of 5 to 10%
FLOAT = 4  # bytes of a float32 number


@dataclass(frozen=True)
class Layout:
    """How a job is spread. dp: data; tp: tensor (with its sequence parallelism); pp: pipeline; cp: context; ep: expert,
    inside data parallelism. mode: ddp, zero1, fsdp or hsdp; shard: GPUs that share a copy of the weights (hsdp).
    again: what backward makes again (keep, cheap, half, mlp, full). micro: sequences of a micro-batch. virtual: parts
    of a stage. precision: bf16 or fp8 products."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    mode: str = "fsdp"
    again: str = "keep"
    micro: int = 1
    virtual: int = 1
    precision: str = "bf16"
    shard: int = 0

    @property
    def world(self) -> int:
        """GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def text(self) -> str:
        """The layout in words: "dp 8 tp 4"."""
        sizes = [f"{n} {v}" for n, v in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("cp", self.cp)) if v > 1]
        parts = [*(sizes or ["dp 1"]), *([f"ep {self.ep}"] if self.ep > 1 else []), self.mode]
        parts += [f"in {self.shard}"] if self.mode == "hsdp" else []
        parts += [f"v {self.virtual}"] if self.virtual > 1 else []
        return " ".join([*parts, self.again, f"micro {self.micro}", *(["fp8"] if self.precision == "fp8" else [])])


@dataclass(frozen=True)
class Stack:
    """A software stack and its three calibrated constants.

    compute: the share of our recorded rates that its kernels reach. link: the share of the network's rate that its
    collectives reach. jitter: what each doubling of nodes adds to a step, as a share (stragglers, contention).
    attention: whose recorded attention it has. fused: whether its loss keeps no logits. overlap: whether data
    parallelism's communication hides under backward. asynchronous: whether tensor parallelism's hides by a third.
    casts: as in `compute.machine`. state: bytes of a parameter, a key of footprint.STATES. source: of the constants.
    host_tensor, host_step: the host's seconds of a parameter tensor in the optimizer, and of a step beside its parts;
    0 where the host's time of a layer is not recorded, and is left out."""

    name: str
    compute: float
    link: float
    jitter: float
    attention: str = "ridgeline"
    fused: bool = True
    overlap: bool = True
    asynchronous: bool = False
    state: str = "mixed"
    source: str = ""
    lasting: bool = True
    casts: int = 5
    host_tensor: float = 0.0
    host_step: float = 0.0


@cache
def stacks() -> dict[str, Stack]:
    """Returns the stacks by name."""
    read = json.loads((Path(__file__).parent / "stacks.json").read_text())
    return {name: Stack(name, **values) for name, values in read.items()}


def stack(name: str) -> Stack:
    """Returns the stack of that name. Raises RidgelineError if there is none."""
    if name not in stacks():
        raise RidgelineError(f"parallel: there is no software stack {name!r}; the stacks are {', '.join(stacks())}")
    return stacks()[name]


@dataclass(frozen=True)
class Job:
    """What is trained: a step of `sequences` sequences of `seq` tokens."""

    shape: Shape
    cluster: Cluster
    stack: Stack
    seq: int
    sequences: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq * self.sequences


@dataclass(frozen=True)
class Cost:
    """A step's seconds, by cause, and a GPU's bytes, by part. `exposed`: communication that nothing hides,
    and "host", what the GPU waits for the host in layers.

    forward, backward: seconds of a micro-batch on one stage. transfer: seconds of a micro-batch between stages."""

    seconds: float
    work: dict[str, float]
    exposed: dict[str, float]
    memory: dict[str, float]
    forward: float = 0.0
    backward: float = 0.0
    transfer: float = 0.0
    microbatches: int = 1
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Bytes of a GPU."""
        return sum(self.memory.values())


def fits(job: Job, layout: Layout) -> str | None:
    """Returns why a layout does not divide the job, or None."""
    s, x, rows = job.shape, layout, layout.dp * layout.micro
    parts, data = x.pp * x.virtual, x.dp * x.cp
    checks = (
        (s.heads % x.tp, f"tp {x.tp} does not divide {s.heads} heads"),
        (s.hidden % x.tp, f"tp {x.tp} does not divide a hidden size of {s.hidden}"),
        (parts > s.layers + 2, f"{parts} parts of the pipeline are more than {s.layers} layers and both ends"),
        (job.seq % (2 * x.cp) if x.cp > 1 else 0, f"cp {x.cp} does not halve {job.seq} tokens"),
        (x.ep > 1 and (not s.experts or s.experts % x.ep), f"ep {x.ep} does not divide {s.experts} experts"),
        (data % x.ep, f"ep {x.ep} does not divide dp x cp = {data}"),
        (job.sequences % rows, f"dp {x.dp} x micro {x.micro} does not divide {job.sequences} sequences"),
        (
            x.virtual > 1 and job.sequences // rows % x.pp,
            f"interleaved stages take micro-batches in multiples of pp {x.pp}",
        ),
        (x.mode == "hsdp" and data % (x.shard or 1), f"shards of {x.shard} do not divide dp x cp = {data}"),
    )
    return next((why for wrong, why in checks if wrong), None)


@dataclass(frozen=True)
class Traffic:
    """Seconds of communication: of one layer's forward and backward in a micro-batch, and once a step."""

    gather_forward: float = 0.0
    gather_backward: float = 0.0
    once_forward: float = 0.0
    once_backward: float = 0.0


def sharded(job: Job, layout: Layout, layers: int) -> Traffic:
    """Returns the seconds of data parallelism's communication, for its mode."""
    s, c, link = job.shape, job.cluster, job.stack.link
    data, stride = layout.dp * layout.cp, layout.tp
    if data == 1:
        return Traffic()
    wide = FLOAT if job.stack.state == "mixed" else 2  # bytes of a gradient on its way
    dense, experts = s.dense_weights / layout.tp, s.expert_weights / layout.tp / layout.ep
    whole, few = links.group(c, data, stride), links.group(c, max(1, data // layout.ep), stride * layout.ep)
    if layout.mode in ("ddp", "zero1"):
        ends = s.head_weights * (1 if s.tied or layout.pp > 1 else 2) / layout.tp
        parts = ((whole, layers * dense + ends), (few, layers * experts))
        if layout.mode == "ddp":
            return Traffic(once_backward=sum(links.all_reduce(c, g, wide * p, link) for g, p in parts))
        return Traffic(
            once_forward=sum(links.gather(c, g, 2 * p, link) for g, p in parts),
            once_backward=sum(links.gather(c, g, wide * p, link) for g, p in parts),
        )
    if layout.mode == "hsdp":
        inner = layout.shard or c.node
        near = links.group(c, inner, stride)
        far = links.group(c, data // inner, stride * inner)
        parts = (
            (near, dense),
            (near if layout.ep == 1 else links.group(c, max(1, inner // layout.ep), stride), experts),
        )
        between = links.all_reduce(c, far, wide * layers * (dense + experts) / inner, link)
    else:
        parts, between = ((whole, dense), (few, experts)), 0.0
    gather = sum(links.gather(c, g, 2 * p, link) for g, p in parts)
    scatter = sum(links.gather(c, g, wide * p, link) for g, p in parts)
    return Traffic(gather, gather + scatter, once_backward=between)


def tensor_seconds(job: Job, layout: Layout, tokens: float) -> float:
    """Returns the exposed seconds of a layer's two pairs of all-gather and reduce-scatter, forward, in tensor
    parallelism."""
    if layout.tp == 1:
        return 0.0
    who = links.group(job.cluster, layout.tp, 1)
    one = links.gather(job.cluster, who, 2 * tokens * job.shape.width, job.stack.link)
    return 4 * one * (2 / 3 if job.stack.asynchronous else 1)


def expert_seconds(job: Job, layout: Layout, tokens: float) -> float:
    """Returns the seconds of a layer's two all-to-alls, forward: tokens to their experts and back."""
    if layout.ep == 1 or not job.shape.experts:
        return 0.0
    who = links.group(job.cluster, layout.ep, layout.tp)
    sent = 2 * tokens / layout.tp * job.shape.active * job.shape.width
    return 2 * links.all_to_all(job.cluster, who, sent, job.stack.link)


def context_seconds(job: Job, layout: Layout, attention: float) -> float:
    """Returns the exposed seconds of a layer's ring of keys and values, forward, under `attention` seconds of work."""
    if layout.cp == 1:
        return 0.0
    s, who = job.shape, links.group(job.cluster, layout.cp, layout.tp)
    part = 2 * 2 * max(1, s.groups // layout.tp) * s.dim * layout.micro * job.seq / layout.cp
    ring = (layout.cp - 1) * (part / links.rate(job.cluster, who, job.stack.link) + job.cluster.hop_far)
    return max(0.0, ring - HIDES * attention)


def slowest(layers: int, layout: Layout, layer: float, head: float) -> tuple[int, int]:
    """Returns the layers of the pipeline's slowest stage, and whether (1 or 0) it is the one with the head.

    layer, head: their seconds. Where parts have room to spare, the last stage holds a layer less."""
    parts = layout.pp * layout.virtual
    most = -(-layers // parts) * layout.virtual
    last = most - (1 if parts > 1 and layers % parts else 0)
    return (last, 1) if last * layer + head >= most * layer else (most, 0)


def predict(job: Job, layout: Layout) -> Cost:
    """Returns a step's cost. Raises RidgelineError if the layout does not divide the job."""
    if why := fits(job, layout):
        raise RidgelineError(f"parallel: {why}")
    s, c, k = job.shape, job.cluster, job.stack
    gpu = compute.machine(c, k.attention, lasting=k.lasting, precision=layout.precision, casts=k.casts)
    m = job.sequences // layout.dp // layout.micro
    tokens = layout.micro * job.seq // layout.cp
    work = compute.layer(s, tokens, job.seq, layout.tp, layout.cp, layout.ep, layout.again, gpu)
    plain = compute.machine(c, k.attention, lasting=k.lasting)  # the last layer's product stays in bfloat16
    first, last = compute.head(s, tokens, layout.tp, plain, k.fused)
    layers, ends = slowest(s.layers, layout, work.forward + work.backward, first + last)
    first, last = first * ends, last * ends
    slow = 1 / k.compute
    ahead, back = work.forward * slow, work.backward * slow
    tensor = tensor_seconds(job, layout, tokens)
    thrice = 3 if layout.again == "full" else 2
    expert = expert_seconds(job, layout, tokens)
    context = context_seconds(job, layout, work.attention * slow / 3.5)
    traffic = sharded(job, layout, -(-s.layers // layout.pp))

    forward = layers * ahead + first * slow
    backward = layers * back + last * slow
    inside = {
        "tensor": thrice * layers * tensor,
        "expert": thrice * layers * expert,
        "context": layers * (context + 2 * context),
    }
    gathered = layers * max(0.0, traffic.gather_forward - HIDES * (ahead + tensor + expert))
    gathered += layers * max(0.0, traffic.gather_backward - HIDES * (back + (thrice - 1) * (tensor + expert)))
    gathered += traffic.gather_backward if layers else 0.0  # the first gather and the last scatter hide under nothing
    hidden = min(traffic.gather_forward, ahead) + min(traffic.gather_backward, back)
    stolen = SLOWS * m * layers * hidden
    room = HIDES if k.overlap else 0.0
    exposed_once = max(0.0, traffic.once_forward - room * forward) + max(0.0, traffic.once_backward - room * backward)
    stolen += SLOWS * min(traffic.once_forward + traffic.once_backward, forward + backward) * (1 if k.overlap else 0)

    host = sum(compute.host_seconds(layers, layout.again)) if k.host_tensor else 0.0
    inside["host"] = max(0.0, host - (forward + backward + sum(inside.values()) + gathered))
    step = m * (forward + backward + sum(inside.values()) + gathered)
    bubble = step * (layout.pp - 1) / (layout.virtual * m)
    far = layout.tp * layout.cp * layout.dp * 2 > c.node
    transfer = links.send(c, far, 2.0 * tokens * s.width / layout.tp, k.link) if layout.pp > 1 else 0.0
    passed = 2 * transfer * layout.virtual * (m * 0.1 + layout.pp - 1) if layout.pp > 1 else 0.0
    held = sum(footprint.resting(s, layout, k.state)[n] for n in ("weights", "optimizer"))
    held += footprint.resting(s, layout, k.state)["gradients"] / 2
    # the host runs ahead of the GPU, so its work shows where it ends after the GPU's
    optimizer = max(2 * held / c.bandwidth, m * host + s.tensors / layout.pp * k.host_tensor + k.host_step - step)
    total = step + bubble + exposed_once + passed + optimizer + stolen
    nodes = max(1.0, layout.world / c.node)
    jitter = total * k.jitter * math.log2(nodes)
    layered = {"products": work.products, "attention": work.attention, "rest": work.rest, "again": work.again}
    found = {name: m * layers * value * slow for name, value in layered.items()}
    found["head"] = m * (first + last) * slow
    found |= {"optimizer": optimizer, "bubble": bubble, "slowed": stolen}
    exposed = {name: m * value for name, value in inside.items()}
    exposed |= {"data": m * gathered + exposed_once, "pipeline": passed, "jitter": jitter}
    memory = footprint.memory(s, layout, job.seq, m, k.state, fused=k.fused)
    return Cost(total + jitter, found, exposed, memory, forward, backward, transfer, m, {"microbatches": float(m)})


def flops_rate(job: Job, layout: Layout, seconds: float) -> float:
    """Returns the model's FLOP/s of a GPU, without what recomputation adds."""
    return job.shape.flops(job.tokens, job.seq) / seconds / layout.world


def mfu(job: Job, layout: Layout, seconds: float) -> float:
    """Returns the model's FLOP/s as a share of the datasheet's bfloat16 rate."""
    return flops_rate(job, layout, seconds) / job.cluster.peak
