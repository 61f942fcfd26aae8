"""A step's parts by layer, as the simulation runs them one by one."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.parallel import compute
from ridgeline.parallel.cost import HIDES, Job, Layout, context_seconds, expert_seconds, sharded, tensor_seconds


@dataclass(frozen=True)
class Parts:
    """Seconds of a layer in a micro-batch, without a pipeline. talk: collectives that compute waits for. gather,
    scatter: of a layer's weights and gradients. once: of data parallelism once a step, and what of it is exposed."""

    layers: int
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    talk_forward: float
    talk_backward: float
    gather: float
    scatter: float
    once: float
    exposed_once: float
    overlaps: bool


def parts(job: Job, layout: Layout) -> Parts:
    """Returns a step's parts by layer, of a layout without a pipeline."""
    s, k = job.shape, job.stack
    gpu = compute.machine(job.cluster, k.attention, lasting=k.lasting, precision=layout.precision, casts=k.casts)
    plain = compute.machine(job.cluster, k.attention, lasting=k.lasting)
    tokens = layout.micro * job.seq // layout.cp
    work = compute.layer(s, tokens, job.seq, layout.tp, layout.cp, layout.ep, layout.again, gpu)
    first, last = compute.head(s, tokens, layout.tp, plain, k.fused)
    slow = 1 / k.compute
    talk = tensor_seconds(job, layout, tokens) + expert_seconds(job, layout, tokens)
    ring = context_seconds(job, layout, work.attention * slow / 3.5)
    again = 2 if layout.again == "full" else 1
    traffic = sharded(job, layout, s.layers)
    forward, backward = s.layers * work.forward * slow + first * slow, s.layers * work.backward * slow + last * slow
    room = HIDES if k.overlap else 0.0
    exposed = max(0.0, traffic.once_forward - room * forward) + max(0.0, traffic.once_backward - room * backward)
    return Parts(
        s.layers, work.forward * slow, work.backward * slow, first * slow, last * slow, talk + ring,
        again * talk + 2 * ring, traffic.gather_forward, traffic.gather_backward - traffic.gather_forward,
        traffic.once_forward + traffic.once_backward, exposed, k.overlap,
    )  # fmt: skip
