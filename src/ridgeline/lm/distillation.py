"""The loss of a student of a larger model: cross-entropy and the divergence from the teacher, without all logits.

    loss = (1 - w) cross_entropy(z, target) + w T^2 KL(softmax(t / T), softmax(z / T))        z = x W^T, t = y V^T
    dz = (1 - w) (softmax(z) - onehot(target)) + w T (softmax(z / T) - softmax(t / T)), over the number of rows

T^2 keeps the scale of the gradients (Hinton et al., Distilling the Knowledge in a Neural Network, 2015). A group of
rows is in memory at a time: its logits give both losses and dz, and dz gives its share of dx and dW at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

GROUP = 64 << 20  # logits of a group of rows at most, of either model


def divergence(logits: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the mean KL divergence of the softened student from the softened teacher, times temperature^2."""
    student, wanted = ((t.float() / temperature).log_softmax(-1).flatten(0, -2) for t in (logits, teacher))
    return F.kl_div(student, wanted, reduction="batchmean", log_target=True) * temperature**2


def _group(
    z: torch.Tensor, t: torch.Tensor, target: torch.Tensor, share: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of a group's losses, and the gradient of that sum by z. All are float32."""
    own, wide, wanted = z.log_softmax(-1), (z / temperature).log_softmax(-1), (t / temperature).log_softmax(-1)
    probable = wanted.exp()
    loss = (share - 1) * own.gather(-1, target[:, None]).sum()
    loss = loss + share * temperature**2 * (probable * (wanted - wide)).sum()
    dz = own.exp_()
    dz.scatter_add_(-1, target[:, None], dz.new_full((len(dz), 1), -1.0))
    dz.mul_(1 - share).add_(wide.exp_().sub_(probable), alpha=share * temperature)
    return loss, dz


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, y: Any, head: Any, target: Any, share: float, temperature: float) -> Any:
        rows, classes = len(x), len(weight)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x) if x.requires_grad else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        w, v = weight.to(x.dtype), head.to(y.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for some in torch.arange(rows).split(max(1, GROUP // classes)):
                part = slice(int(some[0]), int(some[-1]) + 1)
                loss, dz = _group((x[part] @ w.mT).float(), (y[part] @ v.mT).float(), target[part], share, temperature)
                total += loss / rows
                dz = (dz / rows).to(x.dtype)
                if dx is not None:
                    torch.mm(dz, w, out=dx[part])
                if dw is not None:
                    dw += dz.mT @ x[part]
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        made = [None if t is None else t * grad.to(t.dtype) for t in (dx, dw)]
        return *made, None, None, None, None, None


def loss(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, head: torch.Tensor, target: torch.Tensor, share: float,
    temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Returns the mixed mean loss in float32.

    x: (rows, width), the student's last layer's input, and weight (classes, width) that layer's. y and head: the
    teacher's. target: (rows,) classes. share: of the teacher in the loss. temperature: of both sides' logits."""
    found: torch.Tensor = _Loss.apply(x, weight, y, head, target, share, temperature)
    return found
