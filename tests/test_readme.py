"""What `make readme` writes: the rung that users get, the runs that the figures come from, and every op."""

import json

import pytest

import fixture_rows
from ridgeline import nn
from ridgeline.lab import readme, results
from ridgeline.op import RidgelineError, get, registry


def timed(
    impl: str, median: float, peer: bool = False, direction: str = "forward", dtype: str = "float32", bytes: int = 8
) -> dict:
    kind = "eager" if peer else "triton"
    what = {
        "op": "softmax",
        "case": f"{bytes} B",
        "dtype": dtype,
        "direction": direction,
        "impl": impl,
        "peer": peer,
        "kind": kind,
    }
    return what | {
        "type": "bench",
        "status": "ok",
        "bound": "memory",
        "bytes": bytes,
        "share": 0.5,
        "seconds": {"median": median},
    }


def run(copy: float, dirty: bool) -> list[dict]:
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580", "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0"}
    roof = {"type": "roof", "copy": {"median": copy}, "matmul": {"float32": {"median": 5e13}}}
    return [{"type": "run", "dirty": dirty, "machine": machine}, roof]


def test_a_rung_that_no_user_gets_is_not_shown() -> None:
    rungs = [timed("triton_row", 1.0), timed("triton", 1.1), timed("torch", 1.2, peer=True)]
    assert not get("softmax").implementations["triton_row"].served
    found = readme.serving(get("softmax"), rungs)
    assert found is not None
    assert found["impl"] == "triton"
    text = readme.table({("softmax", "8 B", "float32", "forward"): rungs}, registry())
    assert "`triton`" in text
    assert "triton_row" not in text


def test_where_torch_serves_the_fastest_kernel_stands_beside_it() -> None:
    rungs = [timed("torch", 1.0, peer=True), timed("triton", 1.1)]
    rungs = [row | {"op": "matmul"} for row in rungs]
    lines = readme.table({("matmul", "8 B", "float32", "forward"): rungs}, registry()).splitlines()[2:]
    assert len(lines) == 2
    assert "| `torch` | 1.00 s" in lines[0]
    assert "`triton`, if named | 1.10 s" in lines[1]


def test_one_line_an_op() -> None:
    rows = [
        timed("triton", 1.0, direction=way, dtype=d, bytes=b)
        for way in ("forward", "backward")
        for d in ("float32", "bfloat16")
        for b in (8, 16)
    ]
    text = readme.short(results.works(rows), registry())
    assert text.splitlines()[2:] == [
        "| `softmax` | 16 B, bfloat16 | `triton` | 1.00 s | **0.50** |  | 1.00 s | **0.50** |  |"
    ]


def test_of_the_largest_the_first_of_the_op() -> None:
    """Whichever was recorded last; a hundredth more bytes is no larger."""
    first, *_, last = [c.name for c in get("softmax").cases]
    rows = [timed("triton", 1.0, bytes=b) | {"case": name} for name, b in ((last, 1004), ("small", 8), (first, 1000))]
    for some in (rows, rows[::-1]):
        assert list(readme.chosen(results.works(some))) == [("softmax", first, "float32")]


def test_the_header_gives_all_runs() -> None:
    text = readme.header([run(3.0e12, False), run(3.02e12, True)])
    assert "2 runs" in text
    assert "copy 3.00 to 3.02 TB/s" in text
    assert "float32 50.0 TFLOP/s" in text
    assert "1 of these runs is" in text
    assert "dirty" not in readme.header([run(3e12, False)])


@pytest.mark.parametrize(
    ("values", "text"),
    [([1e12], "1.00 TB/s"), ([9e11, 1.1e12], "900 GB/s to 1.10 TB/s"), ([2e12, 1e12], "1.00 to 2.00 TB/s")],
)
def test_between(values: list[float], text: str) -> None:
    assert readme.between(values, "B/s") == text


def test_every_op_and_module_is_listed() -> None:
    text, ops = readme.contents(registry()), registry()
    for name, op in ops.items():
        (line,) = [row for row in text.splitlines() if f"| `{name}` |" in row]
        assert all(rung in line for rung in op.implementations)
    assert "`RMSNorm`" in text
    assert "`AdamW`" in text
    assert hasattr(nn, "RMSNorm")


def test_the_newest_rows_of_each_piece_of_work(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one case leaves the others' rows; a grid's are not shown, nor those of cases that are no benchmarks now. Of rungs that the
    newest run left out older rows are for ladders alone, and counters are those that rungs still name."""
    counter = registry()["reduce_sum"].implementations["v3"].counter
    runs = {
        "1": (
            "ridgeline bench reduce_sum",
            ["32 Mi", "2^30", "gone", "1"],
            ["torch", "v2", "v3", "no more"],
            {"v3": "old"},
        ),
        "2": ("ridgeline bench reduce_sum --counters", ["32 Mi"], ["torch", "v2", "v3"], {"v3": counter}),
        "3": ("ridgeline bench --case '32 Mi' reduce_sum --impl torch,v2", ["32 Mi"], ["torch", "v2"], {}),
        "4": ("ridgeline bench --grid reduce_sum", ["2^30"], ["torch"], {}),
    }
    for name in runs:
        (tmp_path / f"{name}.jsonl").touch()

    def load(path) -> list[dict]:
        command, cases, rungs, counted = runs[path.stem]
        facts = {"op": "reduce_sum", "dtype": "float32", "direction": "forward", "status": "ok"}
        rows = [facts | {"type": "bench", "case": case, "impl": impl} for case in cases for impl in rungs]
        rows += [
            facts | {"type": "counter", "case": cases[0], "impl": impl, "counter": name}
            for impl, name in counted.items()
        ]
        return [{"type": "run", "command": command}] + [row | {"run": path.stem} for row in rows]

    monkeypatch.setattr(results.store, "load", load)
    rows = results.newest(tmp_path)
    found = {
        kind: [(row["run"], row["case"], row["impl"]) for row in rows if row["type"] == kind]
        for kind in ("bench", "older", "counter")
    }
    assert found["bench"] == [
        *(("3", "32 Mi", impl) for impl in ("torch", "v2")),
        *(("1", "2^30", impl) for impl in ("torch", "v2", "v3", "no more")),
    ]
    assert found["older"] == [("2", "32 Mi", "v3")]
    assert found["counter"] == [("2", "32 Mi", "v3")]


def test_no_run_is_said(tmp_path) -> None:
    with pytest.raises(RidgelineError, match="no recorded run"):
        readme.pages(tmp_path, "")


@pytest.fixture
def house(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A source tree with a recorded H100 and pages that are current."""
    monkeypatch.setattr(readme.store, "HOUSE", tmp_path)
    monkeypatch.setattr(
        readme.roofline, "render", lambda rows, folder: (folder / "roofline.svg").write_text(rows[0]["machine"]["gpu"])
    )
    (tmp_path / "README.md").write_text("<!-- measured -->\n<!-- /measured -->\n<!-- ops -->\n<!-- /ops -->\n")
    fixture_rows.write(tmp_path / "results/h100/20261120-021500-abc1234.jsonl")
    assert verb(monkeypatch) == 0
    return tmp_path


def verb(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(readme.sys, "argv", ["readme", *arguments])
    return readme.main()


def h200(house, name: str = "20261121-021500-abc1234", **facts):
    """A run of an H200 that timed some of the ops."""
    return fixture_rows.write(
        house / f"results/h200/{name}.jsonl", name="NVIDIA H200", seed=1, ops=("softmax", "mul"), **facts
    )


def test_every_recorded_gpu_has_a_section(house, monkeypatch: pytest.MonkeyPatch) -> None:
    front, measured = house / "README.md", house / "docs/measured.md"
    before = front.read_text(), measured.read_text()
    h200(house)
    assert verb(monkeypatch) == 0
    assert (house / "docs/roofline.svg").read_text() == "NVIDIA H100 80GB HBM3"
    assert front.read_text() == before[0].replace(
        "[docs/measured.md](docs/measured.md).",
        "[docs/measured.md](docs/measured.md). Other GPUs: [NVIDIA H200](docs/measured.md#h200).",
    )
    assert front.read_text() != before[0]
    first, second = measured.read_text().split("\n## H200\n\n")
    assert first == before[1]
    assert "\n## H100\n\nNVIDIA H100 80GB HBM3, driver" in first
    assert second.startswith("NVIDIA H200, driver")
    assert "The rows come from 1 run in `results/h200`" in second
    ops = {line.split("`")[1] for line in second.splitlines() if line.startswith("| `")}
    assert ops == {"softmax", "mul"}
    rows = [row for row in results.newest(house / "results/h200") if row["type"] == "bench"]
    shares = [row["share"] for row in rows if (row["op"], row["impl"]) == ("softmax", "cuda_cluster")]
    assert shares
    assert all(f"**{share:.2f}**" in second for share in shares)


def test_a_page_that_lacks_a_gpu_s_newest_rows_is_stale(
    house, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> str:
        status, said = verb(monkeypatch, "--check"), capsys.readouterr().out
        assert status == ("not current" in said)
        return said

    assert "the pages are current" in check()
    h200(house)
    assert "not current: README.md, measured.md;" in check()
    assert verb(monkeypatch) == 0
    assert "the pages are current" in check()
    h200(house, "20261122-021500-abc1234", slower=1.5)
    assert "not current: measured.md;" in check()
    assert verb(monkeypatch) == 0
    assert "the pages are current" in check()
    for path in (house / "results/h200").iterdir():
        path.unlink()
    assert "not current: README.md, measured.md;" in check()


def test_gpus_in_order_and_only_those_with_figures(house) -> None:
    """Not a CPU, nor a GPU of which a run has only begun, or of whose runs each was a grid's."""
    h200(house)
    for folder in ("a100", "b200", "cpu"):
        path = fixture_rows.write(house / f"results/{folder}/20261120-021500-abc1234.jsonl", gpu=folder != "cpu")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if folder == "a100":
            rows[0]["command"] = "ridgeline bench --grid --record"
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows[:2] if folder == "b200" else rows)))
    fixture_rows.write(house / "results/a10/20261120-021500-abc1234.jsonl", name="NVIDIA A10")
    assert [folder.name for folder in results.gpus(house / "results")] == ["h100", "a10", "h200"]
