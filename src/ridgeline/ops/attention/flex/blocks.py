"""BlockMask: which keys queries see, by blocks, so that the cost of attention follows the blocks with seen keys.

For each row of blocks there is a list: how many blocks are partly masked, how many are seen in full, and their numbers,
the partly masked ones first. Backward has the same lists by columns of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError
from ridgeline.ops.attention.flex.score import function_fault, function_of, key_of, tensors_fault
from ridgeline.ops.attention.flex.survey import count, dense_mask, write

PAD = 3  # numbers of a list beside its blocks: two counts, and one that the kernels read ahead


class BlockMask:
    """Which keys queries see, for `attention(..., block_mask=)`. `ridgeline.block_mask` makes it.

    shape: (B, H, Sq, Sk); B and H are 1 for all batches or heads alike. counts: the seen keys of each block. rows:
    (B, H, blocks of queries, 3 + blocks of keys), int32, the lists; columns: the same by blocks of keys. pairs: how
    many pairs see each other; it reads counts, so on a GPU it waits.
    """

    def __init__(
        self, function: Any, tensors: tuple[torch.Tensor, ...], counts: torch.Tensor, shape: tuple[int, ...],
        block: int, eager: Any,
    ) -> None:  # fmt: skip
        self.function, self.tensors, self.eager = key_of(function), tensors, eager
        self.shape, self.block, self.counts = shape, block, counts
        self.rows, self.columns = _lists(counts, block), _lists(counts.mT, block)
        self.facts = self.function, *shape, block, str(counts.device)
        self._pairs: int | None = None

    @property
    def pairs(self) -> int:
        if self._pairs is None:
            self._pairs = int(self.counts.sum(dtype=torch.int64))
        return self._pairs

    def expect(self, pairs: int) -> None:
        """Sets how many pairs see each other, where it is known without a look at the counts."""
        self._pairs = pairs

    def dense(self) -> torch.Tensor:
        """Returns the mask in memory, torch.bool of this mask's shape."""
        device = self.counts.device
        if self.eager is not None:
            b, h, i, j = [torch.arange(n, device=device) for n in self.shape]
            seen = self.eager(b[:, None, None, None], h[:, None, None], i[:, None], j, *self.tensors)
            return seen.expand(self.shape)
        seen = torch.empty(self.shape, dtype=torch.uint8, device=device)
        write(seen, function_of(self.function), self.tensors)
        return seen.bool()

    def __repr__(self) -> str:
        return f"BlockMask({', '.join(map(str, self.shape))}; blocks of {self.block})"


def _lists(counts: torch.Tensor, block: int) -> torch.Tensor:
    """Returns, for each row of blocks, how many are partly masked and full, their numbers, and one more number."""
    partly, full = (counts > 0) & (counts < block * block), counts == block * block
    order = torch.argsort(partly * 2 + full.int(), dim=-1, descending=True, stable=True)
    parts = partly.sum(-1, keepdim=True), full.sum(-1, keepdim=True), order, order[..., :1]
    return torch.cat([p.to(torch.int32) for p in parts], -1).contiguous()


def _of_dense(mask: torch.Tensor, block: int) -> BlockMask:
    mask = mask[(None,) * (4 - mask.dim())].contiguous()
    shape = tuple(mask.shape)
    rows, columns = shape[2:]
    padded = torch.nn.functional.pad(mask, (0, -columns % block, 0, -rows % block))
    counts = padded.unflatten(3, (-1, block)).unflatten(2, (-1, block)).sum((3, 5), dtype=torch.int32)
    steps = [0 if n == 1 else s for n, s in zip(shape, mask.stride(), strict=True)][:3]
    on_device = torch.tensor(steps, dtype=torch.int64, device=mask.device)
    tensors = mask.view(torch.uint8), on_device
    return BlockMask(dense_mask, tensors, counts, shape, block, lambda *_: mask)


def block_mask(
    mask: Any, B: int | None = None, H: int | None = None, Sq: int | None = None, Sk: int | None = None, *,
    tensors: Sequence[torch.Tensor] = (), block: int = 128, device: str | torch.device | None = None,
    eager: Callable[..., torch.Tensor] | None = None,
) -> BlockMask:  # fmt: skip
    """Returns a mask by blocks for `attention(..., block_mask=)`. It costs a pass over all pairs, so keep it.

    mask: torch.bool, True for keys that are seen, of (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk); the sizes are then its
    own. Or a `triton.jit` function (b, h, q, k, *tensors) of positions, int32, which broadcast; it returns True for
    keys that are seen. It must be elementwise, and is used again in blocks that are partly masked.
    B, H: for a function, the batches and heads of queries that it tells apart; None for all alike, with b or h 0.
    Sq, Sk: for a function, the queries and keys.
    tensors: at most three contiguous tensors that the function reads, given to it as pointers.
    block: the rows and columns of a block, a power of two from 32 to 1024.
    device: where attention will run; that of the tensors by default, else the current GPU, else the CPU.
    eager: the function in PyTorch, of tensors; on a CPU it is needed, since Triton runs on a GPU.
    Raises RidgelineError if an argument does not match the above.
    """
    if type(block) is not int or not 32 <= block <= 1024 or block & (block - 1):
        raise RidgelineError(f"block_mask: block must be a power of two from 32 to 1024, got {block!r}")
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool or not 2 <= mask.dim() <= 4 or not mask.numel():
            wanted = "torch.bool of (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), not empty"
            raise RidgelineError(f"block_mask: mask must be {wanted}, got {mask.dtype} {tuple(mask.shape)}")
        if tensors or eager is not None or any([n is not None for n in (B, H, Sq, Sk, device)]):
            raise RidgelineError("block_mask: with a tensor as mask, leave out sizes, device, tensors and eager")
        return _of_dense(mask, block)
    wrong = tensors_fault(tensors) or function_fault("mask", mask, ("b", "h", "q", "k"), tensors)
    for name, size in (("B", 1 if B is None else B), ("H", 1 if H is None else H), ("Sq", Sq), ("Sk", Sk)):
        if type(size) is not int or size < 1:
            wrong = wrong or f"{name} must be a positive int for a mask that is a function, got {size!r}"
    if wrong:
        raise RidgelineError(f"block_mask: {wrong}")
    shape = B or 1, H or 1, Sq or 0, Sk or 0
    place = torch.device(device) if device is not None else _home(tensors)
    if any([t.device.type != place.type for t in tensors]):
        raise RidgelineError(f"block_mask: tensors must be on the device {place}, but are on {tensors[0].device}")
    return _of_function(mask, tuple(tensors), shape, block, place, eager)


def _home(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of the tensors, or where kernels run."""
    if tensors:
        return tensors[0].device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _of_function(
    mask: Any, tensors: tuple[torch.Tensor, ...], shape: tuple[int, ...], block: int, device: torch.device, eager: Any
) -> BlockMask:
    blocks = [-(-n // block) for n in shape[2:]]
    if device.type == "cpu" and not INTERPRETED:
        if eager is None:
            raise RidgelineError("block_mask: on a CPU give eager=, the same function in PyTorch; Triton needs a GPU")
        index = [torch.arange(n) for n in shape]
        seen = eager(index[0][:, None, None, None], index[1][:, None, None], index[2][:, None], index[3], *tensors)
        counts = _of_dense(seen.expand(shape), block).counts
    else:
        counts = torch.empty((*shape[:2], *blocks), dtype=torch.int32, device=device)
        if device.type != "meta":
            count(counts, mask, tensors, (*shape[1:], block))
    return BlockMask(mask, tensors, counts, shape, block, eager)
