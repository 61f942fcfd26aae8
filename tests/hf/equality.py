"""Training with and without Ridgeline: `python tests/hf/equality.py` prints PASS or FAIL with its figures.

A Llama with random weights learns a Markov chain in low precision: five times unpatched, from weights that differ by
up to half an ulp before they are rounded; once unpatched as a control; once patched; and once unpatched in high
precision. All runs see the same batches. The patched run passes if

    envelope   each of its losses lies within twice the envelope of the five,
    oracle     its losses are on average no farther from the high-precision run's than the farthest of the five's.

The envelope of a step has the five losses' middle, and as half-width their largest half-range within NEAR steps:
five losses of one step alone would leave out one in twenty steps of any further run. The control is judged alike.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any, NamedTuple

import torch

from ridgeline import hf

NEAR = 10  # steps
RUNS = 5


class Sizes(NamedTuple):
    layers: int = 4
    width: int = 1024
    vocabulary: int = 4096
    batch: int = 4
    length: int = 256
    steps: int = 200


LLAMA = Sizes()
TINY = Sizes(2, 64, 97, 2, 16, 30)


class Verdict(NamedTuple):
    """outside: steps out of twice the envelope; worst: the largest distance from its middle, in half-widths."""

    outside: int
    worst: float
    distance: float
    last: float


def _model(sizes: Sizes) -> Any:
    import transformers

    torch.manual_seed(0)
    heads = max(2, sizes.width // 64)
    config = transformers.LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.width * 3, num_hidden_layers=sizes.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.length, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def _shaken(model: Any, dtype: torch.dtype, seed: int) -> Any:
    """Returns a copy in dtype, whose weights were moved by up to half an ulp before rounding; seed 0 moves none."""
    made, draw = copy.deepcopy(model).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            ulp = torch.finfo(dtype).eps * 2.0 ** torch.frexp(p).exponent.sub(1)
            p.add_(ulp * (torch.rand(p.shape, generator=draw).to(p) - 0.5), alpha=float(seed > 0))
    return made.to(dtype)


def _batches(sizes: Sizes, device: str) -> torch.Tensor:
    """Sequences of a Markov chain: each token has four successors. (steps, batch, length)."""
    draw = torch.Generator().manual_seed(1)
    next_of = torch.randint(sizes.vocabulary, (sizes.vocabulary, 4), generator=draw)
    ids = [torch.randint(sizes.vocabulary, (sizes.steps, sizes.batch), generator=draw)]
    for _ in range(sizes.length - 1):
        ids.append(next_of[ids[-1], torch.randint(4, ids[-1].shape, generator=draw)])
    return torch.stack(ids, -1).to(device)


def _losses(model: Any, batches: torch.Tensor) -> torch.Tensor:
    model = model.to(batches.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=batches.is_cuda)
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def _verdict(losses: torch.Tensor, runs: torch.Tensor, oracle: torch.Tensor) -> Verdict:
    low, high = runs.amin(0), runs.amax(0)
    near = torch.nn.functional.max_pool1d((high - low)[None] / 2, 2 * NEAR + 1, 1, NEAR)[0]
    apart = (losses - (low + high) / 2).abs() / near.clamp_min(1e-300)
    distance = float((losses - oracle).abs().mean())
    outside = int((~(apart <= 2)).sum())  # a NaN is outside
    return Verdict(outside, float(apart.max()), distance, float(losses[-1]))


def compare(
    sizes: Sizes = LLAMA, device: str = "cuda", low: torch.dtype = torch.bfloat16, memory: str | None = None
) -> tuple[bool, list[str]]:
    """Returns whether the patched run passes, and the lines that say by how much.

    low: the runs' dtype; the oracle's is float32 for bfloat16 and float16, and float64 for float32.
    """
    start, model, batches = time.perf_counter(), _model(sizes), _batches(sizes, device)
    runs = torch.stack([_losses(_shaken(model, low, seed), batches) for seed in range(RUNS)])
    control = _losses(_shaken(model, low, RUNS), batches)
    patched = _shaken(model, low, 0)
    report = hf.patch(patched, memory=memory)
    ours = _losses(patched, batches)
    high = torch.float64 if low == torch.float32 else torch.float32
    oracle = _losses(_shaken(model, low, 0).to(high), batches)

    own = [float((run - oracle).abs().mean()) for run in runs]
    lines = []
    for name, losses in (("patched", ours), ("control", control)):
        v = _verdict(losses, runs, oracle)
        good = v.outside == 0 and v.distance <= max(own)
        lines.append(
            f"{'PASS' if good else 'FAIL'} {name}: {v.outside} of {sizes.steps} losses outside twice the envelope "
            f"(worst {v.worst:.2f} half-widths of 2), {v.distance:.3g} from {str(high)[6:]} "
            f"(unpatched {min(own):.3g} to {max(own):.3g}), last loss {v.last:.4f}"
        )
    passed = lines[0].startswith("PASS") and not report.fallbacks
    lines += [f"FAIL fell back: {line}" for line in report.fallbacks]
    first, last = float(runs[:, 0].mean()), float(runs[:, -1].mean())
    seconds = time.perf_counter() - start
    lines.append(f"unpatched {str(low)[6:]}: loss {first:.4f} to {last:.4f}; {seconds:.0f} s in all")
    return passed, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a tiny model in float32 on the CPU")
    parser.add_argument("--memory", choices=["recompute", "products"], help="passed to hf.patch")
    given = parser.parse_args()
    options: dict[str, Any] = {"sizes": TINY, "device": "cpu", "low": torch.float32} if given.cpu else {}
    passed, lines = compare(**options, memory=given.memory)
    print("\n".join(lines), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
