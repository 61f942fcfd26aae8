"""Weights of 4 bits as files store them, to and from what `ridgeline.int4_linear` and `mxfp4_linear` take, exactly.

    GPTQ: qweight (K / 8, N), eight k of a column in a word, lowest first; qzeros (K / group, N / 8), version 1: minus 1
    AWQ:  qweight (K, N / 8), eight columns in a word, in the order 0 2 4 6 1 3 5 7; qzeros (K / group, N / 8)
    mxfp4: numbers of 4 bits, two to a byte, the even k low; a power of two for each 32 of K

Words are int32. All of it is plain PyTorch on any device; it runs once for a model.
Source: Frantar et al., GPTQ, 2022 (arXiv:2210.17323); Lin et al., AWQ, 2023 (arXiv:2306.00978); OCP Microscaling
Formats (MX) Specification, version 1.0, 2023, section 6.3, for how a block's scale is chosen.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import RidgelineError
from ridgeline.tiles import float4

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each 4 bits of a word, lowest first


def _unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Returns the 4-bit numbers (..., 8 n), uint8, of int32 words (..., n)."""
    places = torch.empty(8, dtype=torch.int32)
    places[list(order)] = torch.arange(8, dtype=torch.int32) * 4
    return ((words[..., None] >> places.to(words.device)) & 15).to(torch.uint8).flatten(-2)


def _packed(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Returns int32 words (..., n) of 4-bit numbers (..., 8 n)."""
    eights = numbers.to(torch.int64).unflatten(-1, (-1, 8))
    words = torch.zeros(eights.shape[:-1], dtype=torch.int64, device=numbers.device)
    for place, which in enumerate(order):
        words |= eights[..., which] << (4 * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def nibbles(q: torch.Tensor) -> torch.Tensor:
    """Returns the 4-bit numbers (N, K), uint8, of `int4_linear`'s q (N, K / 2)."""
    return torch.stack((q & 15, q >> 4), -1).flatten(1)


def pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Returns `int4_linear`'s q (N, K / 2) of 4-bit numbers (N, K), uint8."""
    return (numbers[:, ::2] | numbers[:, 1::2] << 4).contiguous()


def _require(op: str, name: str, t: Any, dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> None:
    if not isinstance(t, torch.Tensor):
        raise RidgelineError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    right = t.is_floating_point() if dtype is None else t.dtype == dtype
    if not right or t.dim() != 2 or (shape is not None and tuple(t.shape) != shape):
        wanted = f"{dtype or 'floating point'} {shape or 'with two dimensions'}"
        raise RidgelineError(f"{op}: {name} must be {wanted}, got {t.dtype} {tuple(t.shape)}")


def _index(op: str, g_idx: Any, K: int, groups: int) -> None:
    if g_idx is None:
        if not groups or K % groups:
            raise RidgelineError(f"{op}: without g_idx, the groups must divide K, got {groups} groups of K = {K}")
    elif not isinstance(g_idx, torch.Tensor) or tuple(g_idx.shape) != (K,) or g_idx.is_floating_point():
        found = f"{g_idx.dtype} {tuple(g_idx.shape)}" if isinstance(g_idx, torch.Tensor) else type(g_idx).__name__
        raise RidgelineError(f"{op}: g_idx must be int32 ({K},), got {found}")


def _version(op: str, version: Any) -> None:
    if version not in (1, 2):
        raise RidgelineError(f"{op}: version must be 1 (zeros stored minus 1) or 2, got {version!r}")


def unpack_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor | None = None, *,
    version: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns (q, scale, zero, g_idx) for `int4_linear` from a GPTQ layer's tensors.

    qweight: int32 (K / 8, N). qzeros: int32 (K / group, N / 8). scales: floating point (K / group, N).
    g_idx: (K,), each k's group, or None. It is None in the result too if it only counts k // group.
    version: 1 adds 1 to the stored zeros, so that 15 becomes 16; 2 (GPTQModel's "gptq_v2") takes them as they are.
    Raises RidgelineError if shapes or dtypes do not match.
    """
    op = "unpack_gptq"
    _version(op, version)
    _require(op, "qweight", qweight, torch.int32, None)
    K, N = 8 * qweight.shape[0], qweight.shape[1]
    _require(op, "scales", scales, None, None)
    groups = scales.shape[0]
    _require(op, "scales", scales, None, (groups, N))
    if N % 8:
        raise RidgelineError(f"{op}: qweight must have a multiple of 8 columns, got {N}")
    _require(op, "qzeros", qzeros, torch.int32, (groups, N // 8))
    _index(op, g_idx, K, groups)
    numbers = _unpacked(qweight.T, IN_ORDER)
    zero = (_unpacked(qzeros, IN_ORDER) + (1 if version == 1 else 0)).T.contiguous()
    in_order = g_idx is None
    if g_idx is not None and not K % groups:
        in_order = torch.equal(g_idx.long(), torch.arange(K, device=g_idx.device) // (K // groups))
    return pairs(numbers), scales.T.contiguous(), zero, None if in_order else g_idx


def pack_gptq(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, g_idx: torch.Tensor | None = None, *,
    version: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (qweight, qzeros, scales, g_idx) as GPTQ's files have them: the inverse of `unpack_gptq`.

    q: uint8 (N, K / 2). scale: (N, K / group). zero: uint8, alike, or None for 8. g_idx: (K,) or None for k // group.
    K and N must be multiples of 8. version 1 holds zeros of 1 to 16, version 2 of 0 to 15; others raise.
    """
    op = "pack_gptq"
    _version(op, version)
    K = _layer(op, q, scale, zero)
    _index(op, g_idx, K, scale.shape[1])
    zeros = torch.full_like(scale, 8, dtype=torch.uint8) if zero is None else zero
    least = 1 if version == 1 else 0
    stored = zeros.to(torch.int16) - least
    _in_range(op, stored, f"from {least} to {15 + least} in version {version}")
    if g_idx is None:
        g_idx = torch.arange(K, device=q.device, dtype=torch.int32) // (K // scale.shape[1])
    qweight = _packed(nibbles(q), IN_ORDER).T.contiguous()
    return qweight, _packed(stored.T, IN_ORDER), scale.T.contiguous(), g_idx.to(torch.int32)


def unpack_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (q, scale, zero) for `int4_linear` from an AWQ layer's tensors (its GEMM version).

    qweight: int32 (K, N / 8). qzeros: int32 (K / group, N / 8). scales: floating point (K / group, N).
    Raises RidgelineError if shapes or dtypes do not match, or if the groups do not divide K.
    """
    op = "unpack_awq"
    _require(op, "qweight", qweight, torch.int32, None)
    K, N = qweight.shape[0], 8 * qweight.shape[1]
    _require(op, "scales", scales, None, None)
    groups = scales.shape[0]
    _require(op, "scales", scales, None, (groups, N))
    _require(op, "qzeros", qzeros, torch.int32, (groups, N // 8))
    _index(op, None, K, groups)
    if K % 2:
        raise RidgelineError(f"{op}: K must be even, got {K}")
    numbers = _unpacked(qweight, AWQ_ORDER).T
    return pairs(numbers), scales.T.contiguous(), _unpacked(qzeros, AWQ_ORDER).T.contiguous()


def pack_awq(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (qweight, qzeros, scales) as AWQ's files have them: the inverse of `unpack_awq`.

    q: uint8 (N, K / 2). scale: (N, K / group). zero: uint8, alike, from 0 to 15, or None for 8. N: a multiple of 8.
    """
    op = "pack_awq"
    K = _layer(op, q, scale, zero, by_k=False)
    _index(op, None, K, scale.shape[1])
    zeros = torch.full_like(scale, 8, dtype=torch.uint8) if zero is None else zero
    _in_range(op, zeros, "from 0 to 15")
    return _packed(nibbles(q).T, AWQ_ORDER), _packed(zeros.T, AWQ_ORDER), scale.T.contiguous()


def _layer(op: str, q: Any, scale: Any, zero: Any, by_k: bool = True) -> int:
    """Returns K of a layer, or raises."""
    _require(op, "q", q, torch.uint8, None)
    _require(op, "scale", scale, None, None)
    N, K = q.shape[0], 2 * q.shape[1]
    _require(op, "scale", scale, None, (N, scale.shape[1]))
    if zero is not None:
        _require(op, "zero", zero, torch.uint8, tuple(scale.shape))
    if N % 8 or (by_k and K % 8):
        raise RidgelineError(f"{op}: {'N and K' if by_k else 'N'} must be a multiple of 8, got N = {N}, K = {K}")
    return K


def _in_range(op: str, stored: torch.Tensor, wanted: str) -> None:
    if stored.numel() and not bool(((stored >= 0) & (stored <= 15)).all()):
        raise RidgelineError(f"{op}: zeros must be {wanted}, and one is not")


def pack_mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q, scale) for `mxfp4_linear` from a weight, each number rounded to the nearest, ties to even.

    w: (N, K), floating point, K a multiple of 32. q: uint8 (N, K / 2). scale: uint8 (N, K / 32), 127 more than the
    power of two that puts a block's largest number between 4 and 8; what is then above 6 becomes 6. A block that holds
    NaN or an infinity has the scale 255, which is NaN.
    """
    op = "pack_mxfp4"
    _require(op, "w", w, None, None)
    if w.shape[1] % 32:
        raise RidgelineError(f"{op}: K must be a multiple of 32, got {w.shape[1]}")
    blocks = w.detach().double().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1)
    finite = largest.isfinite()
    exponent = torch.frexp(largest.where(finite, 1.0)).exponent - 3  # 2^2 <= largest / 2^exponent < 2^3
    scale = (exponent.clamp(-127, 127) + 127).where(largest > 0, 0)
    size = (blocks * torch.exp2(127.0 - scale.double())[..., None]).where(finite[..., None], 0.0)
    steps = torch.where(size.abs() < 2, 2.0, torch.where(size.abs() < 4, 1.0, 0.5))  # numbers are 1/2, 1 or 2 apart
    near = ((size.abs() * steps).round() / steps).clamp(max=6)
    levels = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64, device=w.device)
    codes = torch.searchsorted(levels, near.contiguous()).to(torch.uint8)
    codes |= size.signbit().to(torch.uint8) << 3
    return pairs(codes.flatten(1)), scale.where(finite, 255).to(torch.uint8)


def unpack_mxfp4(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the weight (N, K) of mxfp4 codes q (N, K / 2) and scales (N, K / 32), both uint8, in float32, exactly."""
    op = "unpack_mxfp4"
    _require(op, "q", q, torch.uint8, None)
    _require(op, "scale", scale, torch.uint8, (q.shape[0], q.shape[1] // 16))
    return float4.weight(q, scale, torch.float32)
