"""How the products' kernels take matrices and sizes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A matrix with its strides."""

    data: Any
    row_stride: int
    column_stride: int


class Sizes(NamedTuple):
    """Those of a product of (M, K) and (K, N)."""

    M: int
    N: int
    K: int
