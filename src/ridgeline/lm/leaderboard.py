"""The assignment's leaderboard: a whole training step of 8.1 B parameters on one GPU, by a plan for its memory.

Weights, gradients and both moments are bfloat16. A step takes one sequence at a time and adds up gradients in place.
Each layer keeps for backward what the plan lets it keep, and makes the rest again:

    keep    everything
    gate    all but silu(gate) * up, which one pass makes again
    mlp     attention alone; the second norm and the products of gate and up run again
    layer   its two inputs; the whole layer runs again
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ridgeline.optim
from ridgeline import device as devices
from ridgeline.lm import lab
from ridgeline.lm.lab import units
from ridgeline.lm.model import IMPLS, Transformer, called
from ridgeline.lm.setup import chosen_device
from ridgeline.lm.sizes import SIZES, Size, size
from ridgeline.op import RidgelineError

POLICIES = ("layer", "mlp", "gate", "keep")  # from the least memory to the most
LIMIT = 141e9  # bytes of an H200
RESERVE = 3e9  # bytes for the CUDA context, workspaces of products, and gaps between allocations
RATE = 660e12  # FLOP/s of bfloat16 products that one H200 sustains; 640 to 680 were measured, 790 in a burst
BANDWIDTH = 4.27e12  # bytes/s of a copy on one H200
AGAIN: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", default="leaderboard", metavar="NAME", help=f"one of {', '.join(SIZES)} (leaderboard)")
    add("--layers", type=lab.positive, metavar="N", help="instead of the size's layers")
    add("--context", type=lab.positive, metavar="N", help="tokens of a sequence (32768; 16384 with --attention)")
    add("--batch", type=lab.positive, default=2, metavar="N", help="sequences of a step, one at a time (2)")
    add("--impl", choices=IMPLS, default="ridgeline", help="whose ops (ridgeline)")
    add("--warmups", type=lab.whole, default=1, metavar="N", help="steps before the timed ones (1)")
    add("--steps", type=lab.positive, default=3, metavar="N", help="timed steps (3)")
    add("--memory", type=float, metavar="GB", help="the limit of the plan, in 10^9 bytes (141, or the device's)")
    add("--rate", type=float, default=RATE / 1e12, metavar="TFLOPS", help="rate of products for the floor (660)")
    add("--bandwidth", type=float, default=BANDWIDTH / 1e12, metavar="TB/S", help="bandwidth for the floor (4.27)")
    add("--dry", action="store_true", help="print the plan and its memory; needs no GPU")
    add("--attention", action="store_true", help="the board of 2025: 16 heads of 64, causal, forward and backward")
    add("--warm-cache", action="store_true", help="use the compile cache of earlier runs instead of an empty one")
    add("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    add("--seed", type=lab.whole, default=0, metavar="N", help="of weights and data (0)")
    add("--record", type=Path, metavar="FILE", help="append the row to this file of JSON lines")
    add("--json", action="store_true", help="print JSON")


def kept(shape: Size, policy: str, width: int = 2) -> int:
    """Returns the bytes per token that a layer keeps for backward, by formula. width: bytes of an element."""
    h, f = shape.width * width, shape.hidden * width
    q, kv, rows = shape.heads * shape.dim * width, shape.groups * shape.dim * width, 4 * shape.heads
    normed = (q + kv + 4 * (shape.heads + shape.groups)) * shape.qk_norm  # q and k before their norms, and 1 / rms
    if policy == "layer":
        return 2 * h  # what the layer before adds, and the stream
    attention = 2 * h + 2 * q + 2 * kv + normed + rows + 4  # sum and norm; q, o; k, v; lse; 1 / rms
    if policy == "mlp":
        return attention + h  # what attention adds
    return attention + 2 * h + 4 + (2 if policy == "gate" else 3) * f  # the sum and its norm; gate, up and product


def again(shape: Size, policy: str, context: int, rate: float, bandwidth: float) -> float:
    """Returns the seconds per token that a layer's recomputation takes at these rates.

    It stops before the down product, whose result backward does not need."""
    products = 2 * (shape.per_layer - 2 * shape.width - shape.width * shape.hidden) / rate
    if policy == "layer":
        return products + shape.scores(1, context) / shape.layers / context / rate
    if policy == "mlp":
        return 4 * shape.width * shape.hidden / rate + 8 * shape.width / bandwidth
    return 6 * shape.hidden / bandwidth if policy == "gate" else 0.0


@dataclass
class Plan:
    """A step's memory in bytes by part, and the policy of each layer. `peak`: the largest sum that a step reaches."""

    shape: Size
    context: int
    batch: int
    limit: float
    policies: list[str]
    rate: float
    bandwidth: float
    parts: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        s, tokens = self.shape, self.context
        head = s.vocabulary * s.width * 2
        self.parts = {
            "weights": 2.0 * s.parameters,
            "gradients": 2.0 * s.parameters,
            "moments": 4.0 * s.parameters,
            "activations": float(tokens * sum(kept(s, p) for p in self.policies)),
            # a fourth of the logits, the gradients of the last layer's input and weight, and that input
            "loss": tokens * s.vocabulary * 2 / 4 + head + 2 * tokens * s.width * 2,
            "backward of a layer": self._backward(),
            "reserve": RESERVE,
        }

    def _backward(self) -> float:
        """Bytes that the last layer's backward needs beyond what is kept: gradients, and what it makes again."""
        s, last = self.shape, self.policies[-1]
        remade = self.context * (kept(s, "keep") - kept(s, last))
        return remade + self.context * (6 * s.hidden + 8 * s.width) + 2 * s.width * s.hidden

    @property
    def peak(self) -> float:
        """Bytes: at the loss, or in the backward of the last layer, whichever is more."""
        passing = "loss", "backward of a layer"
        return sum(b for n, b in self.parts.items() if n not in passing) + max(self.parts[n] for n in passing)

    @property
    def floor(self) -> dict[str, float]:
        """The seconds of a step if products and attention run at the lasting rate and the rest at the bandwidth."""
        s, tokens = self.shape, self.context * self.batch
        heads = s.heads * s.dim + s.groups * s.dim
        per_layer = 32 * s.width + 8 * heads + 10 * s.hidden  # bytes of norms, rotations, and the gate's backward
        moved = tokens * (s.layers * per_layer + 4 * s.vocabulary) + 14 * s.parameters
        again_ = sum(again(s, p, self.context, self.rate, self.bandwidth) for p in self.policies)
        return {
            "products": 3 * s.products(tokens) / self.rate,
            "attention": s.scores(self.batch, self.context) * 7 / 2 / self.rate,
            "recomputation": tokens * again_,
            "rest": moved / self.bandwidth,
        }


def planned(shape: Size, context: int, batch: int, limit: float, rate: float, bandwidth: float) -> Plan:
    """Returns the plan with the least recomputation that fits: each layer takes the upgrade that saves most per byte.

    The last layers keep the most: their backward runs first, while all others still hold their memory.
    Raises RidgelineError if even a step that makes every layer again does not fit."""
    make = partial(Plan, shape, context, batch, limit, rate=rate, bandwidth=bandwidth)
    plan = make(policies=["layer"] * shape.layers)
    if plan.peak > limit:
        raise RidgelineError(
            f"lm leaderboard: {batch} x {context} tokens need at least {plan.peak / 1e9:.1f} GB, "
            f"and the limit is {limit / 1e9:.1f} GB"
        )

    cost = {p: again(shape, p, context, rate, bandwidth) for p in POLICIES}
    room = {p: kept(shape, p) for p in POLICIES}
    tight: set[tuple[str, str]] = set()  # upgrades that no longer fit

    def gain(low: str, high: str) -> float:
        return (cost[low] - cost[high]) / (room[high] - room[low])

    while upgrades := [
        (low, high)
        for low in set(plan.policies)
        for high in POLICIES[POLICIES.index(low) + 1 :]
        if (low, high) not in tight and gain(low, high) > 0
    ]:
        low, high = max(upgrades, key=lambda pair: gain(*pair))
        layer = max(n for n, policy in enumerate(plan.policies) if policy == low)
        policies = sorted([*plan.policies[:layer], high, *plan.policies[layer + 1 :]], key=POLICIES.index)
        if (better := make(policies=policies)).peak <= limit:
            plan = better
        else:
            tight.add((low, high))
    return plan


class Planned(Transformer):
    """The language model, each layer of which keeps what its policy says."""

    def __init__(self, shape: Size, policies: Sequence[str], impl: str = "ridgeline") -> None:
        super().__init__(shape, impl)
        self.policies, self.silu_mul = policies, called("silu_mul", impl)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x, stream = self.model.embed_tokens(tokens), None
        cos, sin = (t.to(x.dtype) for t in self.rotations(tokens.shape[1], tokens.device))
        for layer, policy in zip(self.model.layers, self.policies, strict=True):
            x, stream = self._run(layer, policy, x, stream, cos, sin)
        return self.model.norm(x, stream)[0]

    def _run(self, layer: Any, policy: str, x: torch.Tensor, stream: Any, cos: Any, sin: Any) -> Any:
        if policy == "keep":
            return layer(x, stream, cos, sin)
        if policy == "layer":
            return AGAIN(layer, x, stream, cos, sin)
        n, stream = (layer.input_layernorm(x), x) if stream is None else layer.input_layernorm(x, stream)
        a = layer.self_attn(n, cos, sin)
        if policy == "mlp":
            return AGAIN(partial(self._mlp, layer), a, stream)
        n, stream = layer.post_attention_layernorm(a, stream)
        return AGAIN(partial(self._down, layer), layer.mlp.gate_proj(n), layer.mlp.up_proj(n)), stream

    def _mlp(self, layer: Any, a: torch.Tensor, stream: torch.Tensor) -> Any:
        n, stream = layer.post_attention_layernorm(a, stream)
        return layer.mlp(n), stream

    def _down(self, layer: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Backward needs this product's input alone, so the recomputation stops before the product."""
        return F.linear(self.silu_mul(gate, up), layer.mlp.down_proj.weight)


def counted(shape: Size, policy: str, context: int) -> float:
    """Returns the bytes per token that a layer keeps, counted on the meta device for the kernels of an H200."""
    both = [_saved(replace(shape, layers=layers), [policy] * layers, context) for layers in (2, 3)]
    return (both[1] - both[0]) / context


def _saved(shape: Size, policies: list[str], context: int) -> int:
    storages: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        held.append(tensor)  # so that no other storage takes its address
        return tensor

    with narrow(), torch.device("meta"), devices.pretend("h200"):
        model = Planned(shape, policies)
        tokens = torch.empty(1, context, dtype=torch.long)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = model.hidden(tokens)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    del x
    return sum(count for at, count in storages.items() if at not in weights)


class narrow:
    """A context in which new tensors are bfloat16."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(self.before)


class Board:
    """The model, data and optimizer of a plan on a device; `step()` runs one training step and returns its loss."""

    def __init__(self, plan: Plan, device: torch.device, seed: int = 0, impl: str = "ridgeline") -> None:
        torch.manual_seed(seed)
        with narrow(), torch.device(device):
            self.model = Planned(plan.shape, plan.policies, impl)
            self.tokens = torch.randint(plan.shape.vocabulary, (plan.batch, plan.context + 1))
        own = ridgeline.optim.AdamW if impl == "ridgeline" else torch.optim.AdamW
        self.optimizer = own(self.model.parameters(), lr=1e-4)

    def gradients(self) -> torch.Tensor:
        """Adds up the gradients of all sequences in place, one at a time, and returns the mean loss."""
        total = torch.zeros((), device=self.tokens.device, dtype=torch.float32)
        for row in self.tokens:
            loss = self.model(row[None, :-1], row[None, 1:]) / len(self.tokens)
            loss.backward()
            total += loss.detach()
        return total

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients()
        self.optimizer.step()
        return loss


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns the plan of the flags, for an H200 if it is only printed."""
    shape = size(options.size, layers=options.layers)
    limit = LIMIT if options.dry else min(LIMIT, lab.memory_of(chosen_device(options)))
    limit = options.memory * 1e9 if options.memory else limit
    for name in ("rate", "bandwidth"):
        if not getattr(options, name) > 0:
            raise RidgelineError(f"lm leaderboard: --{name} must be above 0, and is {getattr(options, name)}")
    rates = options.rate * 1e12, options.bandwidth * 1e12
    return planned(shape, options.context or 32_768, options.batch, limit, *rates)


def described(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain values."""
    return {
        "parameters": plan.shape.parameters,
        "context": plan.context,
        "batch": plan.batch,
        "limit_bytes": plan.limit,
        "peak_bytes": plan.peak,
        "bytes": plan.parts,
        "policies": plan.policies,
        "floor_seconds": plan.floor,
    }


def show_plan(plan: Plan, counts: dict[str, float]) -> None:
    s = plan.shape
    rows = [[name, f"{amount / 1e9:.1f} GB"] for name, amount in plan.parts.items()]
    rows.append(["peak", f"{plan.peak / 1e9:.1f} GB"])
    rows.append(["limit", f"{plan.limit / 1e9:.1f} GB"])
    title = f"{s.parameters / 1e9:.2f} B parameters, {plan.batch} x {plan.context} tokens, one sequence at a time"
    lab.print_table(title, ["memory"], [""], rows)
    rows = []
    for policy in POLICIES:
        price = plan.context * again(s, policy, plan.context, plan.rate, plan.bandwidth)
        own = [f"{kept(s, policy):,} B", f"{counts[policy]:,.0f} B" if counts else units.DASH, units.seconds(price)]
        rows.append([policy, str(plan.policies.count(policy)), *own])
    lab.print_table("layers", ["policy"], ["layers", "keeps, a token", "counted", "recomputation, a sequence"], rows)
    lab.say("the peak has the loss or the backward of a layer, whichever is more: they do not meet")


def show_floor(plan: Plan, measured: dict[str, float] | None = None) -> None:
    floor = plan.floor
    rows = [[name, units.seconds(value)] for name, value in floor.items()]
    rows.append(["floor", units.seconds(sum(floor.values()))])
    if measured:
        rows.append(["measured", f"{units.seconds(measured['median'])} {units.spread(measured)}"])
        rows.append(["floor / measured", units.percent(sum(floor.values()) / measured["median"])])
    rates = f"{plan.rate / 1e12:.0f} TFLOP/s and {plan.bandwidth / 1e12:.2f} TB/s"
    lab.print_table(f"a step at {rates}, nothing overlapped", ["part"], ["time"], rows)


@contextmanager
def empty_cache() -> Iterator[None]:
    """Makes Triton and torch.compile use a new, empty cache folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="ridgeline-", ignore_cleanup_errors=True) as folder:
        os.environ.update(TRITON_CACHE_DIR=f"{folder}/triton", TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor")
        yield


def timed(plan: Plan, options: argparse.Namespace, started: float) -> dict[str, Any]:
    """Runs the steps and returns the row: seconds, those of the first step and of the whole command, peak memory."""
    device = chosen_device(options)
    gpu = device.type == "cuda"
    if gpu:  # segments that grow leave no gaps between activations of different sizes
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    board = Board(plan, device, options.seed, options.impl)

    def one() -> tuple[float, float]:
        lab.synchronize(device)
        start = time.perf_counter()
        loss = board.step().item()
        lab.synchronize(device)
        return time.perf_counter() - start, loss

    steps = [one() for _ in range(options.warmups + options.steps)]
    return {
        "seconds": lab.figures([seconds for seconds, _ in steps[options.warmups :]]),
        "first_step_seconds": steps[0][0],
        "losses": [loss for _, loss in steps],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "whole_seconds": time.perf_counter() - started,
        "empty_cache": not options.warm_cache,
    }


def attention_board(options: argparse.Namespace) -> dict[str, Any]:
    """Times the board of 2025: attention with 16 heads of 64, causal, one sequence, forward and backward."""
    device, context = chosen_device(options), options.context or 16_384
    dtype = torch.bfloat16
    q, k, v = (torch.randn(1, 16, context, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def step(attend: Callable[..., torch.Tensor]) -> None:
        attend(q, k, v, causal=True).sum().backward()
        q.grad = k.grad = v.grad = None

    names = list(dict.fromkeys([options.impl, "torch"]))
    found = lab.measure({name: partial(step, called("attention", name)) for name in names}, device, options.steps)
    flops = 4 * 16 * 64 * (context * (context + 1) // 2) * 7 // 2
    floor = flops / options.rate / 1e12
    seconds = {name: one.seconds for name, one in found.items()}
    return {"context": context, "device": device.type, "flops": flops, "floor_seconds": floor, "seconds": seconds}


def main(options: argparse.Namespace) -> int:
    """Prints the plan with --dry, the attention board with --attention, else the timed step beside its floor."""
    started = time.perf_counter()
    if options.attention:
        row = attention_board(options)
        if not options.json:
            cells = [[n, units.seconds(s["median"]), units.spread(s)] for n, s in row["seconds"].items()]
            cells.append(["floor", units.seconds(row["floor_seconds"]), ""])
            title = f"attention, 16 heads of 64, {row['context']} tokens, causal, forward and backward"
            lab.print_table(title, ["impl"], ["time", "95%"], cells)
    else:
        plan = plan_of(options)
        row = described(plan)
        if options.dry:
            row["counted_bytes"] = {p: counted(plan.shape, p, plan.context) for p in POLICIES}
        else:
            with nullcontext() if options.warm_cache else empty_cache():
                row |= timed(plan, options, started)
        if not options.json:
            show_plan(plan, row.get("counted_bytes", {}))
            show_floor(plan, row.get("seconds"))
        if not options.json and not options.dry:
            cache = "an empty" if row["empty_cache"] else "a warm"
            peak = f", peak {row['peak_memory_bytes'] / 1e9:.1f} GB" if row["peak_memory_bytes"] else ""
            lab.say(f"{row['whole_seconds']:.0f} s from {cache} compile cache (at most 600){peak}")
    if options.record:
        about = {"size": options.size, "board": "attention" if options.attention else "step", "impl": options.impl}
        lab.record(options.record, [about | row], "leaderboard")
    if options.json:
        print(json.dumps(row))
    return 0
