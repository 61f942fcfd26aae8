"""The cases of moe: weights in full, and of few bits."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Columns, Spec


class Scales(Spec):
    """Random float32 scales of about 0.01."""

    def make(self, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
        return super().make(torch.float32, *rest).detach().abs() / 64


class Powers(Spec):
    """Codes of mxfp4's scales, from 2^-8 to 2^-5."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args) + 119


def _case(
    T: int, E: int, k: int, H: int, I: int, use: str = "check", bias: bool = False, turned: bool = False,
    **options: Any
) -> Case:  # fmt: skip
    """turned: weights whose columns are contiguous, as gpt-oss has them. One measured token is a step of decoding."""
    options_named = [str(v) if n == "activation" else n for n, v in options.items()]
    name = [f"{T} tokens, {k} of {E} experts, {H} -> {I}", *options_named, *["columns"] * turned]
    weight, grad = Columns if turned else Spec, use != "bench" or T > 1
    tensors = (
        Spec(T, H, grad=grad),
        Spec(T, k, dtype="float32", grad=grad),
        Spec(T, k, dtype="int64", high=E),
        weight(E, 2 * I, H, grad=grad),
        weight(E, H, I, grad=grad),
    )
    options |= {"gate_up_bias": Spec(E, 2 * I, grad=grad), "down_bias": Spec(E, H, grad=grad)} if bias else {}
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    return Case(", ".join([*name, *["biases"] * bias]), tensors, options, dtypes=dtypes, use=use)


def _codes(kind: str, E: int, N: int, K: int, group: int) -> tuple[Spec, Spec]:
    """An expert weight's codes and scales."""
    if kind == "int8":
        return Spec(E, N, K, dtype="int8"), Scales(E, N, grad=False)
    codes = Spec(E, N, K // 2, dtype="uint8", high=256)
    if kind == "mxfp4":
        return codes, Powers(E, N, K // 32, dtype="uint8", high=4)
    return codes, Scales(E, N, K // group, grad=False)


def _few(
    kind: str, T: int, E: int, k: int, H: int, I: int, use: str = "check", group: int = 128, bias: bool = False,
    zero: bool = False, **options: Any
) -> Case:  # fmt: skip
    """Experts of few bits, for inference."""
    plain = _case(T, E, k, H, I, use, bias, **options)
    (gate_up, first), (down, second) = _codes(kind, E, 2 * I, H, group), _codes(kind, E, H, I, group)
    x, weights = Spec(T, H, grad=False), Spec(T, k, dtype="float32", grad=False)
    given = {n: Spec(*v.shape, grad=False) if isinstance(v, Spec) else v for n, v in plain.kwargs.items()}
    zeros = [Spec(*s.shape, dtype="uint8", high=16) for s in (first, second)]
    given |= {"scales": [first, second]} | ({"zeros": zeros} if zero else {})
    name = [plain.name, kind, *[f"groups of {group}"] * (kind == "int4"), *["zeros"] * zero]
    return Case(", ".join(name), (x, weights, plain.args[2], gate_up, down), given, dtypes=plain.dtypes, use=use)


OAI: dict[str, Any] = {"activation": "swiglu_oai", "limit": 7.0, "interleaved": True, "bias": True}
QWEN3, MIXTRAL, GPT_OSS = (128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880)
CASES = [
    _case(21, 5, 2, 24, 19),
    _case(6, 4, 3, 33, 16, bias=True, activation="swiglu_oai", limit=1.5, interleaved=True),
    _case(40, 3, 1, 16, 8, bias=True),
    _case(3, 9, 2, 17, 13, interleaved=True, limit=0.5),
    _case(30, 4, 2, 40, 24, turned=True, **OAI),
    _few("int4", 9, 5, 2, 96, 64, group=32, zero=True),
    _few("mxfp4", 7, 3, 2, 160, 96, **OAI),
    _few("int8", 6, 4, 3, 38, 18, limit=0.5),
    _case(128, 8, 2, 128, 64, "quick"),
    *(_case(T, *QWEN3, "bench") for T in (1, 64, 1024, 8192)),
    *(_case(T, *MIXTRAL, "bench") for T in (1, 64, 8192)),
    *(_case(T, *GPT_OSS, "bench", turned=True, **OAI) for T in (64, 8192)),
    *(_few("int4", T, *QWEN3, "bench") for T in (1, 64, 1024, 8192)),
    *(_few("mxfp4", T, *GPT_OSS, "bench", **OAI) for T in (1, 64, 8192)),
]
