"""One step of a ring: every rank sends a tensor to one some places on, while it goes on computing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ridgeline.parallel import groups


class Arriving(NamedTuple):
    """A tensor on its way."""

    tensor: torch.Tensor
    work: Any
    sent: torch.Tensor  # kept until the transfer has ended

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


def pass_on(t: torch.Tensor, group: Any, by: int = 1) -> Arriving:
    """Starts to send t to the rank `by` places on, and to receive from as many places back.

    It is an all-to-all with one piece, so that no order of sends and receives can block."""
    world, rank = groups.size(group), groups.rank(group)
    t = t.contiguous()
    out, there, here = torch.empty_like(t), [0] * world, [0] * world
    there[(rank + by) % world] = here[(rank - by) % world] = t.numel()
    work = dist.all_to_all_single(out.view(-1), t.view(-1), here, there, group=group, async_op=True)
    return Arriving(out, work, t)
