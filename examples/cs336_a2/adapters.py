"""Ridgeline behind the adapters of Stanford CS336's assignment 2 (26.1.1): copy this file to its tests/adapters.py.

    cp examples/cs336_a2/adapters.py assignment2-systems/tests/adapters.py
    cd assignment2-systems && python -m pytest tests

Every test passes but test_fsdp_correctness[fp32]: it asks for weights bitwise equal to those of one process, whose
matrix products sum 20 rows at once, and not 10 on each of two ranks. torch's fully_shard fails it by the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline.parallel.data import BucketReplicas
from ridgeline.parallel.fsdp import FSDP
from ridgeline.parallel.optimizer import ShardedOptimizer


class _Flash(torch.autograd.Function):
    """Attention of (batch, queries, D) matrices. It saves q, k, v, the output and the logarithm of each row's sum."""

    impl = ""

    @classmethod
    def attend(cls, ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in (q, k, v)]
            heads = [t.unsqueeze(1) for t in given]
            o, lse = ridgeline.attention(*heads, causal=is_causal, return_lse=True, impl=cls.impl)
        ctx.given, ctx.o = given, o
        ctx.save_for_backward(q, k, v, o.detach().squeeze(1), lse.detach().squeeze(1))
        return o.detach().squeeze(1)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        return *torch.autograd.grad(ctx.o, ctx.given, do.unsqueeze(1), retain_graph=True), None


class FlashPyTorch(_Flash):
    """FlashAttention's tiles in plain PyTorch, forward and backward."""

    impl = "tiled"

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool = False) -> torch.Tensor:
        return FlashPyTorch.attend(ctx, q, k, v, is_causal)


class FlashTriton(_Flash):
    """The same by Ridgeline's Triton kernels, forward and backward."""

    impl = "triton"

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool = False) -> torch.Tensor:
        return FlashTriton.attend(ctx, q, k, v, is_causal)


def get_flashattention_autograd_function_pytorch() -> type:
    return FlashPyTorch


def get_flashattention_autograd_function_triton() -> type:
    return FlashTriton


def get_ddp(module: nn.Module) -> nn.Module:
    """Each gradient leaves as soon as backward has made it: buckets of one parameter."""
    return BucketReplicas(module, bucket_mb=0)


def ddp_on_after_backward(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    """The edition of 2025 asks for buckets."""
    return BucketReplicas(module, bucket_mb=bucket_size_mb)


def layers() -> tuple[type, ...]:
    """Returns the types whose weights are sharded: PyTorch's, and the course's where it is installed."""
    if not find_spec("cs336_basics"):
        return nn.Linear, nn.Embedding
    from cs336_basics.model import Embedding, Linear

    return nn.Linear, nn.Embedding, Linear, Embedding


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FSDP(module, compute_dtype, layers=layers())


def fsdp_on_after_backward(fsdp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: Any) -> dict[str, torch.Tensor]:
    return fsdp_model.full_state_dict()


def get_sharded_optimizer(
    params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
