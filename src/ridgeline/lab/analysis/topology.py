"""What nvidia-smi tells of this machine's GPUs and of the links between them, in sentences."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ridgeline.op import RidgelineError

Row = dict[str, Any]
Said = tuple[str, str, bool]  # a subject, a sentence about it, and whether something is amiss
PATIENCE = 30  # seconds for one call
FIELDS = (
    "index", "name", "pci.bus_id", "persistence_mode", "mig.mode.current", "compute_mode",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
    "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "clocks_event_reasons.active",
    "temperature.gpu", "power.draw", "power.limit", "power.default_limit", "memory.used", "memory.total",
    "ecc.mode.current", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total", "utilization.gpu", "utilization.memory",
)  # fmt: skip
OLD = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # names that drivers before 535 know
LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s of a PCIe lane in one direction, by generation
# NVML's clock event reasons by bit: (what it means, whether something is amiss)
REASONS = {
    0x1: ("the GPU idles, so its clocks are low on purpose", False),
    0x2: ("someone set the clocks (nvidia-smi -ac or -lgc)", True),
    0x4: ("the power limit holds the clocks down, as it does in long runs of large products", False),
    0x8: ("hardware slows the GPU down: it is too hot, or its power supply fails", True),
    0x10: ("a sync boost group keeps it at the speed of its slowest member", True),
    0x20: ("the driver slows it down because it is hot", True),
    0x40: ("hardware slows it down because it is too hot", True),
    0x80: ("the power supply asks it to slow down (power brake)", True),
    0x100: ("a display sets the clocks", False),
}
WAYS = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches, without the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "between host bridges of one NUMA node",
    "SYS": "through the link between two CPU sockets, the slowest way",
}
NEAREST = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Matrix:
    """The table of `nvidia-smi topo -m`: how each device reaches each other, and the CPUs near each GPU."""

    ways: dict[tuple[str, str], str] = field(default_factory=dict)
    cpus: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        return [*dict.fromkeys(a for a, _ in self.ways if a.startswith("GPU"))]

    @property
    def cards(self) -> list[str]:
        """The network cards."""
        return [*dict.fromkeys(b for _, b in self.ways if not b.startswith("GPU"))]


def ask(*arguments: str) -> tuple[bool, str]:
    """Returns whether a call of nvidia-smi succeeded, and what it printed. Raises RidgelineError if it is missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise RidgelineError(
            "--topology reads nvidia-smi, which is not on this machine's PATH; NVIDIA's driver brings it along"
        )
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise RidgelineError(f"nvidia-smi {' '.join(arguments)[:60]} did not answer within {PATIENCE} s") from None
    except OSError as error:
        raise RidgelineError(f"{program} cannot be run: {error.strerror}") from error
    return done.returncode == 0, done.stdout + (done.stderr if done.returncode else "")


def gpus() -> list[Row]:
    """The fields of each GPU, by nvidia-smi's names. Raises RidgelineError if nvidia-smi fails."""
    names = list(FIELDS)
    for _ in range(len(FIELDS)):
        good, text = ask(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        if good:
            return parse_query(text, names)
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in names:
            break
        at = names.index(unknown[1])
        names[at : at + 1] = [OLD[unknown[1]]] if unknown[1] in OLD else []
    raise RidgelineError(f"nvidia-smi failed: {' '.join(text.split()) or 'it printed nothing'}")


def parse_query(text: str, names: list[str]) -> list[Row]:
    """The rows of `--query-gpu` as CSV without units. A field that is not supported is None."""
    back = {old: new for new, old in OLD.items()}
    found = []
    for values in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        if len(values) != len(names):
            raise RidgelineError(f"nvidia-smi answered {len(values)} fields instead of {len(names)}: {values}")
        found.append({back.get(n, n): _value(v.strip()) for n, v in zip(names, values, strict=True)})
    if not found:
        raise RidgelineError("nvidia-smi names no GPU")
    return found


def _value(text: str) -> Any:
    if re.fullmatch(r"\[?(N/A|Not Supported|Unknown Error|Insufficient Permissions|GPU requires reset)\]?", text):
        return None
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16)
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text) if "." in text else int(text)
    return text


def parse_matrix(text: str) -> Matrix:
    """The table of `nvidia-smi topo -m`. Its columns are separated by tabs or by spaces."""
    found = Matrix()
    heads: list[str] = []
    for line in text.splitlines():
        words = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if not heads and words and words[0] == "GPU0":
            heads = [w for w in words[: words.index("CPU")] if w] if "CPU" in words else words
        elif heads and words and words[0] in heads and len(words) > len(heads):
            own, ways, rest = words[0], words[1 : len(heads) + 1], words[len(heads) + 1 :]
            found.ways.update({(own, other): way for other, way in zip(heads, ways, strict=True) if other != own})
            if own.startswith("GPU") and len(rest) > 1:
                found.cpus[own], found.nodes[own] = rest[0], rest[1]
    return found


def parse_links(text: str) -> dict[int, list[float | None]]:
    """The speeds of `nvidia-smi nvlink --status` by GPU, in GB/s and direction; None for a link that is down."""
    found: dict[int, list[float | None]] = {}
    for line in text.splitlines():
        if gpu := re.match(r"\s*GPU (\d+):", line):
            current = found.setdefault(int(gpu[1]), [])
        elif found and (link := re.match(r"\s*Link \d+:\s*(<inactive>|[\d.]+)", line)):
            current.append(None if link[1] == "<inactive>" else float(link[1]))
    return {gpu: links for gpu, links in found.items() if links}


def about(gpu: Row) -> list[Said]:
    """Sentences about one GPU. Fields that its driver does not tell are left out."""
    name = f"GPU{gpu['index']}"
    said = [*_clocks(gpu), *_power(gpu), *_pcie(gpu), *_memory(gpu), *_modes(gpu)]
    return [(name, f"{text[:1].upper()}{text[1:]}.", amiss) for text, amiss in said]


def _clocks(gpu: Row) -> list[tuple[str, bool]]:
    said = []
    if gpu.get("clocks.sm") is not None and gpu.get("clocks.max.sm"):
        mem = f", its memory at {gpu['clocks.mem']} of {gpu['clocks.max.mem']} MHz" if gpu.get("clocks.max.mem") else ""
        said.append(
            (f"the multiprocessors run at {gpu['clocks.sm']} of at most {gpu['clocks.max.sm']} MHz{mem}", False)
        )
    mask = gpu.get("clocks_event_reasons.active")
    if mask is not None:
        said += [REASONS[bit] for bit in REASONS if mask & bit]
        if not mask:
            said.append(("nothing holds the clocks down", False))
    return said


def _power(gpu: Row) -> list[tuple[str, bool]]:
    said = []
    draw, limit, default = (gpu.get(f"power.{what}") for what in ("draw", "limit", "default_limit"))
    heat = gpu.get("temperature.gpu")
    if draw is not None and limit:
        warm = f", at {heat} degrees Celsius" if heat is not None else ""
        said.append((f"it draws {draw:.0f} of at most {limit:.0f} W{warm}", False))
    if limit and default and limit < 0.98 * default:
        text = (
            f"its power limit is {limit:.0f} W instead of {default:.0f} W, so large products are slower than elsewhere"
        )
        said.append((text, True))
    return said


def _pcie(gpu: Row) -> list[tuple[str, bool]]:
    link: list[Any] = [gpu.get(f"pcie.link.{f}") for f in ("gen.current", "gen.max", "width.current", "width.max")]
    if None in link:
        return []
    generation, most, width, widest = link
    rate = LANE.get(most, 0) * width
    said = [(f"PCIe generation {most} with {width} lanes moves at most {rate:.0f} GB/s in each direction", False)]
    if width < widest:
        said.append(
            (f"its PCIe link has {width} of {widest} lanes, so copies from the host are slower: look at the slot", True)
        )
    if generation < most:
        said.append((f"the link rests at generation {generation}, and rises under load", False))
    return said


def _memory(gpu: Row) -> list[tuple[str, bool]]:
    said = []
    if gpu.get("memory.total") and gpu.get("memory.used") is not None:
        said.append((f"its memory has {gpu['memory.total']} MiB, of which {gpu['memory.used']} are taken", False))
    mode = gpu.get("ecc.mode.current")
    if mode == "Disabled":
        said.append(("ECC is off: a flipped bit in memory goes unnoticed", True))
    if mode == "Enabled":
        mended = gpu.get("ecc.errors.corrected.volatile.total") or 0
        now = gpu.get("ecc.errors.uncorrected.volatile.total") or 0
        ever = gpu.get("ecc.errors.uncorrected.aggregate.total") or 0
        said.append((f"ECC is on, and has mended {mended} bits since the driver started", False))
        if now or ever:
            text = f"ECC found {now} errors that it could not mend since the driver started, and {ever} ever"
            said.append((f"{text}: results may be wrong, and the card may need service", True))
    return said


def _modes(gpu: Row) -> list[tuple[str, bool]]:
    said = []
    if gpu.get("persistence_mode") == "Enabled":
        said.append(("persistence is on: the driver stays loaded between programs", False))
    if gpu.get("persistence_mode") == "Disabled":
        text = "persistence is off: the driver unloads when no program runs, and the next one waits a second or more"
        said.append((f"{text} (nvidia-smi -pm 1 turns it on)", True))
    if gpu.get("mig.mode.current") == "Enabled":
        said.append(("MIG is on: programs get slices of this GPU, and not all of it", True))
    if gpu.get("compute_mode") in ("Exclusive_Process", "Prohibited"):
        said.append((f"its compute mode is {gpu['compute_mode']}: a second program is refused", True))
    return said


def between(matrix: Matrix, links: dict[int, list[float | None]]) -> list[Said]:
    """Sentences about the ways between GPUs, to network cards and to CPUs."""
    said: list[Said] = []
    pairs = defaultdict(list)
    for (a, b), way in matrix.ways.items():
        if a.startswith("GPU") and b.startswith("GPU") and int(a[3:]) < int(b[3:]):
            pairs[way].append(f"{a} and {b}")
    for way, some in pairs.items():
        text = f"{_listed(some, len(pairs) == 1, len(matrix.gpus))} {_way(way)}."
        said.append(("links", text, way == "SYS"))
    said += [_links(f"GPU{number}", speeds) for number, speeds in links.items()]
    for gpu in matrix.gpus:
        near = {card: matrix.ways[gpu, card] for card in matrix.cards if matrix.ways[gpu, card] in NEAREST}
        if near:
            best = min(near.values(), key=NEAREST.index)
            cards = ", ".join(card for card, way in near.items() if way == best)
            said.append((gpu, f"its nearest network card is {cards}, {WAYS[best]}.", best == "SYS"))
    by_node = defaultdict(list)
    for gpu, node in matrix.nodes.items():
        if node.isdigit():
            by_node[node, matrix.cpus[gpu]].append(gpu)
    for (node, cpus), some in by_node.items():
        verb = "is" if len(some) == 1 else "are"
        advice = f"bind its process there (numactl --cpunodebind={node} --membind={node})"
        said.append(("CPUs", f"{', '.join(some)} {verb} next to NUMA node {node}, CPUs {cpus}: {advice}.", False))
    return [(subject, text[:1].upper() + text[1:], amiss) for subject, text, amiss in said]


def _links(gpu: str, speeds: list[float | None]) -> Said:
    """The sentence about a GPU's NVLinks."""
    up = [speed for speed in speeds if speed is not None]
    down = len(speeds) - len(up)
    text = f"Its {len(up)} NVLinks carry {sum(up):.0f} GB/s in each direction"
    if down:
        text += f"; {down} {'is' if down == 1 else 'are'} down, so collectives are slower"
    return gpu, f"{text}.", bool(down)


def _listed(pairs: list[str], all_alike: bool, count: int) -> str:
    if count == 2 or len(pairs) == 1:
        return f"{pairs[0]} are joined"
    if all_alike:
        return f"All pairs of the {count} GPUs are joined"
    shown = ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
    return f"{shown} are joined"


def _way(way: str) -> str:
    if way.startswith("NV"):
        return f"by {way[2:]} NVLinks ({way})"
    return f"{WAYS[way]} ({way})" if way in WAYS else f"in a way that nvidia-smi calls {way}"


def everything() -> Row:
    """What nvidia-smi tells, and the sentences about it."""
    rows = gpus()
    good, table = ask("topo", "-m")
    matrix = parse_matrix(table) if good else Matrix()
    good, status = ask("nvlink", "--status")
    links = parse_links(status) if good else {}
    said = [line for gpu in rows for line in about(gpu)] + between(matrix, links)
    if len(rows) == 1 and not links:
        said.append(("links", "There is one GPU, and it has no NVLink that is up.", False))
    ways = [{"from": a, "to": b, "way": way} for (a, b), way in matrix.ways.items()]
    return {
        "gpus": rows,
        "ways": ways,
        "cpus": matrix.cpus,
        "nodes": matrix.nodes,
        "links": {str(gpu): speeds for gpu, speeds in links.items()},
        "said": [{"about": subject, "text": text, "amiss": amiss} for subject, text, amiss in said],
    }
