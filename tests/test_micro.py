"""`ridgeline micro`: what the compiler leaves of its kernels, what it computes from their clocks, and what it shows."""

import argparse
import json
import re
from collections import Counter

import pytest
import torch

import browser
import fixture_rows
import micro_card
from ridgeline import boundary, cuda, device
from ridgeline.lab.analysis import disassembly
from ridgeline.lab.measurement import store
from ridgeline.lab.measurement.micro import bench, instructions, kept, latency, memory, parts, published, runs
from ridgeline.lab.presentation import micro
from ridgeline.lab.presentation.micro import command, pictures, tables
from ridgeline.lab.presentation.report import command as report
from ridgeline.lab.presentation.report import page, view
from ridgeline.op import RidgelineError

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_120")
FILES = sorted(path.stem for path in bench.HERE.glob("*.cu"))
WHOLE = {"schema": 1, "gpu": "x", "machine": {}, "multiprocessors": 1, "parts": {}}
CLOCK = "CS2R R SR_CLOCKLO"
compiles = pytest.mark.compiles


@pytest.fixture(scope="module")
def made():
    """A record of an imagined H200, and the card that it was made on."""
    with pytest.MonkeyPatch.context() as patch:
        return micro_card.record(patch)


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Empty folders of results and of the user's cache."""
    monkeypatch.setattr(store, "HOUSE", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def options(*words):
    parser = argparse.ArgumentParser()
    micro.arguments(parser)
    return parser.parse_args(list(map(str, words)))


# --- the kernels


def compiled(file, arch):
    return cuda.compile_source(bench.HERE / f"{file}.cu", arch, ())


@compiles
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_compiles_and_takes_what_it_is_given(arch, made):
    """Pointers, ints and long longs of each start are the parameters of the kernel, in PTX's own words."""
    capability = device.known(arch).capability
    refused = {k for m in parts.micros([]) if m.refuses(capability) for k in m.kernels}
    _, card = made
    started = {(name, codes) for name, codes, *_ in card.started}
    seen = {name for name, _ in started}
    assert {k for m in parts.micros([]) if not m.refuses(card.gpu.capability) for k in m.kernels} <= seen
    for name, codes in started - {(n, c) for n, c in started if n in refused}:
        file, _, kernel = name.partition(":")
        entry = re.search(rf"\.entry {kernel}\((.*?)\)", compiled(file, arch).ptx, re.DOTALL)
        assert entry, f"{name} is not in {arch}"
        words = re.findall(r"\.param \.(\w+)", entry[1])
        assert words == [{"P": "u64", "i": "u32", "q": "u64"}[code] for code in f"PP{codes}"], name
    for file in FILES:
        log = compiled(file, arch).log
        assert not [line for line in log.splitlines() if re.search(r"[1-9]\d* bytes spill", line)], file


@compiles
def test_a_header_beside_a_kernel_is_compiled_in_anew(tmp_path):
    made = []
    for number in (7, 8):
        (tmp_path / "own.cuh").write_text(f"#define NUMBER {number}")
        (tmp_path / "x.cu").write_text('#include "own.cuh"\nextern "C" __global__ void x(int* y) { *y = NUMBER; }')
        cuda._headers.cache_clear()
        cuda.compile_source.cache_clear()
        made.append(cuda.compile_source(tmp_path / "x.cu", "sm_90", ()).ptx)
    assert made[0] != made[1]


def test_starts_hold_what_their_codes_say(made):
    for name, codes, args, blocks, threads, _ in made[1].started:
        for code, value in zip(codes, args, strict=True):
            assert isinstance(value, torch.Tensor if code == "P" else int), name
            assert code != "i" or -(2**31) <= value < 2**31, name
        assert 0 < threads <= 1024, name
        assert blocks > 0, name


def test_starts_go_through_the_one_door(made):
    """Every start, as the real card makes it: `boundary.launch` takes its grid, its arguments and its options."""
    seen = []
    with device.pretend("h200"), boundary.observe(seen.append):
        for name, codes, args, blocks, threads, given in made[1].started:
            bench.Card.start(made[1], name, codes, *args, blocks=blocks, threads=threads, **given)
    assert len(seen) == len(made[1].started)
    for launch, (name, codes, args, blocks, threads, _) in zip(seen, made[1].started, strict=True):
        assert launch.kernel.name == name.partition(":")[2]
        assert (launch.grid, launch.constants["block"]) == ((blocks,), threads)
        assert len(launch.args) == len(launch.kernel.arguments) == len(args) + 2 == len(codes) + 2
        assert set(launch.constants) <= set(cuda.LAUNCH_OPTIONS), "no macros: each file is compiled once"
    assert max(launch.constants.get("shared", 0) for launch in seen) < 48 << 10


class Stepping(micro_card.FakeCard):
    """A card whose n-th start takes n x 1000 cycles on one block, and one more on each next one."""

    run, tick = bench.Card.run, bench.Card.tick

    def start(self, name, arguments, *args, blocks, threads, **given):
        self.started.append(name)
        self.out[:blocks] = 1000 * len(self.started) + torch.arange(blocks)
        if name.endswith("spin"):
            args[1].view(torch.int64)[0] = 500 * len(self.started)

    def elapsed(self, function):
        function()
        return float(len(self.started))


def test_a_kernel_is_run_once_for_nothing():
    card = Stepping()
    timed = card.run("memory:read_l2", "", blocks=3, threads=32, reps=2)
    assert (timed.cycles, timed.seconds) == ([2001.0, 3001.0], [2.0, 3.0])
    assert card.run("memory:read_l2", "", blocks=1, reps=1, ready=True).cycles == [4000.0]
    assert len(card.started) == 4
    assert timed.per_cycle(6003) == {
        "median": bench.rounded((6003 / 2001 + 6003 / 3001) / 2),
        "low": 2.0003,
        "high": 3.0,
    }
    card.gpu = device.known("h100")
    assert card.tick() == pytest.approx(1e3 * (8000 + 65.5) / (500 * 8), rel=1e-4)


def opcodes(file, arch, kernel):
    """The instructions of a kernel: the opcode with its suffixes, the clock's reads in full."""
    text = _sass(file, arch)
    text = disassembly.section(text, rf"^\.text\.{kernel}:$", r"^//-+ \.")
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text, re.MULTILINE)
    return [CLOCK if "SR_CLOCKLO" in line else line.split()[0] for line in lines]


def _sass(file, arch, kept_texts={}):  # noqa: B006
    if (file, arch) not in kept_texts:
        kept_texts[file, arch] = disassembly.sass(compiled(file, arch).cubin, "")  # no such kernel: all of them
    return kept_texts[file, arch]


def timed(ops):
    """The instructions between the last two reads of the clock."""
    clocks = [n for n, op in enumerate(ops) if op == CLOCK]
    return ops[clocks[-2] + 1 : clocks[-1]]


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_chains_are_whole(arch):
    """Between the two reads of the clock stands the whole chain, and nothing else."""
    for operation, (_, weight) in latency.OPERATIONS.items():
        inside = Counter(op.split(".")[0] for op in timed(opcodes("instructions", arch, f"lat_{operation}")))
        (most, count), *_ = inside.most_common(1)
        assert count == latency.LINKS * weight, (operation, inside)
        extra = count if operation == "sin_f32" else 4  # its argument is multiplied first
        assert sum(inside.values()) <= count + extra, (operation, inside)
        loop = Counter(opcodes("instructions", arch, f"rate_{operation}"))
        assert sum(n for op, n in loop.items() if op.split(".")[0] == most) >= 256 * weight, (operation, loop)


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_loads_are_as_wide_and_as_many_as_they_say(arch):
    for loads in memory.LOADS:
        ops = opcodes("memory", arch, f"flight_{loads}")
        wide = [n for n, op in enumerate(ops) if op.startswith("LDG.E.128")]
        assert len(wide) == loads
        used = [n for n, op in enumerate(ops) if op.startswith("LOP3") and n > wide[0]]
        assert min(used) > max(wide), f"flight_{loads} uses a load before it has made all"
        registers, stack = disassembly.usage(compiled("memory", arch).cubin, f"flight_{loads}")
        assert registers <= 32, "64 warps would not be resident"
        assert stack == 0
    assert Counter(timed(opcodes("memory", arch, "read_l1")))["LDG.E.128.STRONG.SM"] == 8
    assert Counter(timed(opcodes("memory", arch, "read_shared")))["LDS.128"] == 8
    for kernel, op in (
        ("chase_l1", "LDG.E.64.STRONG.SM"),
        ("chase_l2", "LDG.E.64.STRONG.GPU"),
        ("chase_shared", "LDS"),
    ):
        assert Counter(timed(opcodes("memory", arch, kernel)))[op] >= 16
    if arch == "sm_90":  # nothing but loads: no sums of addresses
        ops = timed(opcodes("memory", arch, "chase_cluster"))
        first = ops.index("LD.E.64")
        assert ops[first : first + 15] == ["LD.E.64"] * 15
    for width, op in ((4, "LDS"), (8, "LDS.64"), (16, "LDS.128")):
        assert Counter(timed(opcodes("memory", arch, f"banks_{width}")))[op] == 16
    assert Counter(opcodes("atomics", arch, "global_atom_u32"))["ATOMG.E.ADD.STRONG.GPU"] >= 4


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_matrix_products_stay_in_their_loops(arch):
    capability = device.known(arch).capability
    for kernel in instructions.MMA:
        if instructions.no_mma(kernel)(capability):
            continue
        for kind in ("lat", "rate"):
            ops = [op for op in opcodes("matrix", arch, f"{kind}_{kernel}") if re.match(r"(H|I|D)MMA", op)]
            assert len(ops) >= 16, (kernel, ops)
            assert len(ops) % 16 == 0, (kernel, ops)
    if capability == 90:
        for kernel in instructions.WGMMA:
            ops = Counter(op.split(".")[0] for op in opcodes("matrix", arch, f"rate_{kernel}"))
            products = ops["HGMMA"] + ops["IGMMA"] + ops["QGMMA"]
            assert products % 8 == 1, (kernel, ops)  # the first clears the sums


@compiles
def test_fp8_products_are_refused_where_the_compiler_makes_others_of_them():
    """On sm_90 equal products are made once, so that the figure would be far too high."""
    refuses = {m.name: m.refuses for m in parts.micros(["matrix"])}["mma m16n8k32 e4m3, f32 sums"]
    assert refuses(90)
    assert not [op for op in opcodes("matrix", "sm_90", "rate_m16n8k32_e4m3_f32") if op.startswith("QMMA")]
    for arch in ("sm_120",):
        assert refuses(device.known(arch).capability) is None
        assert [op for op in opcodes("matrix", arch, "rate_m16n8k32_e4m3_f32") if op.startswith("QMMA")]


# --- what is computed from clocks


def figures(record, part, name, at=""):
    (row,) = [r for r in record["rows"] if (r["part"], r["name"], r["at"]) == (part, name, at)]
    return {unit: figure["median"] for unit, figure in row["figures"].items()}


def test_figures_are_what_they_divide(made):
    """The imagined card's own numbers come back: `micro_card.model` says them once more, in other words."""
    record, _ = made
    assert figures(record, "latency", "fp32 fma") == {"cycles": 4.1, "s": pytest.approx(4.1 / 1.755e9, rel=1e-4)}
    assert figures(record, "latency", "shared memory")["cycles"] == 29
    assert figures(record, "latency", "another block's shared memory")["cycles"] == 181
    assert figures(record, "latency", "L2")["cycles"] == 265
    assert figures(record, "bandwidth", "shared memory, read")["B/clk/SM"] == 126
    assert figures(record, "bandwidth", "L2, read")["B/clk"] == pytest.approx(4400, rel=1e-3)
    assert figures(record, "bandwidth", "DRAM, copy")["B/s"] == pytest.approx(4.3e12, rel=0.01)
    assert figures(record, "banks", "4 bytes a thread", "8")["cycles"] == pytest.approx(8.1)
    assert figures(record, "coalescing", "4 bytes a thread", "8")["B/s"] == pytest.approx(4.3e12 / 8, rel=1e-3)
    assert figures(record, "instructions", "fp32 fma")["op/clk/SM"] == 126
    assert figures(record, "instructions", "fp16 fma, two in one")["op/clk/SM"] == 252
    wgmma = figures(record, "matrix", "wgmma m64n256k16 bf16, f32 sums")
    assert (wgmma["cycles"], wgmma["FLOP/clk/SM"]) == (128, 4096)
    assert wgmma["FLOP/s"] == pytest.approx(4096 * 132 * 1.755e9, rel=1e-3)
    assert figures(record, "occupancy", "4 loads in flight", "8")["B/SM"] == 8 * 32 * 16 * 4
    reasons = {r["name"]: r["reason"] for r in record["rows"] if "reason" in r}
    assert reasons == {"mma m16n8k32 e4m3, f32 sums": "mma has fp8 on sm_89 and sm_120 alone"}
    assert set(record["parts"]) == set(parts.PARTS) == {m.part for m in parts.micros([])}


@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "rtx5090"])
def test_other_cards_leave_out_what_they_lack(gpu, monkeypatch):
    record, card = micro_card.record(monkeypatch, ("latency", "matrix"), gpu)
    reasons = {r["name"]: r["reason"] for r in record["rows"] if "reason" in r}
    assert ("another block's shared memory" in reasons) == (gpu != "rtx5090")
    assert ("mma m16n8k32 e4m3, f32 sums" in reasons) == (gpu == "a100")
    assert ("mma m16n8k8 f64, f64 sums" in reasons) == (gpu != "rtx5090")
    assert sum("wgmma is" in reason for reason in reasons.values()) == len(instructions.WGMMA)
    assert not [name for name, *_ in card.started if "m64n" in name]


def test_a_failure_is_one_row(monkeypatch):
    def fail(card):
        raise cuda.CudaError("memory.cu does not load\nmore")
        yield

    wrong = bench.Micro("latency", "L1", "", "", (), fail)
    assert list(runs.measured(micro_card.FakeCard(), wrong)) == [
        {"part": "latency", "name": "L1", "at": "", "reason": "memory.cu does not load"}
    ]


@pytest.mark.parametrize("order", ["in order", "shuffled"])
def test_a_ring_visits_each_line_once(order):
    card = micro_card.FakeCard()
    size = 64 << 10
    ring = latency.ring(card, size, order)
    at, base, seen = ring.data_ptr(), ring.data_ptr(), []
    for _ in range(size // latency.LINE):
        seen.append((at - base) // latency.LINE)
        at = ring[(at - base) // 8].item()
    assert at == base
    assert sorted(seen) == list(range(size // latency.LINE))
    assert (seen == sorted(seen)) == (order == "in order")


def test_the_rules_of_banks_and_sectors():
    assert [memory.ways(4, stride) for stride in (0, 1, 2, 3, 16, 32, 33)] == [1, 1, 2, 1, 16, 32, 1]
    assert [memory.ways(8, stride) for stride in (0, 1, 2, 16)] == [2, 2, 4, 32]
    assert [memory.ways(16, stride) for stride in (1, 2, 3)] == [4, 8, 4]
    assert [memory.useful(4, stride) for stride in (1, 2, 8, 32)] == [1, 0.5, 0.125, 0.125]
    assert memory.useful(16, 32) == 0.5


# --- what papers say


def test_published_figures_belong_to_rows_and_sources(made):
    rows = {(r["part"], r["name"], r["at"]): r.get("figures", {}) for r in made[0]["rows"]}
    for part, name, at, unit, card, value, source in published.published()["values"]:
        assert unit in rows[part, name, at], (part, name, unit)
        assert unit in tables.COLUMNS[part]
        assert part in tables.BESIDE
        assert card in published.CARDS
        assert value > 0
        assert source in published.sources()
    assert {source for *_, source in published.published()["values"]} == set(published.sources())


# --- records


def test_records_are_merged_by_part(made, house, monkeypatch):
    record, _ = made
    path = kept.keep(record, kept.recorded())
    assert path == house / "results/micro/h200.json"
    assert kept.load(path) == record
    newer, _ = micro_card.record(monkeypatch, ("banks",))
    newer["parts"]["banks"] |= {"commit": "7654321", "time": "2026-11-27T12:00:00+00:00"}
    newer["rows"] = newer["rows"][:1]
    kept.keep(newer, kept.recorded())
    both = kept.load(path)
    assert [row["part"] for row in both["rows"]].count("banks") == 1
    assert list(both["parts"]) == list(parts.PARTS)
    assert (both["parts"]["banks"]["commit"], both["parts"]["chase"]["commit"]) == ("7654321", "1234567")
    assert len(both["rows"]) == len(record["rows"]) - 3 * len(memory.BANK_STRIDES) + 1
    assert kept.of("NVIDIA H200") == both
    kept.keep(record, kept.cached())
    assert kept.of("NVIDIA H200") == both, "the newest"
    assert kept.of("NVIDIA B200") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no schema"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "gpu": "x"}', "machine"),
        (json.dumps(WHOLE | {"rows": [{"part": "a"}]}), "a row"),
        (json.dumps(WHOLE | {"rows": [{"part": "a", "name": "b", "at": "", "figures": {"s": {}}}]}), "a row"),
    ],
)
def test_a_record_that_is_none_says_so(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RidgelineError, match=words) as raised:
        kept.load(tmp_path / "x.json")
    assert "x.json" in str(raised.value)
    with pytest.raises(RidgelineError, match="No such file"):
        kept.load(tmp_path / "y.json")


# --- the verb


def test_help_lists_the_parts():
    assert re.findall(r"\w+", micro.PARTS.replace(" and ", " ")) == list(parts.PARTS)


def test_without_a_gpu_a_recorded_run_is_shown_as_such(made, house, capsys):
    before = house / "before.json"
    before.write_text("kept")
    for words in ([], ["--device", "h200"], ["--record"], ["--device", "cuda"], ["--json", before]):
        with pytest.raises(RidgelineError) as raised:
            micro.main(options(*words))
        assert "GPU" in str(raised.value) or "no card is recorded" in str(raised.value)
    assert before.read_text() == "kept"
    assert {path.name for path in house.iterdir()} == {"before.json", "pyproject.toml"}
    kept.keep(made[0], kept.recorded())
    assert micro.main(options("banks")) == 0
    out = capsys.readouterr().out
    assert "There is no GPU here; these figures are recorded: one NVIDIA H200 on 2026-11-26, commit 1234567." in out
    assert "Bank conflicts" in out
    assert "Atomics" not in out
    assert micro.main(options("--device", "H200")) == 0
    out = capsys.readouterr().out
    assert "Recorded, not measured now: one NVIDIA H200" in out
    assert "…" not in out, "a cell was cut"
    assert max(map(len, out.splitlines())) <= 120
    assert "37.9 [2]" in out
    assert "[2] Luo" in out
    with pytest.raises(RidgelineError, match="a100.*the recorded cards are h200"):
        micro.main(options("--device", "a100"))
    with pytest.raises(RidgelineError, match="--device shows what is recorded"):
        micro.main(options("--device", "h200", "--record"))


def test_a_record_of_another_machine_is_read_and_kept(made, house, capsys):
    assert micro.main(options("--run", _file(house, made[0]), "--record")) == 0
    assert "Recorded in" in capsys.readouterr().out
    assert kept.load(house / "results/micro/h200.json") == made[0]
    with pytest.raises(RidgelineError, match="did not measure"):
        command._only(made[0] | {"parts": {"chase": {}}}, ["banks"])


def _file(folder, record):
    path = folder / "run.json"
    path.write_text(kept.text(record))
    return path


def test_json_goes_to_a_file_or_to_the_screen(made, house, capsys):
    run = _file(house, made[0])
    assert micro.main(options("--run", run, "--json")) == 0
    assert json.loads(capsys.readouterr().out) == made[0]
    assert micro.main(options("--run", run, "--json", "latency")) == 0, "a part after --json is a part"
    assert set(json.loads(capsys.readouterr().out)["parts"]) == {"latency"}
    assert micro.main(options("--run", run, "--json", house / "new/micro.json")) == 0
    assert "Latency" in capsys.readouterr().out
    assert kept.load(house / "new/micro.json") == made[0]


def test_on_a_gpu_the_run_is_kept_and_recorded(house, monkeypatch, capsys):
    micro_card.without_torch_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Card", micro_card.FakeCard)
    monkeypatch.setattr("ridgeline.lab.measurement.machine.facts", lambda device: micro_card.MACHINE)
    assert micro.main(options("banks", "launches", "--record", "--commit", "abcdef0")) == 0
    recorded = kept.load(house / "results/micro/h200.json")
    assert recorded == kept.load(house / "cache/ridgeline/micro/h200.json")
    assert [(about["commit"], about["dirty"]) for about in recorded["parts"].values()] == [("abcdef0", True)] * 2
    assert "132 multiprocessors" in capsys.readouterr().out


# --- pictures and the report


def test_pictures_are_written(made, tmp_path):
    names = {path.name for path in pictures.write(made[0], tmp_path)}
    swept = ("chase", "banks", "coalescing", "occupancy")
    assert names == {f"micro-{p}{paper}.{kind}" for p in swept for paper in ("", "-dark") for kind in ("svg", "png")}
    text = (tmp_path / "micro-banks.svg").read_text()
    assert "stride, in elements" in text
    assert "by the rule" in text
    assert set(pictures.charts(made[0])) == set(pictures.TITLES) == set(pictures.HINTS)
    assert pictures.charts(command._only(made[0], ["latency"])) == {}


@pytest.mark.skipif(not browser.executable(), reason=browser.INSTALL)
def test_the_reports_section(made, house):
    kept.keep(made[0], kept.recorded())
    recorded = view.Source(fixture_rows.rows(name="NVIDIA H200"), recorded=True)
    sources = [view.Source(fixture_rows.rows(gpu=False)), recorded]
    assert report._micro(sources) == [made[0]]
    text = page.render(sources, micro=report._micro(sources))
    assert 'id="micro"' not in page.render(sources)
    path = house / "page.html"
    path.write_text(text)
    with browser.Browser() as running:
        for width, dark in ((1280, False), (390, True)):
            opened = running.open(path, width=width, dark=dark)
            opened.js("document.querySelectorAll('#micro details').forEach(fold => { fold.open = true })")
            assert opened.drawn()
            assert opened.said() == []
            assert opened.asked() == []
            assert opened.js("Math.max(document.documentElement.scrollWidth, innerWidth)") == width
            every = "[...document.querySelectorAll('#micro .chart')]"
            marks = f"{every}.map(chart => chart.querySelectorAll('.mark-symbol path').length)"
            assert opened.js(marks) == [35, 102 + 4, 30 + 4, 24 + 4]
            rules = f"{every}.map(chart => chart.querySelectorAll('.mark-line path[stroke-dasharray]').length)"
            assert opened.js(rules) == [0, 3, 3, 1]
            assert opened.js("document.querySelectorAll('#micro table').length") == len(parts.PARTS)
            assert "37.9 [2]" in opened.js("document.querySelector('#micro').innerText")


def test_hostile_names_stay_text(made):
    hostile = made[0] | {"gpu": fixture_rows.HOSTILE}
    hostile["rows"] = [row | {"reason": fixture_rows.HOSTILE} if "reason" in row else row for row in hostile["rows"]]
    text = page.render([view.Source(fixture_rows.rows())], micro=[hostile])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


@pytest.mark.gpu
def test_a_real_card_in_order_of_distance():
    """Each memory is slower than the one before it, and no bandwidth is above what the hardware can."""
    record = runs.run(bench.Card(), ["latency", "bandwidth"], lambda *said: None, {"gpu": "here"})
    assert not [row for row in record["rows"] if "figures" not in row and "sm_" not in row["reason"]]
    cycles = [figures(record, "latency", name)["cycles"] for name in ("fp32 fma", "shared memory", "L1", "L2", "DRAM")]
    assert cycles == sorted(cycles)
    assert figures(record, "bandwidth", "shared memory, read")["B/clk/SM"] <= 130
    assert figures(record, "bandwidth", "L1, read")["B/clk/SM"] <= 130
