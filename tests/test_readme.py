"""What `make readme` writes: the README's figures, the pages of ops and of measured cases, and the pictures."""

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import fixture_rows
from ridgeline import nn
from ridgeline.lab.analysis import roofline
from ridgeline.lab.measurement import results, store
from ridgeline.lab.presentation import bars, front, measured, readme, reference, served
from ridgeline.op import RidgelineError, get, registry

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in readme.MARKS)
PEERS = ("torch", "compile", "quack", "fa4", "fa4_deterministic", "sdpa_cudnn")


def timed(impl: str, median: float, op: str = "softmax", **facts) -> dict:
    """A timed row: its roof is reached in half the time."""
    peer = impl in PEERS
    row = {"type": "bench", "status": "ok", "op": op, "case": "8 B", "dtype": "bfloat16", "direction": "forward"}
    row |= {"impl": impl, "peer": peer, "kind": "eager" if peer else "triton", "bound": "memory", "bytes": 8}
    return row | {"share": 0.5, "seconds": {"median": median}, "peak_bytes": 1 << 30} | facts


def front_rows(slower: float = 1.0) -> list[dict]:
    """The rows that the README's headlines need; slower: the times of ours are multiplied by it."""
    rows = []
    for fixed, direction in ((False, "forward"), (False, "backward"), (True, "backward")):
        for n, case in enumerate(front.points(get("attention"), fixed)):
            where = {"op": "attention", "case": case, "direction": direction}
            peers = (("fa4", 2.0), ("sdpa_cudnn", 1.2 if n else 1.1), ("fa4_deterministic", 3.0))
            rows += [timed(impl, median, **where) for impl, median in peers]
            rows.append(timed("gluon", slower * (2.4 if fixed else 1.0), **where, kind="gluon"))
    for case, ours in ((front.LOSS, 0.001), ("8192x32000", 0.002)):
        where = {"op": "cross_entropy", "case": case, "direction": "both"}
        rows += [timed("compile", 0.004, **where, peak_bytes=2 << 30), timed("quack", 0.003, **where)]
        rows.append(timed("cuda_cluster", slower * ours, **where, kind="cuda"))
    where = {"op": "linear_cross_entropy", "case": front.STEP, "direction": "both"}
    return [
        *rows,
        timed("compile", 0.033, **where, peak_bytes=6 << 30),
        timed("triton", slower * 0.03, **where, peak_bytes=3 << 29),
    ]


def run(copy: float, dirty: bool, name: str) -> list[dict]:
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0"}
    return [
        {"type": "run", "run": name, "dirty": dirty, "machine": machine, "time": f"2026-11-2{name}T02:15:00Z"},
        {"type": "roof", "run": name, "copy": {"median": copy}, "matmul": {"float32": {"median": 5e13}}},
        timed("triton", 1.0, run=name),
    ]


def test_an_implementation_that_no_user_gets_is_not_shown() -> None:
    rungs = [timed("triton_row", 1.0), timed("triton", 1.1), timed("torch", 1.2)]
    assert not get("softmax").implementations["triton_row"].served
    found = served.serving(get("softmax"), rungs)
    assert found is not None
    assert found["impl"] == "triton"
    text = measured.table(get("softmax"), {("softmax", "8 B", "bfloat16", "forward"): rungs})
    assert "| `triton` | 1.10 s |" in text
    assert "| PyTorch | 1.20 s | **1.09x** |" in text
    assert "triton_row" not in text


def test_the_fastest_kernel_stands_below_torch_where_torch_is_the_default() -> None:
    rungs = [timed("torch", 1.0, "matmul"), timed("triton", 1.1, "matmul")]
    found = {("matmul", "8 B", "float32", "forward"): [row | {"dtype": "float32"} for row in rungs]}
    lines = measured.table(get("matmul"), found).splitlines()[2:]
    assert len(lines) == 2
    assert "| `torch` | 1.00 s" in lines[0]
    assert '| `impl="triton"` | 1.10 s' in lines[1]


def test_cases_stand_in_the_op_s_order_and_forward_first() -> None:
    op = get("softmax")
    names = [case.name for case in op.cases if case.use == "bench" and "bfloat16" in case.dtypes][:3]
    works = [(op.name, case, "bfloat16", way) for case in names for way in ("forward", "backward")]
    found = {work: [timed("triton", 1.0)] for work in reversed(works)}
    lines = [line.split(" | ") for line in measured.table(op, found).splitlines()[2:]]
    assert [(line[0][2:], line[2]) for line in lines] == [(case, way) for _, case, _, way in works]


def test_one_line_per_op_in_the_readme() -> None:
    rows = [
        timed(impl, median, direction=way, dtype=dtype, bytes=size, case=f"{size} B")
        for way in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
        for size in (8, 16)
        for impl, median in (("triton", 1.0), ("torch", 1.5))
    ]
    for impl, median in (("triton", 1.0), ("quack", 2.5)):
        rows.append(timed(impl, median, "cross_entropy", direction="both", case="16 B"))
    rows.append(timed("triton", 3.0, "cross_entropy", case="16 B"))
    compared = front.ten(results.works(rows), registry())
    loss, softmax = front.table(compared, "page.md").splitlines()[2:]
    cells = "1.00 s | 0.50 | **1.50x** PyTorch"
    assert softmax == f"| [`softmax`](docs/ops.md#softmax) | [16 B, bf16](page.md#softmax) | {cells} | {cells} |"
    assert "| 1.00 s | 0.50 | **2.5x** quack | included |  |  |" in loss


def test_the_first_of_the_op_s_largest_cases() -> None:
    """Whichever was recorded last; 0.4% more bytes are no larger."""
    first, *_, last = [c.name for c in get("softmax").cases]
    rows = [timed("triton", 1.0, bytes=b, case=name) for name, b in ((last, 1004), ("small", 8), (first, 1000))]
    for some in (rows, rows[::-1]):
        assert list(served.largest(results.works(some), registry())) == [("softmax", first, "bfloat16", "forward")]


def test_the_machine_s_facts_are_those_of_all_its_runs() -> None:
    text = measured.machine([*run(3.0e12, False, "1"), *run(3.02e12, True, "2"), *run(1e12, True, "3")[:2]])
    assert "| memory bandwidth, copy | 3.00 to 3.02 TB/s |" in text, "a run that no timed row leads to counts"
    assert "| matrix products, float32 | 50.0 TFLOP/s |" in text
    assert "| runs | 2, 2026-11-21 to 2026-11-22 |" in text
    assert text.endswith("\n\n1 run lacks a verified commit.")
    assert "verified" not in measured.machine(run(3e12, False, "1"))


@pytest.mark.parametrize(
    ("values", "text"),
    [([1e12], "1.00 TB/s"), ([9e11, 1.1e12], "900 GB/s to 1.10 TB/s"), ([2e12, 1e12], "1.00 to 2.00 TB/s")],
)
def test_between(values: list[float], text: str) -> None:
    assert measured.between(values, "B/s") == text


def test_every_op_and_module_is_listed() -> None:
    ops = registry()
    text = reference.page(ops, {"h100.md": ("H100", {"gelu"})}, {"mul"})
    sections = {part.split("`")[0]: part for part in text.split("\n### `")[1:]}
    assert set(sections) == set(ops)
    for name, op in ops.items():
        (line,) = re.findall(r"^Implementations: (.*)\.$", sections[name], re.MULTILINE)
        assert line == ", ".join(f"**{r.name}**" if r.served else r.name for r in op.implementations.values())
        assert f"```python\n{name}(" in sections[name]
        assert ("measured/h100.md#" in sections[name]) == (name == "gelu")
        assert ("notes/" in sections[name]) == (name == "mul")
    assert "`RMSNorm`" in text
    assert "`AdamW`" in text
    assert hasattr(nn, "RMSNorm")


def test_signatures_are_those_of_the_stub() -> None:
    stub = (ROOT / "src/ridgeline/__init__.pyi").read_text()
    text = (ROOT / "docs/ops.md").read_text()
    for name in registry():
        (shown,) = re.findall(rf"^```python\n({name}\(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
        assert f"def {shown}:" in stub, name


def test_the_headlines_are_taken_from_the_rows() -> None:
    attention, loss, memory = front.headline(results.works(front_rows()), registry(), "GPU").splitlines()[2:]
    assert "**Attention is 1.19x as fast as the fastest other library forward and 1.19x backward**" in attention
    assert "over 20 shapes each" in attention
    assert "least 1.10x and 1.10x" in attention
    assert "against FlashAttention 4 and cuDNN" in attention
    assert "In its reproducible default mode it is 1.25x as fast as FlashAttention 4's deterministic mode" in attention
    assert "**Cross-entropy is 4.0x as fast as torch.compile, in half the memory**" in loss
    assert "take 1.00 ms instead of 4.00 ms; 2.0x to 4.0x over 2 sizes." in loss
    assert "The fastest other library, quack, takes 3.00 ms." in loss
    assert "need 1.50 GiB instead of 6.00 GiB, at 1.10x the speed of torch.compile**" in memory


@pytest.mark.parametrize("op", ["attention", "cross_entropy", "linear_cross_entropy"])
def test_a_headline_without_rows_is_one_sentence(op: str) -> None:
    rows = [row for row in front_rows() if row["op"] != op]
    with pytest.raises(RidgelineError, match=rf"headline needs {op} .*bench --record --peers {op}"):
        front.headline(results.works(rows), registry(), "GPU")


def test_the_points_of_attention_are_the_forty() -> None:
    for fixed in (False, True):
        names = front.points(get("attention"), fixed)
        assert len(names) == 20
        assert all(re.fullmatch(r"\d+x\d+x\d+x(64|128)( causal)?( deterministic)?", name) for name in names)


def test_the_chart_s_bars_are_as_long_as_the_speed_ups() -> None:
    compared = front.ten(results.works(front_rows()), registry())
    text = bars.draw(compared, "H100 & more")
    assert text == bars.draw(list(compared), "H100 & more")
    tree = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    found = [r for r in tree.iter(f"{name}rect") if r.find(f"{name}title") is not None]
    assert len(found) == len(compared) == 4
    (unit,) = {float(x.get("x1", "")) - bars.LEFT for x in tree.iter(f"{name}line") if x.get("class") == "peer"}
    words = list(itertools.chain.from_iterable(node.itertext() for node in tree.iter(f"{name}text")))
    for bar, c in zip(found, compared, strict=True):
        assert c.speedup is not None
        assert float(bar.get("width", "")) == pytest.approx(c.speedup * unit, abs=0.2)
        assert (bar.get("class"), c.against in words) == (c.direction, True)
    assert "prefers-color-scheme:dark" in text


def test_pictures_name_only_what_is_far_from_the_roof() -> None:
    rows = fixture_rows.rows(ops=("mul", "gelu"))
    ratio = {"mul": 1.0, "gelu": 0.5}
    rows = [row | {"share": row["share"] * ratio[row["op"]]} if "share" in row else row for row in rows]
    spec = roofline.chart(rows, interactive=False, width=860).to_dict()
    named = {v["name"] for layer in spec["layer"] for v in layer["data"]["values"] if "column" in v}
    assert named == {"gelu", "gelu backward"}


def test_a_roofline_that_was_changed_is_not_current() -> None:
    rows = fixture_rows.rows(ops=("gelu",))
    text = roofline.svg(rows)
    assert "prefers-color-scheme:dark" in text
    assert roofline.current(text, rows)
    assert not roofline.current(text.replace("FLOP", "PLOF", 1), rows)
    assert not roofline.current(text, fixture_rows.rows(ops=("gelu",), slower=1.1))


def test_no_run_is_said(tmp_path) -> None:
    with pytest.raises(RidgelineError, match="no recorded run"):
        readme.pages(tmp_path, {})


def test_a_readme_without_marks_is_one_sentence() -> None:
    with pytest.raises(RidgelineError, match="README.md needs the lines <!-- table -->"):
        readme.filled("<!-- headline -->\n<!-- /headline -->\n", {"headline": "", "table": ""})


@pytest.fixture
def house(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A source tree with a recorded H100 and pages that are current."""
    monkeypatch.setattr(readme.store, "HOUSE", tmp_path)
    (tmp_path / "README.md").write_text(f"before\n{BLOCKS}after\n")
    record(tmp_path, "h100", more=front_rows())
    assert verb(monkeypatch) == 0
    return tmp_path


def record(house, slug: str, more: list[dict] | None = None, **facts) -> Path:
    """Writes a GPU's results: the fixture's rows, and some more of the same run."""
    path = fixture_rows.write(house / f"results/{slug}.jsonl", **facts)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    same = {"schema": store.SCHEMA, "run": rows[0]["run"]}
    figures = {"read": 4, "write": 4, "flops": 8, "roof_seconds": 1e-9}
    for row in more or []:
        seconds = dict.fromkeys(("median", "low", "high"), row["seconds"]["median"])
        rows.append(row | same | figures | {"seconds": seconds})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verb(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(readme.sys, "argv", ["readme", *arguments])
    return readme.main()


def test_every_recorded_gpu_has_a_page(house, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {path.name: path.read_text() for path in (house / "docs/measured").iterdir()}
    assert set(made) == {"h100.md", "h100.svg"}
    front_page = (house / "README.md").read_text()
    assert front_page.startswith("before\n<!-- headline -->\nMeasured in bfloat16 on one NVIDIA H100 80GB HBM3:")
    assert front_page.endswith("<!-- /table -->\nafter\n")
    path = record(house, "h200", name="NVIDIA H200", seed=1, ops=("softmax", "mul"))
    assert verb(monkeypatch) == 0
    assert (house / "README.md").read_text() == front_page
    first, second = ((house / f"docs/measured/{gpu}.md").read_text() for gpu in ("h100", "h200"))
    assert first.replace(" Other GPUs: [NVIDIA H200](h200.md).", "") == made["h100.md"]
    assert second.startswith("# Measured on one NVIDIA H200\n")
    assert set(re.findall(r"^### `(.*)`$", second, re.MULTILINE)) == {"softmax", "mul"}
    rows = [row for row in results.newest(path) if row["type"] == "bench"]
    shares = [row["share"] for row in rows if (row["op"], row["impl"]) == ("softmax", "cuda_cluster")]
    assert shares
    assert all(f"| {share:.2f} |" in second for share in shares)


def test_a_changed_figure_or_a_new_row_is_found(
    house, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> str:
        status, said = verb(monkeypatch, "--check"), capsys.readouterr().out
        assert status == ("not current" in said)
        return said

    assert "all pages are current" in check()
    names = ["README.md", "docs/bars.svg", "docs/measured/h100.md", "docs/measured/h100.svg", "docs/ops.md"]
    texts = {name: (house / name).read_text() for name in names}
    for name, text in texts.items():
        place = [match.start() for match in re.finditer(r"\d", text)][7]
        (house / name).write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
    assert f"not current: {', '.join(names)};" in check()
    for name in names:
        (house / name).unlink() if name != "README.md" else (house / name).write_text(BLOCKS)
    assert f"not current: {', '.join(names)};" in check()
    for name, text in texts.items():
        (house / name).write_text(text)
    assert "all pages are current" in check()
    record(house, "h200", name="NVIDIA H200", seed=1, ops=("softmax",))
    assert "docs/measured/h100.md, docs/measured/h200.md, docs/measured/h200.svg, docs/ops.md;" in check()
    assert verb(monkeypatch) == 0
    assert "all pages are current" in check().splitlines()[-1]
    record(house, "h200", name="NVIDIA H200", seed=1, ops=("softmax",), slower=1.5)
    assert "not current: docs/measured/h200.md, docs/measured/h200.svg;" in check()
    (house / "results/h200.jsonl").unlink()
    assert "docs/measured/h200.svg" in check()
    assert verb(monkeypatch) == 0
    assert not list((house / "docs/measured").glob("h200*"))
    record(house, "h100", more=front_rows(slower=1.5))
    assert "not current: README.md, docs/bars.svg, docs/measured/h100.md, docs/measured/h100.svg;" in check()


def test_gpus_in_order_and_only_those_with_figures(house) -> None:
    """Not a CPU, nor a GPU whose file has no timed row."""
    for gpu in ("a10", "b200", "cpu", "h200"):
        path = record(house, gpu, name=f"NVIDIA {gpu.upper()}", gpu=gpu != "cpu")
        if gpu == "b200":
            path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:2]))
    assert [path.stem for path in results.gpus(house / "results")] == ["h100", "a10", "h200"]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", "docs/ops.md", "docs/measured/h100.md", "docs/measured/h200.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    titles = re.findall(r"^#+ .*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert len(titles) == len(set(titles)), "two headings would share an anchor"
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target
