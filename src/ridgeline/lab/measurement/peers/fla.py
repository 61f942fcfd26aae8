"""flash-linear-attention's Triton kernels.

It searches configurations when a kind of call comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "fla", "flash-linear-attention", "triton"


def _options(scale: float | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the public ops by fla's names."""
    if options.pop("inplace", False):
        raise RidgelineError("fla returns a new state and has no step in place")
    given = {"scale": scale, "initial_state": options.pop("initial_state", None)}
    given["output_final_state"] = options.pop("return_state", False)
    if (ends := options.pop("cu_seqlens", None)) is not None:
        given["cu_seqlens"] = ends.long()
    return given | options


def _result(found: tuple[Any, Any], given: dict[str, Any]) -> Any:
    return found if given["output_final_state"] else found[0]


def _linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float = 1.0, **options: Any
) -> Any:  # fmt: skip
    from fla.ops.linear_attn import chunk_linear_attn

    given = _options(scale, options)
    return _result(chunk_linear_attn(q, k, v, normalize=False, **given), given)


def _gated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *, scale: float | None = None, **options: Any
) -> Any:
    given = _options(scale, options)
    if q.shape[1] == 1:
        from fla.ops.gla import fused_recurrent_gla
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        return _result(
            (fused_recurrent_simple_gla if g.dim() == 3 else fused_recurrent_gla)(q, k, v, g, **given), given
        )
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return _result((chunk_simple_gla if g.dim() == 3 else chunk_gla)(q, k, v, g, **given), given)


def _rwkv6(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, u: torch.Tensor, *, scale: float = 1.0,
    **options: Any
) -> Any:  # fmt: skip
    from fla.ops.rwkv6 import chunk_rwkv6

    given = _options(scale, options)
    return _result(chunk_rwkv6(r, k, v, w, u, **given), given)


def _rwkv7(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
    scale: float = 1.0, **options: Any
) -> Any:  # fmt: skip
    from fla.ops.rwkv7 import chunk_rwkv7

    given = _options(scale, options)
    return _result(chunk_rwkv7(r, w, k, v, a, b, **given), given)


def _delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    normalize: bool = False, scale: float | None = None, **options: Any
) -> Any:  # fmt: skip
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    given = _options(scale, options) | {"use_qk_l2norm_in_kernel": normalize}
    return _result((chunk_gated_delta_rule if g.dim() == 3 else chunk_kda)(q, k, v, g, beta, **given), given)


def _conv(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, activation: str | None = "silu") -> Any:
    from fla.modules.convolution import causal_conv1d

    return causal_conv1d(x, weight, bias, activation=activation)[0]


PEERS = {
    "linear_attention": _linear_attention,
    "gated_linear_attention": _gated,
    "rwkv6": _rwkv6,
    "rwkv7": _rwkv7,
    "gated_delta_rule": _delta,
    "causal_conv1d": _conv,
}
