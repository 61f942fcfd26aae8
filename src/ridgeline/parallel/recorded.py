"""Our own recorded steps on one H200, and what the model predicts of them from recorded roofs and ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.parallel import compute
from ridgeline.parallel.cluster import cluster
from ridgeline.parallel.compute import Machine
from ridgeline.parallel.cost import stack
from ridgeline.parallel.shapes import Shape, shape

# FLOP/s in float32: of products in xl's recorded forward pass (the roof, for long sums, is 52), of attention by three
# products of TF32 (docs/notes/attention.md: 5.3 ms both ways at D 64), and as it was when xl was recorded (6 to 11).
FLOAT32, ATTENTION, ATTENTION_BEFORE = 50e12, 22e12, 6e12


@dataclass(frozen=True)
class Step:
    """A recorded step. batch: sequences of a micro-batch; count: micro-batches; seconds: the recorded median, with its
    95% interval; again: what backward makes again; lasting: whether it runs for seconds at the power limit; apart:
    whether the residual's sums are kernels of their own (transformers' model); parts: recorded seconds of
    forward, backward and the optimizer, of steps that the host binds; attention: the rate of float32's, in FLOP/s;
    source: where it is recorded."""

    name: str
    model: str
    batch: int
    seq: int
    count: int
    seconds: float
    low: float
    high: float
    source: str
    float32: bool = False
    again: str = "keep"
    lasting: bool = False
    apart: bool = False
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    attention: float = ATTENTION


LM = "results/lm/h200.jsonl"
STEPS = (
    Step("llama-1b, transformers, patched", "llama-1b", 4, 4096, 1, 0.2357, 0.2322, 0.2441,
         "results/h200.jsonl, type model", apart=True),
    Step("leaderboard", "leaderboard", 1, 32768, 2, 8.74, 8.73, 9.01, "docs/guide.md", again="mlp", lasting=True),
    Step("xl, bfloat16", "xl", 4, 512, 1, 0.09243, 0.0862, 0.1018, LM),
    Step("large, bfloat16", "large", 4, 512, 1, 0.05133, 0.0467, 0.0751,
         LM, parts=(0.01646, 0.02532, 0.00824)),
    Step("medium, bfloat16", "medium", 4, 512, 1, 0.03858, 0.0330, 0.0439,
         LM, parts=(0.01157, 0.01974, 0.00519)),
    Step("small, bfloat16", "small", 4, 512, 1, 0.01948, 0.0180, 0.0244,
         LM, parts=(0.00635, 0.00941, 0.00259)),
    Step("xl, float32", "xl", 4, 512, 1, 0.99942, 0.9993, 0.9995, LM, True, attention=ATTENTION_BEFORE),
    Step("large, float32", "large", 4, 512, 1, 0.30041, 0.2999, 0.3007, LM, True),
    Step("medium, float32", "medium", 4, 512, 1, 0.12293, 0.1224, 0.1233, LM, True),
    Step("small, float32", "small", 4, 512, 1, 0.04315, 0.0429, 0.0437, LM, True),
)  # fmt: skip


CALIBRATES = "small, bfloat16", "large, bfloat16"  # the steps that the constants of the host come from


def calibrate(steps: Sequence[Step] = STEPS, names: Sequence[str] = CALIBRATES) -> tuple[float, float]:
    """Returns the host's seconds of a parameter tensor in the optimizer, and of a step beside its parts.

    Both are means over the named steps, at most two, of their recorded parts; a step's whole time and its forward and
    backward fit nothing. No other step is looked at."""
    seen = [step for step in steps if step.name in names]
    tensor = [step.parts[2] / shape(step.model).tensors for step in seen]
    beside = [step.seconds - sum(step.parts) for step in seen]
    return sum(tensor) / len(seen), sum(beside) / len(seen)


@dataclass(frozen=True)
class Prediction:
    """A step's predicted seconds by part, and what binds it: "GPU" or "host"."""

    seconds: float
    parts: dict[str, float]
    bound: str


def machine(step: Step) -> Machine:
    """Returns the H200 as a step uses it."""
    gpu = compute.machine(cluster("one-h200"), "ridgeline", lasting=step.lasting)
    if step.float32:
        gpu = gpu._replace(products=FLOAT32, attention=step.attention, width=4, kernel="scalar")
    return gpu._replace(apart=step.apart)


def predict(step: Step, constants: tuple[float, float] | None = None) -> Prediction:
    """Returns what the model predicts of a recorded step: forward and backward, each the longer of the GPU's and the
    host's time, and the optimizer and what is beside it, of which the GPU waits for what the host has left to do.

    constants: of the host, as `calibrate` returns them; None: the stack's."""
    s: Shape = shape(step.model)
    gpu, tokens = machine(step), step.batch * step.seq
    work = compute.layer(s, tokens, step.seq, 1, 1, 1, step.again, gpu)
    first, last = compute.head(s, tokens, 1, gpu, True)
    busy = s.layers * work.forward + first, s.layers * work.backward + last
    host = compute.host_seconds(s.layers)
    kept = stack("ridgeline")
    tensor, beside = constants or (kept.host_tensor, kept.host_step)
    parts = {"forward": step.count * max(busy[0], host[0]), "backward": step.count * max(busy[1], host[1])}
    ahead = sum(parts.values()) - step.count * sum(host)  # by how much the host has run ahead
    parts["optimizer"] = max((28 if step.float32 else 14) * s.parameters / gpu.bandwidth, tensor * s.tensors - ahead)
    parts["beside"] = max(0.0, tensor * s.tensors + beside - ahead - parts["optimizer"])
    bound = "host" if sum(host) > sum(busy) else "GPU"
    return Prediction(sum(parts.values()), parts, bound)


def errors() -> dict[str, float]:
    """Returns predicted over recorded, less 1, of each recorded step."""
    return {step.name: predict(step).seconds / step.seconds - 1 for step in STEPS}
