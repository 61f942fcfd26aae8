"""SyncBatchNorm: batch normalisation by the statistics of all ranks' batches, in one all-gather forward.

    a rank sends, per channel, its mean and M2 = sum (x - mean)^2, and its count n
    N = sum n,  mean = sum n_r mean_r / N,  M2 = sum M2_r + n_r (mean_r - mean)^2,  var = M2 / N
    y = (x - mean) rstd w + b,   rstd = (var + eps)^-1/2,   xh = (x - mean) rstd
    backward: db = sum dy,  dw = sum dy xh,  dx = w rstd (dy - (sum_all dy + xh sum_all dy xh) / N)

Means and squared differences, unlike sums of squares, lose nothing to cancellation. Ranks may have different counts,
also none. Backward sums two numbers a channel over the ranks.
Sources: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167); Chan, Golub and LeVeque, Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances, 1979.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.boundary import first_order
from ridgeline.op import RidgelineError, readable
from ridgeline.parallel import groups
from ridgeline.parallel.agreement import agree


class _Normalise(torch.autograd.Function):
    """x: (batch, channels, ...). Returns y, and the mean, variance and count of all ranks, without gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, group: Any) -> Any:
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, spread, count = _statistics(x.to(wide), group)
        variance = spread / count
        rstd = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        y = (x.to(wide) - _wide(mean, x)) * _wide(rstd if weight is None else rstd * weight.to(wide), x)
        y = y if bias is None else y + _wide(bias.to(wide), x)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, rstd, count = ctx.saved_tensors
        wide = mean.dtype
        xh, d = (x.to(wide) - _wide(mean, x)) * _wide(rstd, x), dy.to(wide)
        own = torch.stack([_over(d), _over(d * xh)])
        dx = None
        if ctx.needs_input_grad[0]:
            every = own.clone()
            if groups.size(ctx.group) > 1:
                dist.all_reduce(every, group=ctx.group)
            first, second = every / count
            scale = rstd if weight is None else rstd * weight.to(wide)
            dx = ((d - _wide(first, x) - xh * _wide(second, x)) * _wide(scale, x)).to(x.dtype)
        dw = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        db = own[0].to(weight.dtype if weight is not None else x.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _over(t: torch.Tensor) -> torch.Tensor:
    """Returns the sums over all dimensions but the channels'."""
    return t.sum([n for n in range(t.dim()) if n != 1])


def _wide(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, *[1] * (x.dim() - 2))


def _statistics(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each channel's mean, sum of squared differences from it, and the count, of all ranks."""
    count = x.numel() // max(1, x.shape[1])
    mean = _over(x) / max(1, count)
    spread = _over((x - _wide(mean, x)).square())
    world = groups.size(group)
    own = torch.cat([mean, spread, mean.new_full((1,), count)])
    found = own.new_empty((world, own.numel()))
    if world == 1:
        found[0] = own
    else:
        groups.all_gather(found.view(-1), own, group=group)
    means, spreads, counts = found[:, : x.shape[1]], found[:, x.shape[1] : -1], found[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, (spreads + counts * (means - mean).square()).sum(0), total


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`, also on the CPU, with its arguments, parameters and state_dict.

    process_group: None means all ranks.
    forward: x, (batch, channels, ...), as many channels on every rank. In training mode statistics are those of all
    ranks' batches, in float32; in evaluation mode, with running statistics, nothing is moved.
    Raises RidgelineError, on every rank, if channels differ, or if all batches together have fewer than two values a
    channel (on a GPU only with RIDGELINE_CHECK=1)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group, x = self.process_group, input
        wrong = None
        if x.dim() < 2 or x.shape[1] != self.num_features or not x.is_floating_point():
            given = f"{x.dtype} {tuple(x.shape)}"
            wrong = f"the input must be (batch, {self.num_features}, ...), floating point, got {given}"
        if not self.training and self.running_mean is not None:
            if wrong:
                raise RidgelineError(f"SyncBatchNorm: {wrong}")
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        agree("SyncBatchNorm", group, x, wrong, dtype=str(x.dtype))
        y, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps, group)
        if readable(count) and count < 2:
            raise RidgelineError(f"SyncBatchNorm: all ranks need at least two values a channel, got {int(count)}")
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self._learn(mean, variance * (count / (count - 1)))
        return y

    def _learn(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics towards those of this step."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
