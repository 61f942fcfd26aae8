"""Products of groups and their gradients in Triton: by pointers, or with tma by the copy engine of Hopper."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.ops.experts import _products, _products_tma, _weight_grads, _weight_grads_tma

HOPPER, refusal, unless, whole = _products_tma.HOPPER, _products_tma.refusal, _products_tma.unless, _products_tma.whole
bias_grad = _weight_grads.bias_grad
rows_of = _products.rows_of


def product(tma: bool) -> Callable[..., None]:
    return _products_tma.product if tma else _products.product


def weight_grad(tma: bool) -> Callable[..., None]:
    return _weight_grads_tma.weight_grad if tma else _weight_grads.weight_grad


def fwd(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None, how: str,
    tma: bool = False
) -> None:  # fmt: skip
    product(tma)(y, _products.rows_of(x), w, offsets, bias, how)


def bwd(
    dw: torch.Tensor, db: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, how: str, add: bool,
    tma: bool = False
) -> None:  # fmt: skip
    """Fills dw and db if they have elements; add: adds to dw."""
    incoming = _products.rows_of(dy)
    if dw.numel():
        weight_grad(tma)(dw, _products.rows_of(x), incoming, x.shape[0], offsets, how, add)
    if db.numel():
        bias_grad(db, incoming, x.shape[0], offsets)
