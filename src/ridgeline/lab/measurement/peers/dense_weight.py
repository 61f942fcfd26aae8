"""PyTorch's product of bfloat16 with 4-bit weights, and cuBLAS with a bfloat16 weight of the same shape.

Both take a weight in their own form, which is made once for each weight and kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "cuda"
_last: dict[str, tuple[Any, Any]] = {}  # by form: a reference to the codes, and what was made of them


def _form(name: str, q: torch.Tensor, make: Any) -> Any:
    if name not in _last or _last[name][0]() is not q:
        _last[name] = ref(q), make()
    return _last[name][1]


def _pack(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and (scale, zero) in tinygemm's order: w = (q - 8) scale + zero, the even k in the high half."""
    import torch

    codes = torch._convert_weight_to_int4pack((q << 4) | (q >> 4), 8)
    wide = scale.float()
    zeros = torch.zeros_like(wide) if zero is None else (8 - zero.float()) * wide
    return codes, torch.stack((wide, zeros), -1).transpose(0, 1).contiguous().bfloat16()


def _tinygemm(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: Any = None, **options: Any) -> torch.Tensor:
    import torch

    group = 2 * q.shape[1] // scale.shape[1]
    if x.dtype != torch.bfloat16 or options or group not in (32, 64, 128, 256):
        raise RidgelineError("tinygemm takes bfloat16 and groups of 32, 64, 128 or 256, and no other options")
    codes, both = _form("tinygemm", q, lambda: _pack(q, scale, zero))
    return torch._weight_int4pack_mm(x, codes, group, both)


def _cublas(kind: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *rest: Any, **options: Any) -> Any:
    import torch

    import ridgeline

    def dense() -> torch.Tensor:
        eye = torch.eye(x.shape[-1], device=x.device, dtype=x.dtype)
        plain: torch.Tensor = getattr(ridgeline, kind)(eye, q, scale, *rest, impl="torch", **options)
        return plain.T.contiguous()

    return torch.nn.functional.linear(x, _form(kind, q, dense))


def _of(kind: str) -> Any:
    return lambda *args, **options: _cublas(kind, *args, **options)


PEERS = {
    "int4_linear": {"tinygemm": _tinygemm, "cublas_bf16": _of("int4_linear")},
    "int8_linear": {"cublas_bf16": _of("int8_linear")},
    "mxfp4_linear": {"cublas_bf16": _of("mxfp4_linear")},
}
