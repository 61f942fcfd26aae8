"""The memory of a training step on one GPU, from what our ops save for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.parallel.compute import AGAIN
from ridgeline.parallel.shapes import Shape

if TYPE_CHECKING:
    from ridgeline.parallel.cost import Layout

STATES = {"bf16": (2, 2, 4), "mixed": (2, 4, 12)}  # bytes of a parameter: weight, gradient, the optimizer's
CONTEXT = 1.2e9  # bytes of a process on a GPU beside its tensors: the CUDA context and the libraries' work memory
SLACK = 0.04  # what an allocator loses between blocks, as a share of activations
FLOAT = 4


def kept(shape: Shape, policy: str, width: int = 2) -> float:
    """Returns the bytes a token that a layer keeps for backward. width: bytes of an element.

    keep: both norms' inputs and outputs, q, k, v, o and its lse, gate, up and their product. cheap: without the norms'
    outputs and the product. half: without up too.
    mlp: attention's alone. full: the layer's input alone."""
    h, f = shape.width * width, shape.hidden * width
    q, kv = shape.heads * shape.dim * width, shape.groups * shape.dim * width
    if policy == "full":
        return h
    if policy not in AGAIN:
        raise ValueError(policy)
    rows = FLOAT * (shape.heads + 2)
    if policy == "mlp":
        return 3 * h + 2 * q + 2 * kv + rows - FLOAT
    products = {"keep": 3, "cheap": 2, "half": 1}[policy] - (0 if shape.gated else 1)
    visits = shape.active if shape.experts else 1
    mlp = visits * max(products, 1) * f + 3 * shape.shared * width
    moved = 2 * shape.active * h if shape.experts else 0  # tokens on their way to experts and back
    return (4 if policy == "keep" else 2) * h + 2 * q + 2 * kv + rows + mlp + moved


def resting(shape: Shape, layout: Layout, state: str) -> dict[str, float]:
    """Returns the bytes of weights, gradients and the optimizer's state on the GPU that holds most."""
    weight, gradient, moments = STATES[state]
    layers = -(-shape.layers // layout.pp)
    ends = shape.head_weights * (1 if shape.tied or layout.pp > 1 else 2)
    dense = (layers * shape.dense_weights + ends + shape.width) / layout.tp
    experts = layers * shape.expert_weights / layout.tp / layout.ep
    data = layout.dp * layout.cp
    shards = {"ddp": 1, "zero1": data, "fsdp": data, "hsdp": min(data, layout.shard or data)}[layout.mode]
    fewer = max(1, shards // layout.ep)  # GPUs that hold the same experts
    if layout.mode in ("ddp", "zero1"):
        held = dense + experts
        state_ = moments * (dense / shards + experts / fewer)
        return {"weights": weight * held, "gradients": gradient * held, "optimizer": state_}
    local = dense / shards + experts / fewer
    whole = 2.0 * (2 * shape.dense_weights + shape.expert_weights / layout.ep * 2) / layout.tp  # two gathered layers
    wide = FLOAT if state == "mixed" else weight  # a sharded master weight stands for the weight
    if shards == 1:
        whole = 0.0
    return {
        "weights": wide * local + whole,
        "gradients": gradient * local + whole / 2,
        "optimizer": (moments - (FLOAT if state == "mixed" else 0)) * local,
    }


def memory(
    shape: Shape, layout: Layout, seq: int, microbatches: int, state: str = "bf16", *, fused: bool = True
) -> dict[str, float]:
    """Returns the bytes of a step at its peak, by part, on the GPU that holds most. fused: as in `compute.head`.

    The peak is where backward begins, with all that forward kept, or where it ends, with all gradients."""
    tokens = layout.micro * seq / layout.cp
    layers = -(-shape.layers // layout.pp)
    flight = 1.0
    if layout.pp > 1:  # of the first stage; an interleaved schedule holds a part of a further round
        more = 1 + (layout.pp - 1) / (layout.pp * layout.virtual) if layout.virtual > 1 else 1
        flight = min(microbatches, layout.pp * more)
    saved = tokens / layout.tp * kept(shape, layout.again) * layers * flight
    remade = tokens / layout.tp * (kept(shape, "keep") - kept(shape, layout.again))
    hidden = (shape.active or 1) * shape.hidden + shape.shared
    backward = tokens / layout.tp * (6 * hidden + 8 * shape.width) + 2 * remade / 2
    logits = tokens * shape.vocabulary / layout.tp * (0.5 if fused else 10)
    logits += 2 * shape.width * shape.vocabulary / layout.tp if layout.mode in ("fsdp", "hsdp") else 0
    parts = resting(shape, layout, state)
    found = dict(parts)
    lasting = microbatches > 1 or layout.mode == "zero1" or layout.pp > 1  # gradients are there when backward begins
    if not lasting:
        late = min(parts["gradients"], 2.0 * shape.head_weights / layout.tp)
        found["gradients"] = max(late, parts["gradients"] - saved)
    found["activations"] = saved * (1 + SLACK * (layout.world > 1))
    found["temporaries"] = max(logits, backward)
    found["context"] = CONTEXT
    return found
