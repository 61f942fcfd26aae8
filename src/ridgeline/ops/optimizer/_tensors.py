"""Many tensors in one launch: a table on the GPU holds their addresses, and each program takes a chunk of one tensor.

The table has eight numbers per tensor (or per group of tensors of one size, such as a parameter with its gradient and
moments): its elements, the number of its first chunk, and up to six addresses. A second table gives each chunk's
tensor. Both are written by kernels that receive the numbers as parameters: nothing is copied from the host, nothing
waits, and they can be captured in a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, launch

CHUNK = 8192
BATCH = 128  # numbers per launch
TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _write(table, numbers):
    """Writes numbers x given as 2 (x + 2^40) + 1, so that Triton has nothing to specialise on."""
    for k in tl.static_range(len(numbers)):
        tl.store(table + k, (numbers[k] >> 1) - (1 << 40))


@triton.jit
def _replace(column, numbers, count):
    """Writes numbers, given as `_write`'s, to every eighth place, a tensor's each."""
    for k in tl.static_range(len(numbers)):
        tl.store(column + 8 * k, (numbers[k] >> 1) - (1 << 40), mask=k < count)


@triton.jit
def _own(owners, table, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    count = (tl.load(table + tensor * 8) + CHUNK - 1) // CHUNK
    owners += tl.load(table + tensor * 8 + 1)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(owners + i, tl.full((BLOCK,), 0, tl.int32) + tensor, mask=i < count)


@triton.jit
def chunk_of(table, owners, chunk, CHUNK: tl.constexpr):
    """A chunk's entry in the table, its first element and its number of elements."""
    entry = table + tl.load(owners + chunk).to(tl.int64) * 8
    start = (chunk - tl.load(entry + 1)) * CHUNK
    return entry, start, tl.minimum(tl.load(entry) - start, CHUNK).to(tl.int32)


@triton.jit
def pointer(entry, k, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to the chunk in the entry's k-th tensor. ALIGNED: the tensor begins at a multiple of 16 bytes."""
    p = tl.load(entry + 2 + k).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p + start


class Table(NamedTuple):
    """Tensors of the same dtypes on one device, for a launch over their chunks. rows: the numbers of their rows."""

    table: torch.Tensor
    owners: torch.Tensor
    chunks: int
    aligned: bool
    dtypes: tuple[torch.dtype, ...]
    like: torch.Tensor  # empty, with the first dtype and the device
    rows: tuple[int, ...]


def tabled(rows: Sequence[tuple[torch.Tensor, ...]], extra: Sequence[torch.Tensor] = ()) -> list[Table]:
    """Tables for rows of tensors, each row of one size and one dense layout.

    There is one table per combination of dtypes, device and alignment. extra: a 0-d tensor per row, whose address
    follows the row's. Rows without elements are left out.
    """
    groups: dict[Any, list[int]] = {}
    for n, row in enumerate(rows):
        if row[0].numel():
            aligned = not any([t.data_ptr() & 15 for t in row])
            groups.setdefault((row[0].device, tuple([t.dtype for t in row]), aligned), []).append(n)
    found = []
    for (device, dtypes, aligned), members in groups.items():
        numbers, chunks = [], 0
        for n in members:
            row = (*rows[n], extra[n]) if extra else rows[n]
            entry = [row[0].numel(), chunks, *[t.data_ptr() for t in row]]
            numbers += entry + [0] * (8 - len(entry))
            chunks += -(-row[0].numel() // CHUNK)
        numbers += [0] * (-len(numbers) % BATCH)
        table = torch.empty(len(numbers), dtype=torch.int64, device=device)
        owners = torch.empty(chunks, dtype=torch.int32, device=device)
        for start in range(0, len(numbers), BATCH):
            launch(_write, (1,), table[start:], _plain(numbers[start : start + BATCH]), num_warps=1)
        launch(_own, (len(members),), owners, table, CHUNK=CHUNK, BLOCK=1024, num_warps=4)
        found.append(Table(table, owners, chunks, aligned, dtypes, rows[members[0]][0].new_empty(0), tuple(members)))
    return found


def _plain(numbers: Sequence[int]) -> tuple[int, ...]:
    """The numbers in a form that Triton does not specialise on; `_write` undoes it."""
    return tuple([2 * (x + (1 << 40)) + 1 for x in numbers])


class Known(NamedTuple):
    """Tables of an earlier call. addresses: of the tensors that may lie elsewhere in the next."""

    tables: list[Table]
    addresses: tuple[int, ...]


class Shelf:
    """Tables of earlier calls, by what they depend on.

    Gradients are new tensors at each step, and may lie elsewhere: then only their addresses are written. For the 311
    parameters of Qwen3 0.6B a step of AdamW takes the host 3 ms so, and 13 ms with new tables. Each thread has its own
    tables, since another could rewrite them before this one launches. column: which address of a row is the gradient's.
    """

    def __init__(self, column: int):
        self.column = column
        self.known: dict[Any, Known] = {}
        self.lock = threading.Lock()  # of removals

    def find(self, fixed: Any, grads: Sequence[torch.Tensor]) -> list[Table] | None:
        """The tables of a call, or None if they must be made. fixed: what else than the gradients they depend on."""
        key = address_key(grads)
        if key is None:
            return None
        addresses, form = key[2], self._form(fixed, key, grads)
        known = self.known.get(form)
        if known is None or known.addresses == addresses:
            return known and known.tables
        if not all([table.aligned for table in known.tables]) or any([a & 15 for a in addresses]):
            return None
        with self.lock:  # an interrupted rewrite leaves no entry
            self.known.pop(form, None)
        for table in known.tables:
            own = [addresses[n] for n in table.rows]
            for start in range(0, len(own), BATCH):
                some = own[start : start + BATCH]
                values = _plain(some + [0] * (BATCH - len(some)))
                launch(_replace, (1,), table.table[8 * start + 2 + self.column :], values, len(some), num_warps=1)
        self._put(form, Known(known.tables, addresses))
        return known.tables

    @staticmethod
    def _form(fixed: Any, key: Any, grads: Sequence[torch.Tensor]) -> Any:
        """All that a call's tables depend on but its gradients' addresses, and the thread.

        An address tells its device; the rest does not."""
        return threading.get_ident(), fixed, *key[:2], *key[3:], tuple(map(torch.Tensor.get_device, grads))

    def keep(self, fixed: Any, grads: Sequence[torch.Tensor], tables: list[Table]) -> None:
        """Keeps a call's tables; drops the oldest if there are too many."""
        key = address_key(grads)
        if key is None:
            return
        self._put(self._form(fixed, key, grads), Known(tables, key[2]))

    def _put(self, form: Any, known: Known) -> None:
        with self.lock:
            if form not in self.known and len(self.known) >= 64:
                self.known.pop(next(iter(self.known)), None)
            self.known[form] = known


def address_key(*lists: Sequence[torch.Tensor]) -> Any:
    """What tables and their checks depend on: each tensor's address, dtype, shape and strides, and the stream.

    Tables are written on the stream that uses them. Attribute by attribute is faster than tensor by tensor. None if
    tables are not kept: in a CUDA graph, which writes its own at each replay; for tensors without an address; on
    devices without kernels; and for invalid lists, which `checked` refuses.
    """
    stream = 0
    try:
        first = lists[0][0]
        if first.is_cuda:
            stream = torch._C._cuda_getCurrentRawStream(first.get_device())
            if devices.pretended() is not None or torch.cuda.is_current_stream_capturing():
                return None
        elif not INTERPRETED or first.is_meta:
            return None
        every = [t for some in lists for t in some]
        addresses, dtypes = tuple(map(torch.Tensor.data_ptr, every)), tuple([t.dtype for t in every])
        layouts = all(map(torch.Tensor.is_contiguous, every)) or tuple([t.stride() for t in every])
        return stream, tuple(map(len, lists)), addresses, dtypes, tuple([t.shape for t in every]), layouts
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None


def narrow(*args: Any) -> str | None:
    """Why the kernels cannot take the tensors' dtypes, or None."""
    for a in args:
        for table in a if isinstance(a, list) else [a]:
            wide = [d for d in table.dtypes if d not in TL] if isinstance(table, Table) else []
            if wide:
                return f"it takes {', '.join(str(d)[6:] for d in TL)}, but a tensor is {str(wide[0])[6:]}"
    return None


def dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, with dimensions in any order."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
