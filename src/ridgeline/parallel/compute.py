"""The time of a layer's work on one GPU, from recorded roofs and recorded rates of ops."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.parallel.cluster import Cluster
from ridgeline.parallel.shapes import Shape

TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75))  # of a product's result; the share of the rate it allows
SCALAR = ((128, 128, 1.0), (64, 128, 0.95))  # the same in float32, without tensor cores
LAUNCH = 4.54e-6  # seconds from one kernel to the next: recorded, results/h200.jsonl, launch_us of the roof
KERNELS = 11, 27  # of a layer, forward and backward, as our model runs it
AGAIN = ("keep", "cheap", "half", "mlp", "full")  # what backward makes again


class Machine(NamedTuple):
    """What one GPU does. products: FLOP/s of bfloat16 (or 8-bit) products; attention: FLOP/s that a share of 1 means;
    bandwidth: bytes/s; kernel: whose attention it is; width: bytes of an activation;
    apart: whether the residual's sums are kernels
    of their own; casts: bytes an element that making inputs of products 8-bit numbers moves."""

    products: float
    attention: float
    bandwidth: float
    multiprocessors: int
    kernel: str
    width: int = 2
    casts: int = 0
    apart: bool = False


def machine(cluster: Cluster, kernel: str, *, lasting: bool = True, precision: str = "bf16", casts: int = 5) -> Machine:
    """Returns what the cluster's GPU does: at the rate that lasts, or in a burst of less than a second.

    casts: as in Machine, for 8-bit products: 5 where a pass finds the scale, 3 where it comes from earlier steps."""
    rate = cluster.lasting if lasting else cluster.roof
    fast = rate * (cluster.peak_fp8 / cluster.peak) if precision == "fp8" else rate
    return Machine(
        fast, rate, cluster.bandwidth, cluster.multiprocessors, kernel, casts=casts if precision == "fp8" else 0
    )


@cache
def recorded() -> dict[str, Any]:
    """Returns the recorded rates of rates.json."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "rates.json").read_text())
    return found


@lru_cache(1 << 16)
def product(m: int, n: int, k: int, gpu: Machine) -> float:
    """Returns the seconds of an (m, k) by (k, n) product: full waves of tiles at the rate, or its bytes, if slower."""
    waves = min(
        math.ceil(math.ceil(m / a) * math.ceil(n / b) / gpu.multiprocessors) * a * b / share
        for a, b, share in (SCALAR if gpu.width == 4 else TILES)
    )
    seconds = waves * gpu.multiprocessors * 2.0 * k / gpu.products
    # a product whose sum is long and whose result is small splits the sum
    seconds = min(seconds, max(2.0 * m * n * k / gpu.products / 0.85, 0.0)) if m * n < 2**22 else seconds
    casts = gpu.casts * (m * k + n * k) / gpu.bandwidth
    return max(seconds, gpu.width * (m * k + n * k + m * n) / gpu.bandwidth) + casts


@lru_cache(1 << 12)
def share(kernel: str, dim: int, seq: int, direction: str) -> float:
    """Returns the share of the roof that causal attention reaches, between recorded lengths by their logarithm."""
    table = recorded()["attention"][kernel][f"{64 if dim <= 96 else 128} {direction}"]
    place = math.log2(max(seq, 1)) - 10  # of 1024, the first recorded length
    if place <= 0:
        return float(table[0]) * max(0.05, 1 + 0.3 * place)
    low = min(int(place), len(table) - 2)
    return float(table[low] + (table[low + 1] - table[low]) * min(place - low, 1.0))


@dataclass(frozen=True)
class Work:
    """Seconds of a layer for one micro-batch on one GPU, by kind. `again`: what recomputation adds to backward."""

    forward: float
    backward: float
    products: float
    attention: float
    rest: float
    again: float


def attention_seconds(
    flops: float, seq: int, dim: int, heads: int, tokens: float, gpu: Machine, grouped: bool = False
) -> tuple[float, float]:
    """Returns forward's and backward's seconds of causal attention. flops: forward's, over half of the pairs.

    grouped: whether heads share keys. The kernel "scalar" runs at gpu.attention itself. The kernel "unfused" keeps the
    matrix of scores: its time is that matrix's bytes, six passes forward and nine backward (products, masked softmax
    and dropout apart), and the products at half of the rate."""
    if gpu.kernel == "unfused":
        one = gpu.width * tokens * heads * seq / gpu.bandwidth
        return 6 * one + 2 * flops / (0.5 * gpu.attention), 9 * one + 4 * flops / (0.5 * gpu.attention)
    if gpu.kernel == "scalar":
        return flops / gpu.attention, 2.5 * flops / gpu.attention
    forward, backward = (share(gpu.kernel, dim, seq, d) for d in ("forward", "backward"))
    if grouped:
        slower = recorded()["grouped"][gpu.kernel]
        forward, backward = forward * slower[0], backward * slower[1]
    return flops / (gpu.attention * forward), 2.5 * flops / (gpu.attention * backward)


@lru_cache(1 << 14)
def layer(shape: Shape, tokens: int, seq: int, tp: int, cp: int, ep: int, again: str, gpu: Machine) -> Work:
    """Returns the seconds of a layer for `tokens` tokens of this GPU (after context parallelism), in sequences of `seq`
    in all, its products split over tp."""
    q, kv, t = shape.heads * shape.dim // tp, max(1, shape.groups // tp) * shape.dim, tokens
    sides = 2 if shape.gated else 1
    inputs = [(t, q, shape.width), (t, kv, shape.width), (t, kv, shape.width)]
    pairs = [*(inputs if shape.gated else [(t, q + 2 * kv, shape.width)]), (t, shape.width, q)]
    if shape.experts:
        seen = max(1, t * ep * shape.active // shape.experts)
        mine = shape.experts // ep
        mlp = [(seen, sides * shape.hidden // tp, shape.width), (seen, shape.width, shape.hidden // tp)] * mine
        pairs.append((t, shape.experts, shape.width))
        if shape.shared:
            pairs += [(t, 2 * shape.shared // tp, shape.width), (t, shape.width, shape.shared // tp)]
        hidden = shape.hidden * shape.active + shape.shared
    else:
        mlp = [(t, sides * shape.hidden // tp, shape.width), (t, shape.width, shape.hidden // tp)]
        hidden = shape.hidden
    counted: dict[tuple[int, int, int], int] = {}
    for one in pairs + mlp:
        counted[one] = counted.get(one, 0) + 1
    forward = sum(c * product(m, n, k, gpu) for (m, n, k), c in counted.items())
    backward = sum(c * (product(m, k, n, gpu) + product(n, k, m, gpu)) for (m, n, k), c in counted.items())
    flops = 2.0 * t * seq * (shape.heads // tp) * shape.dim
    ahead, back = attention_seconds(flops, seq // cp, shape.dim, shape.heads // tp, t, gpu, shape.groups < shape.heads)
    # bytes of norms, rotations, the gate's backward, and tokens on their way to experts
    plain, gate = (56, 16) if gpu.apart else (32, 10)
    wide = plain * shape.width + 8 * (shape.heads + shape.groups) * shape.dim + gate * hidden
    wide += 8 * shape.width * shape.active
    passes = gpu.width / 2 * t * wide / tp / gpu.bandwidth + sum(KERNELS) * LAUNCH
    down = sum(c * product(*one, gpu) for one, c in counted.items() if one[1] == shape.width and one[2] != q)
    more = {
        "keep": 0.0,
        "cheap": gpu.width / 2 * t * (10 * hidden + 8 * shape.width) / tp / gpu.bandwidth,
        "half": (forward - down) / 2,
        "mlp": sum(c * product(*one, gpu) for one, c in counted.items() if one in mlp[::2])
        + gpu.width / 2 * t * 8 * shape.width / tp / gpu.bandwidth,
        "full": forward - down + ahead + passes / 3,
    }[again]
    return Work(
        forward + ahead + passes / 3,
        backward + back + passes * 2 / 3 + more,
        forward + backward,
        ahead + back,
        passes,
        more,
    )


@lru_cache(1 << 12)
def head(shape: Shape, tokens: int, tp: int, gpu: Machine, fused: bool) -> tuple[float, float]:
    """Returns the seconds of the last layer's product and the loss, forward and backward.

    fused: the loss makes the logits in parts and never keeps them; else they pass through memory in float32."""
    vocabulary = math.ceil(shape.vocabulary / tp)
    forward = product(tokens, vocabulary, shape.width, gpu)
    backward = product(tokens, shape.width, vocabulary, gpu) + product(vocabulary, shape.width, tokens, gpu)
    moved = (4.0 if fused else 20.0) * tokens * vocabulary / gpu.bandwidth
    return forward + moved / 2, backward + moved / 2


@cache
def host_seconds(layers: int, again: str = "keep") -> tuple[float, float]:
    """Returns the host's seconds of forward and backward of our language model's layers, from recorded ops.

    A layer calls add_rms_norm twice, torch's product five times, and rope, attention and gated_linear once. A recorded
    backward has a call of the autograd engine that a whole model makes once: the backward of `mul`, less its launches.
    again: "full" calls forward's ops once more; for less, the few calls are left out.
    """
    host = recorded()["host"]
    calls = {"add_rms_norm": 2, "matmul": 5, "rope": 1, "attention": 1, "gated_linear": 1}
    engine = host["mul backward"] - 2 * host["mul forward"]
    forward = sum(n * host[f"{op} forward"] for op, n in calls.items())
    backward = sum(n * (host[f"{op} backward"] - engine) for op, n in calls.items())
    more = forward if again == "full" else 0.0
    return layers * forward, layers * (backward + more) + engine
