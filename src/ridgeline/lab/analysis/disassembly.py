"""Read SASS, PTX and AMD assembly for access widths, matrix instructions and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from ridgeline.device import Device


@dataclass
class Instructions:
    """The instructions of a kernel, each counted once however often it runs.

    loads, stores: of global memory, by width in bytes ("16") or by unit ("tma": the copy engine). matrix: by
    instruction. spill_loads, spill_stores: bytes per thread moved from and to local memory.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    matrix: Counter[str] = field(default_factory=Counter)
    atomics: int = 0
    spill_loads: int = 0
    spill_stores: int = 0

    @property
    def widest_load(self) -> int:
        """Bytes of the widest load; a copy by the TMA unit counts as 128."""
        return max((128 if width == "tma" else int(width) for width in self.loads), default=0)


def _opcodes(text: str, pattern: str) -> Iterator[tuple[str, list[str], str]]:
    """(opcode, its suffixes, the whole line) of every instruction."""
    for match in re.finditer(pattern, text, re.MULTILINE):
        opcode, *suffixes = match[1].split(".")
        yield opcode, suffixes, match[0]


def read_sass(text: str) -> Instructions:
    """Reads what nvdisasm prints."""
    found = Instructions()
    for opcode, suffixes, _ in _opcodes(text, r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*).*$"):
        width = next((bytes_ for name, bytes_ in _SASS_WIDTHS.items() if name in suffixes), 4)
        if opcode in ("LDG", "LD", "LDGSTS"):
            found.loads[str(width)] += 1
        elif opcode in ("STG", "ST"):
            found.stores[str(width)] += 1
        elif opcode == "UTMALDG" or (opcode == "UBLKCP" and suffixes[:1] == ["S"]):
            found.loads["tma"] += 1
        elif opcode in ("UTMASTG", "UTMAREDG", "UBLKCP"):
            found.stores["tma"] += 1
        elif opcode in ("RED", "REDG", "ATOM", "ATOMG"):
            found.atomics += 1
        elif opcode == "LDL":
            found.spill_loads += width
        elif opcode == "STL":
            found.spill_stores += width
        elif opcode.endswith("MMA"):
            found.matrix[".".join([opcode, *(s for s in suffixes if s.upper() == s or re.match(r"\d+x\d+", s))])] += 1
    return found


def unwritten(text: str) -> list[str]:
    """The uniform registers that SASS reads where no path has written them yet. A correct program has none.

    ptxas 12.8.93, which Triton 3.6 and 3.7 bring, makes some: it moves the sum that describes a product's operand in
    shared memory to the kernel's beginning, before the address that it adds to. The product then reads other rows, or
    memory that is not the block's. Registers written on one path alone count as written.
    """
    blocks: list[list[tuple[str, set[int], set[int]]]] = [[]]
    places, leaps = {}, {}  # a label's block; a block's branches
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            blocks.append([])
            places[label[1]] = len(blocks) - 1
        elif found := re.match(r"\s*(@!?U?P\w+\s+)?([A-Z]\w*)([.\w]*)\s*(.*?);", line):
            always, opcode, operands = found[1] is None or "PT" in found[1], found[2], found[4]
            blocks[-1].append((operands, *_uniform(opcode, found[3], operands)))
            if opcode in ("BRA", "BRX", "BRXU", "JMP", "JMX", "CALL", "WARPSYNC", "BSSY", "EXIT", "RET"):
                leaps[len(blocks) - 1] = (re.findall(r"\.L\w+", operands), opcode[-1] in "XU", opcode, always)
                blocks.append([])
    known: dict[int, set[int]] = {0: set()}
    waiting: list[int] = [0]
    faults: dict[int, set[int]] = {}
    while waiting:
        block = waiting.pop()
        written, faults[block] = set(known[block]), set()
        for _, reads, writes in blocks[block]:
            faults[block] |= reads - written
            written |= writes
        labels, anywhere, opcode, always = leaps.get(block, ([], False, "", False))
        after = [places[name] for name in (labels or (places if anywhere else ())) if name in places]
        if block + 1 < len(blocks) and not (always and opcode in ("BRA", "BRX", "BRXU", "JMP", "JMX", "EXIT", "RET")):
            after.append(block + 1)
        for other in after:
            if other not in known or written - known[other]:
                known[other] = known.get(other, set()) | written
                waiting.append(other)
    return [f"UR{n}" for n in sorted(set().union(*faults.values()))]


def _uniform(opcode: str, suffixes: str, operands: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads and writes. A product reads four; if its left side is in
    registers, the first two are free."""
    first, _, rest = operands.partition(",")
    if opcode in ("R2UR", "ELECT", "VOTEU") and re.fullmatch(r"\s*U?P\w+\s*", first):
        first, _, rest = rest.partition(",")
    target = re.fullmatch(r"\s*UR(\d+)\s*", first)
    count = 4 if ".128" in suffixes else 2 if ".64" in suffixes or ".WIDE" in suffixes else 1
    writes = set(range(int(target[1]), int(target[1]) + count)) if target else set()
    reads = set()
    for kind, number in re.findall(r"(g?desc\[)?\bUR(\d+)\b", rest if target else operands):
        n = int(number)
        left = kind == "gdesc[" and re.match(r"\s*R\d", rest)
        reads |= set(range(n + 2 if left else n, n + {"gdesc[": 4, "desc[": 2}.get(kind, 1)))
    return reads, writes


_SASS_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def read_ptx(text: str) -> Instructions:
    """Reads PTX. Spills are not in it: they are made later, by ptxas."""
    found = Instructions()
    for opcode, suffixes, line in _opcodes(text, r"^\s*(?:@!?%?\w+\s+)?(?:\{\s*)?([a-z]\w*\.[\w.:]+).*$"):
        if opcode in ("ld", "st") and "global" in suffixes:
            (found.loads if opcode == "ld" else found.stores)[str(_ptx_width(suffixes))] += 1
        elif opcode == "cp" and "bulk" in suffixes:
            spaces = [s for s in suffixes if s == "global" or s.startswith("shared")]
            if spaces:
                (found.stores if spaces[0] == "global" else found.loads)["tma"] += 1
        elif opcode == "cp" and suffixes[0] == "async" and "global" in suffixes:
            size = re.search(r"\]\s*,\s*(?:0x([0-9a-f]+)|(\d+))", line)
            if size:
                found.loads[str(int(size[1], 16) if size[1] else int(size[2]))] += 1
        elif opcode in ("red", "atom") and not any(s.startswith("shared") for s in suffixes):
            found.atomics += 1
        elif opcode in ("mma", "wgmma", "tcgen05", "wmma") and suffixes[0] in ("mma", "mma_async", "sync"):
            shape = [s for s in suffixes if re.match(r"m\d+n\d+k\d+", s)]
            if shape or opcode == "tcgen05":
                found.matrix[
                    ".".join([opcode, *shape, *(s for s in suffixes if re.match(r"(b?f|tf|s|u|kind)\w*\d|kind", s))])
                ] += 1
    return found


def _ptx_width(suffixes: list[str]) -> int:
    lanes = next((int(s[1:]) for s in suffixes if re.fullmatch(r"v\d", s)), 1)
    return lanes * int(re.sub(r"\D", "", suffixes[-1])) // 8


def read_amdgcn(text: str) -> Instructions:
    """Reads AMD assembly."""
    found = Instructions()
    for opcode, _, _ in _opcodes(text, r"^\s+([a-z]\w+)\s.*$"):
        access = re.match(r"(global|buffer|flat|scratch)_(load|store)_(?:lds_)?([a-z]+\d?)", opcode)
        if access:
            space, what, size = access.groups()
            width = _AMD_WIDTHS[next(name for name in _AMD_WIDTHS if name in size)]
            if space == "scratch":
                found.spill_loads += width * (what == "load")
                found.spill_stores += width * (what == "store")
            else:
                (found.loads if what == "load" else found.stores)[str(width)] += 1
        elif re.match(r"(global|buffer|flat)_atomic_", opcode):
            found.atomics += 1
        elif re.match(r"v_s?mfma", opcode):
            found.matrix[opcode] += 1
    return found


_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1, "format": 4}
READERS = {"sass": read_sass, "ptx": read_ptx, "amdgcn": read_amdgcn}


def _tool(name: str) -> str:
    """The path of one of the CUDA binary tools that Triton's wheel brings along."""
    from triton import knobs

    return str(getattr(knobs.nvidia, name).path)


def _on_cubin(tool: str, options: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(tool), *options, file.name], capture_output=True, text=True, check=True).stdout


def sass(cubin: bytes, kernel: str) -> str:
    """The SASS of one kernel of a cubin, with the source lines it comes from. Takes about half a second."""
    text = _on_cubin("nvdisasm", ["-c", "-g"], cubin)
    return section(text, rf"^\.text\.{re.escape(kernel)}:$", r"^//-+ \.")


def section(text: str, start: str, end: str) -> str:
    """The lines from one that matches `start` up to the next that matches `end`; the whole text if none does."""
    begin = re.search(start, text, re.MULTILINE)
    if begin is None:
        return text
    after = re.compile(end, re.MULTILINE).search(text, begin.end())
    return text[begin.start() : after.start() if after else len(text)]


def usage(cubin: bytes, kernel: str) -> tuple[int, int]:
    """(registers per thread, bytes of stack per thread) of one kernel of a cubin."""
    text = section(_on_cubin("cuobjdump", ["-res-usage"], cubin), rf"Function {re.escape(kernel)}:", r"Function ")
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])  # type: ignore[index]


# Warps and blocks that can be resident on a multiprocessor, by compute capability: CUDA Programming Guide, section 5.1,
# and cuda_occupancy.h. Each multiprocessor has 65,536 registers; CUDA keeps 1 KiB of shared memory of each block.
RESIDENT = {80: (64, 32), 86: (48, 16), 89: (48, 24), 90: (64, 32), 100: (64, 32), 120: (48, 24)}


def occupancy(device: Device, threads: int, registers: int, shared: int) -> tuple[float, str]:
    """The share of a multiprocessor's warps that can be resident, and what limits it ("" for nothing).

    registers: per thread. shared: bytes per block.
    """
    warps = max(1, ceil(threads / device.warp))
    if device.backend == "hip":
        slots, blocks, memory, reserved = 32, 16, device.shared_memory, 0
        by_registers = 4 * min(8, 512 // max(8, ceil(registers / 8) * 8))
    else:
        (slots, blocks), reserved = RESIDENT[device.capability], 1024
        memory = device.shared_memory + reserved
        by_registers = 4 * (16_384 // max(256, ceil(registers * 32 / 256) * 256))
    limits = {
        "block size": slots // warps,
        "blocks": blocks,
        "registers": by_registers // warps,
        "shared memory": memory // (shared + reserved) if shared else slots,
    }
    limit = min(limits, key=lambda name: limits[name])
    resident = limits[limit] * warps
    return resident / slots, "" if resident == slots else limit
