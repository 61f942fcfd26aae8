"""FlashInfer's decoding over a cache in pages, without the time of what it plans on the host once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.peers._caches import Step
from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "flashinfer", "flashinfer-python", "cuda"
WORKSPACE, PAGE = 128 << 20, 16
_last: dict[str, Any] = {}  # the plan of the newest call


def _decode(*args: torch.Tensor, **options: Any) -> torch.Tensor:
    step = Step.of("FlashInfer", *args, **options)
    if step.q.shape[1] != 1:
        raise RidgelineError("FlashInfer's decoding takes one query a sequence")
    caches = step.k, step.v
    if step.table is None:
        if step.k.shape[1] % PAGE or not step.k.is_contiguous():
            raise RidgelineError(f"FlashInfer is timed over contiguous caches of whole pages of {PAGE} tokens")
        caches = step.k.view(-1, PAGE, *step.k.shape[2:]), step.v.view(-1, PAGE, *step.v.shape[2:])
    # Identity, not equality: the host must not read the GPU.
    if _last.get("lengths") is not step.lengths or _last.get("table") is not step.table:
        _last.update(wrapper=_plan(step, caches[0]), lengths=step.lengths, table=step.table)
    found: torch.Tensor = _last["wrapper"].run(step.q[:, 0], caches)
    return found[:, None]


def _plan(step: Step, pages: torch.Tensor) -> Any:
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    held, page = step.lengths.tolist(), pages.shape[1]
    table = step.table
    if table is None:
        table = torch.arange(len(pages), device=pages.device, dtype=torch.int32).view(len(held), -1)
    used = [-(-n // page) for n in held]
    starts = torch.tensor([0, *used], device=pages.device).cumsum(0).to(torch.int32)
    indices = torch.cat([row[:count] for row, count in zip(table, used, strict=True)])
    last = torch.tensor([(n - 1) % page + 1 for n in held], dtype=torch.int32, device=pages.device)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=pages.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    sizes = step.q.shape[2], pages.shape[2], step.q.shape[3], page
    kinds = {"q_data_type": step.q.dtype, "kv_data_type": pages.dtype}
    wrapper.plan(starts, indices, last, *sizes, sm_scale=step.scale, **kinds)
    return wrapper


PEERS = {"decode_attention": _decode}
