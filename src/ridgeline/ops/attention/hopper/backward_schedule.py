"""The host's rules for backward on Hopper: which pieces of work come first, and which are split among programs."""

import heapq
from functools import lru_cache

import torch
import triton

from ridgeline import device
from ridgeline.ops.attention.hopper.packed_tiles import list_tiles


@lru_cache(1024)
def split_work(
    most: int, heads: int, down: bool, group: int, tiles: int, shift: int, left: int, right: int, wide: int,
    programs: int, prefix: int = 0
) -> tuple[int, int]:  # fmt: skip
    """Returns how many pieces, of `most` per head, stay whole, and into how many parts each of the others is split.

    Pieces of equal length are split in a last, partial round of programs. Pieces of unequal length are all split if
    heads share keys and there are at most two pieces per program. (With `group` 1 that is slower: a part waits for the
    head's first piece, whose parts end elsewhere.) Costs are in blocks of queries, from timings on an H100
    (docs/notes/attention.md): each piece or part has 256 / wide besides its own; a part's result costs a twelfth for
    the whole GPU, and the kernel that adds the parts 320 / wide. At most eight parts per program bound the memory.
    """
    # The blocks of queries that see a piece, as in `WorkScheduler.work`.
    ends = [
        (0 if n * 128 < prefix else n * 128 - right - shift, n * 128 + 127 + left - shift + 64) for n in range(most)
    ]
    lengths = [max(0, min(tiles, high // 64) - max(low, 0) // 64) for low, high in ends]
    longest, even, pieces = max(lengths), min(lengths) == max(lengths), most * heads
    rounds = pieces // programs if even else 0
    rest = pieces - rounds * programs
    if not even and (group == 1 or pieces > 2 * programs):
        return pieces, 1

    def end(parts: int) -> float:
        beside = rest * parts / 12 + 320 / wide if parts > 1 else 0
        own = group * triton.cdiv(longest, parts) + 256 / wide
        if even:
            return triton.cdiv(rest * parts, programs) * own + beside
        # Parts start in the order of their numbers. Many parts take longer than this, since they wait for each other.
        busy = [0.0] * programs
        for length in lengths[::-1] if down else lengths:
            costs = [group * ((n + 1) * length // parts - n * length // parts) + 256 / wide for n in range(parts)]
            for cost in costs * heads:
                heapq.heapreplace(busy, busy[0] + cost)
        return max(*busy, sum(busy) / programs + own / 4 if parts > 1 else 0) + beside

    parts = min((n for n in range(1, min(8, longest) + 1) if n == 1 or rest * n <= 8 * programs), key=end, default=1)
    least = 0.05 if wide == 128 else 0.01  # without persistent programs a partial last round costs less
    gains = end(1) - end(parts) > least * (rounds * (group * longest + 256 / wide) + end(1))
    return (rounds * programs, parts) if gains else (pieces, 1)


# Bytes of L2: an H200 (60 MiB) has more, and keeps what the programs of twice as many heads share; an H100 (50) has
# less.
ROOMY = 55 << 20


def heads_apart(pieces: int, group: int, parts: int, programs: int) -> int:
    """Returns into how many parts by heads of queries causal pieces are split, or 1 if `parts` by blocks are better.

    A part by heads has all blocks of some of the `group` heads that share keys. So all parts that add to a head begin
    at the same block and follow each other at once; parts by blocks begin and end elsewhere than those they wait for.
    As timed, it takes about four parts per program. If the heads cannot be divided so finely, parts by blocks must not
    be more, or two per program suffice. 8 heads on one of 8192 keys take 0.84 of the time at D 128, 0.81 at D 64.
    """
    most = max(n for n in range(1, group + 1) if group % n == 0 and pieces * n <= max(pieces, 4 * programs))
    return most if most >= parts or pieces * most >= 2 * programs else 1


def head_section(
    q: torch.Tensor, k: torch.Tensor, longest: int, span: int, ordered: bool, ahead: bool, back: bool, packed: bool,
    apart: int = 1
) -> tuple[int, bool]:  # fmt: skip
    """Returns how many heads form a section, and whether causal pieces come lightest first (`WorkScheduler.work`).

    All choices are from measurements on an H200 and an H100 (docs/notes/attention.md).

    With ordered sums, causal pieces wait least if the lightest come first, in sections whose q, do and sums fit in L2
    (4 heads at D 256; at most 16 above D 64 on an H100). But then the longest pieces come last. That costs more than
    waiting if one of them exceeds an eighth of a program's work (slightly more on an H100, a fourth at D 256), as with
    shared heads. All other sections exceed L2: four or more programs per head (eight at D 256) stay in step, and reuse
    what one of them has loaded. Windows, and full attention at D <= 64 without shared heads, gain nothing from that. An
    H100, with its smaller L2 and slower memory, needs twice as many programs per head above D 64, if a head has so
    many, and four times as many if heads are long and not shared: 8192 keys in ordered full attention, 16384 unordered.
    Parts by heads (`apart` of each piece) count as pieces of as many more heads of keys.
    """
    (batch, heads, _, D), (kv, columns) = q.shape, k.shape[1:3]
    turns, group, gpu = batch * kv * apart, heads // kv // apart, device.of(q)
    pieces = triton.cdiv(columns, span)  # of a head
    roomy = gpu.l2 > ROOMY
    share = 2 * gpu.multiprocessors / (turns * (pieces + 1))  # the longest causal piece as a share of a program's work
    light = share <= (1 / 4 if D > 128 else 1 / 8 if roomy else 0.128)
    down = ordered and ahead and (back or (roomy or group == 1 if packed else light))
    shared = 8 * max(1, longest) * D * group  # bytes of q, do and dq's sums that the programs of a head share
    section = 4 if D > 128 and not packed else (24 << 20) // shared
    if down and D > 64 and not roomy:
        section = min(section, 16)
    if not down and not back:
        if D > 128:
            section = 8 if roomy and (ahead or not ordered) else 4
        elif D > 64 or ahead:
            long = pieces >= (64 if ordered else 128) and not (ordered and ahead) and not packed
            few = 4 if long and group == 1 else 8
            section = 16 if roomy or D <= 64 else max(few, gpu.multiprocessors // max(1, pieces))
            if (group > 1 and (roomy or ahead)) or (ordered and ahead):
                section *= 2
        elif group > 1:
            section = 8
    return max(1, min(turns, section)), down


def list_pieces(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, bottom: bool, left: int, right: int,
    span: int
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Returns the list of packed sequences' pieces, from the GPU, and an upper bound of their number."""
    # From the keys' side, left and right are swapped.
    return list_tiles(k, q, cu_k, cu_q, bottom, right, left, span, 64)
