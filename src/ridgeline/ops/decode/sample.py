"""sample: a token for each row of logits, drawn after top-k, top-p and min-p.

    w = exp((x - max x) / T) where allowed        keep the top_k largest, of these the fewest with top_p of their mass,
    and of these w >= min_p        token = the first i whose kept w[0..i] sum to more than u * the sum of all kept w

u is a 31-bit number that Philox gives for the counter (row, offset) and the seed. Equal logits rank by their index. The
kernel sums masses as whole numbers, so that no order changes a bit; the floor is one read of the logits.
Source: Holtzman et al., The curious case of neural text degeneration, 2020 (arXiv:1904.09751); Nguyen et al., Min-p
sampling, 2024 (arXiv:2407.01082); Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.decode import _sample_cluster, _sample_rows
from ridgeline.select import eager, run
from ridgeline.tiles.philox import words

MOST = 1 << 22  # columns whose masses fit 62 bits
TINY = 1e-37
Number = float | torch.Tensor


@kernel_op(
    "sample_fwd(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? mask, "
    "Tensor? seed, Tensor? offset, SymInt low, SymInt high, SymInt position, float t, int k, float p, float m, "
    "str? impl) -> (Tensor, Tensor)"
)
def _forward(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens and their log-probabilities, (B,)."""
    token = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    logprob = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    run(SAMPLE, "fwd", rest[-1], (token, logprob), logits, *rest[:-1])
    return token, logprob


def _column(value: Any, default: float, x: torch.Tensor) -> torch.Tensor:
    """A parameter as (B or 1, 1), rounded to float32 as kernels read it."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1, 1).float().to(x.dtype)
    return torch.full((1, 1), default if value is None else value, dtype=torch.float32, device=x.device).to(x.dtype)


def _drawn(
    x: torch.Tensor, *, temperature: Number = 1.0, top_k: int | torch.Tensor | None = None,
    top_p: Number | None = None, min_p: Number | None = None, mask: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None, offset: int | torch.Tensor | None = None, return_logprobs: bool = False,
) -> Any:  # fmt: skip
    """The definition, in x's precision, by one sort."""
    B, V = x.shape
    if mask is not None:
        x = x.masked_fill(~mask, -math.inf)
    t = _column(temperature, 1.0, x)
    k = top_k.reshape(-1, 1).clamp(1, V) if isinstance(top_k, torch.Tensor) else min(top_k or V, V)
    k = torch.where(t < TINY, 1, k)
    p, m, t = _column(top_p, 1.0, x), _column(min_p, 0.0, x), torch.where(t < TINY, 1, t)
    ordered, index = x.sort(dim=1, descending=True, stable=True)
    top, rank = ordered[:, :1], torch.arange(V, device=x.device)
    z = torch.where(ordered == top, 0, (ordered - top) / t)
    w = torch.where(rank < k, z.exp(), 0)
    sums = w.cumsum(1)
    keep = (p >= 1) | (rank == 0) | (sums - w < p * sums[:, -1:])
    kept = torch.where(keep & ((w >= m) | (z == 0)), w, 0)
    q = torch.zeros_like(kept).scatter(1, index, kept)
    sums = q.cumsum(1)
    row = torch.arange(B, device=x.device)
    counter = torch.as_tensor(0 if offset is None else offset, device=x.device).long().reshape(()) & 0xFFFFFFFF
    given = torch.as_tensor(_seed() if seed is None else seed, device=x.device).reshape(())
    u = (words(given, row, counter.expand(B))[:, :1] >> 1).to(x.dtype) / 2**31
    token = (sums <= u * sums[:, -1:]).sum(1, keepdim=True).clamp(max=V - 1)
    none = x.isnan().any(1) | (top[:, 0] == -math.inf) | t.isnan()[:, 0]
    chance = (q.gather(1, token) / sums[:, -1:]).log()[:, 0].masked_fill(none, math.nan)
    token = token[:, 0].masked_fill(none, -1)
    return (token, chance) if return_logprobs else token


@torch.no_grad()
def reference(logits: torch.Tensor, **given: Any) -> Any:
    found = _drawn(logits.double(), **given)
    if not given.get("return_logprobs"):
        return found
    return found[0], found[1].to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def _torch(logits: torch.Tensor, **given: Any) -> Any:
    return _drawn(logits.to(torch.promote_types(logits.dtype, torch.float32)), **given)


def _seed() -> int:
    """A seed from PyTorch's CPU generator, without waiting for a GPU."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), device="cpu").item())


def _fault(logits: Any, mask: Any, numbers: dict[str, Any], places: dict[str, Any]) -> str | None:
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        return f"logits must be a floating-point tensor, but is {getattr(logits, 'dtype', type(logits).__name__)}"
    dense_only("sample", (logits,))
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST:
        return f"logits must be (B, V) with V from 1 to {MOST}, but is {tuple(logits.shape)}"
    B, V = logits.shape
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape not in ((B, V), (V,)):
            kind = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            return f"mask must be a bool tensor ({B}, {V}) or ({V},), True where a token is allowed, but is {kind}"
        if mask.device != logits.device:
            return f"mask must be on {logits.device} as logits are, but is on {mask.device}"
    for name, (value, low, high) in numbers.items():
        if isinstance(value, torch.Tensor):
            whole = name == "top_k"
            right = not value.is_complex() and value.is_floating_point() != whole and value.dtype != torch.bool
            if value.shape not in ((), (B,)) or value.device != logits.device or not right:
                found = f"{value.dtype} {tuple(value.shape)} on {value.device}"
                where = f"shape () or ({B},) on {logits.device}"
                kind = "whole" if whole else "floating-point"
                return f"{name} as a tensor must hold {kind} numbers of {where}, not {found}"
        elif value is not None or name == "temperature":
            types = (int,) if name == "top_k" else (int, float)
            if not isinstance(value, types) or isinstance(value, bool) or not low <= value <= high or value == math.inf:
                most = "" if high == math.inf else f" to {high}"
                kind_of = "an int" if name == "top_k" else "a number"
                return f"{name} must be {kind_of} from {low}{most} or a tensor, but is {value!r}"
    for name, value in places.items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.dtype != torch.int64 or value.device != logits.device:
                found = f"{value.dtype} {tuple(value.shape)} on {value.device}"
                return f"{name} as a tensor must be one int64 on {logits.device}, but is {found}"
        elif value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
            return f"{name} must be an int of 64 bits, an int64 tensor or None, but is {value!r}"
    return None


def _signed(bits: int) -> int:
    """The 32 low bits of a number, as a signed integer."""
    return (bits + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def sample(
    logits: torch.Tensor, *, temperature: float | torch.Tensor = 1.0, top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None, min_p: float | torch.Tensor | None = None,
    mask: torch.Tensor | None = None, seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None, return_logprobs: bool = False, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A token for each row, drawn from softmax(logits / temperature) after top-k, top-p and min-p. It has no gradients.

    logits: (B, V), floating point, any strides, V at most 2^22. A row with +inf draws evenly among those.
    temperature, top_k, top_p, min_p: numbers, or tensors () or (B,) on logits' device, whose values are not validated.
    They are read as float32. A temperature below 1e-37 takes the largest logit, the first of equal ones.
    top_k: how many of the largest logits stay, exactly; of equal logits those with lower indices.
    top_p: of what top_k leaves, the fewest largest whose mass is at least top_p of it, and at least one.
    min_p: of these, tokens with at least min_p times the largest probability.
    mask: (B, V) or (V,), bool: True where a token is allowed. Logits elsewhere are ignored, NaN too.
    seed, offset: ints, or one int64 on logits' device, which a CUDA graph reads anew. The same seed and offset draw the
    same tokens; offsets count modulo 2^32, and None is 0. A seed of None comes from PyTorch's CPU generator, or under
    torch.compile or in a CUDA graph from that of the device at every run.
    Returns the tokens (B,), int64, or with return_logprobs (tokens, their log-probabilities in the final distribution
    (B,), float32). A row that holds NaN, allows nothing (-inf everywhere) or has a NaN temperature gives -1 and NaN.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    numbers = {"temperature": (temperature, 0, math.inf), "top_k": (top_k, 1, math.inf)}
    numbers |= {"top_p": (top_p, 0, 1), "min_p": (min_p, 0, 1)}
    if wrong := _fault(logits, mask, numbers, {"seed": seed, "offset": offset}):
        raise RidgelineError(f"sample: {wrong}")
    logits = logits.detach()
    if seed is None and (
        torch.compiler.is_compiling() or (logits.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        seed = torch.randint(-(2**63), 2**63 - 1, (), device=logits.device)
    plain = eager(SAMPLE, impl, logits)
    if plain is not None and plain.call is not None:
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "mask": mask}
        return plain.call(logits, **given, seed=seed, offset=offset, return_logprobs=return_logprobs)
    B, V = logits.shape
    rows = [
        value.to(torch.int64 if name == "top_k" else torch.float32).expand(B).contiguous()
        if isinstance(value, torch.Tensor)
        else None
        for name, (value, _, _) in numbers.items()
    ]
    if seed is None:
        seed = _seed()
    whole = [0 if isinstance(n, torch.Tensor) else n or 0 for n in (seed, offset)]
    places = [n if isinstance(n, torch.Tensor) else None for n in (seed, offset)]
    t, k, p, m = (
        default if value is None or isinstance(value, torch.Tensor) else value
        for (value, _, _), default in zip(numbers.values(), (1.0, MOST, 1.0, 0.0), strict=True)
    )
    allowed = None if mask is None else mask.expand(B, V)
    halves = _signed(whole[0]), _signed(whole[0] >> 32), _signed(whole[1])
    found = _forward(logits, *rows, allowed, *places, *halves, float(t), min(k, MOST), float(p), float(m), impl)
    return found if return_logprobs else found[0]


def cost(logits: torch.Tensor, *, mask: torch.Tensor | None = None, **_: Any) -> tuple[Cost, None]:
    read = nbytes(logits) + (0 if mask is None else nbytes(mask))
    return Cost(read, 8 * logits.shape[0], 4 * logits.numel()), None


def _case(name: str, *shape: int, use: str = "check", **given: Any) -> Case:
    dtypes = ("float32", "bfloat16") if use == "bench" else ("float32", "float16", "bfloat16")
    return Case(name, (Spec(*shape, grad=False),), {**given, "seed": 11, "offset": 5}, dtypes, use)


LLAMA = 32, 128256
SAMPLE = Op(
    sample,
    reference=reference,
    cost=cost,
    flops={"sample_fwd": lambda logits, *_: 4 * logits.numel()},
    cases=[
        _case("5x37", 5, 37),
        _case("3x129 top-k 7", 3, 129, top_k=7),
        _case("3x101 top-p 0.7, logprobs", 3, 101, top_p=0.7, return_logprobs=True),
        _case("4x67 all filters", 4, 67, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05,
              mask=Spec(4, 67, dtype="bool", high=2)),
        _case("2x50 greedy", 2, 50, temperature=0.0),
        _case("4x4096 top-k 50, top-p 0.9", 4, 4096, top_k=50, top_p=0.9, use="quick"),
        _case("32x128256 top-k 50, top-p 0.9", *LLAMA, top_k=50, top_p=0.9, use="bench"),
        _case("32x128256 top-p 0.9", *LLAMA, top_p=0.9, use="bench"),
        _case("32x128256", *LLAMA, use="bench"),
    ],
)  # fmt: skip
SAMPLE.eager("naive", "the definition in float64: a sort, sums, and a search of the drawn mass", reference)
SAMPLE.eager("torch", "the same in float32", _torch, served=True)
SAMPLE.kernel(
    "triton",
    "no sort: a program per row finds the cuts bit by bit, in whole numbers",
    kind="triton",
    fwd=_sample_rows.fwd,
    served=True,
)
SAMPLE.kernel(
    "cuda_cluster",
    "a row in the registers of a thread-block cluster, read once; histograms find the cuts",
    kind="cuda",
    fwd=_sample_cluster.fwd,
    supports=_sample_cluster.fits,
    served=True,
    arch=90,
    newest=90,
)
