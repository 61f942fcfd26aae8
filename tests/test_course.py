"""Recorded answers to the assignment: what `ridgeline lm` keeps, and what the guide's table says."""

import json
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.lab.analysis import course
from ridgeline.lab.measurement import store
from ridgeline.op import RidgelineError

ROOT = Path(__file__).resolve().parents[1]
TINY = ("--size", "tiny", "--context", "16", "--batch", "1", "--device", "cpu", "--json")
TIMES = {"median": 0.002, "low": 0.001, "high": 0.003, "mean": 0.0025}
POINT = {"batch": 8, "dtype": "float32", "causal": False, "dim": 128, "in_use_bytes": 2**30}
XL = {"size": "xl", "context": 2048, "batch": 4, "mode": "step", "precision": "float32", "impl": "ridgeline"}
XL |= {"checkpoint": 0, "compile": False}
FULL = {"kind": "", "bound": "", "status": "ok", "peer": False, "share": 0.5, "seconds": TIMES}
FULL |= dict.fromkeys(("bytes", "read", "write", "flops", "roof_seconds"), 1)
OTHERS = [
    {"type": "bench", "op": "weighted_sum", "case": "16384x4096", "dtype": "float32", "impl": impl, "direction": way}
    | FULL
    for impl in ("triton", "torch")
    for way in ("forward", "backward")
]
MODELS = [
    {"type": "lm", "part": "bench", "case": "xl 4 x 512", "dtype": "bfloat16", "impl": impl, "direction": way}
    | {"seconds": TIMES, "status": "ok"}
    for impl in ("ours", "plain", "compiled")
    for way in ("forward", "backward")
]
ROWS = [
    ("bench", {"size": "small", "warmups": 0, "seconds": TIMES | {"mean": 0.25}}),
    ("bench", {"size": "small", "warmups": 5, "seconds": TIMES}),
    ("bench", {"size": "small", "first": {"compiling": 1.5, "running": 0.02, "whole": 2.0}}),
    ("attention", POINT | {"impl": "plain", "seq": 8192, "seconds": {"forward": TIMES, "backward": TIMES}}),
    ("attention", POINT | {"impl": "plain", "seq": 16384, "error": "out of memory: all"}),
    ("attention", POINT | {"impl": "compiled", "seq": 16384, "seconds": {"forward": TIMES}}),
    ("attention", POINT | {"impl": "compiled", "seq": 8192, "seconds": {"forward": TIMES | {"median": 0.001}}}),
    ("scale", {"name": "products", "exponent": 2.871}),
    ("memory", XL | {"heads": 16, "measured_bytes": None}),
    ("memory", XL | {"width": 128, "measured_bytes": 1 << 30}),  # of another model
    ("checkpoint", XL | {"layers": 2, "way": "keep everything", "measured_bytes": 1 << 30, "seconds": 1.0}),
    ("checkpoint", XL | {"way": "keep everything", "measured_bytes": 99 << 30, "seconds": 4.0}),
    (
        "attention",
        POINT
        | {
            "impl": "plain",
            "batch": 1,
            "dtype": "bfloat16",
            "seq": 128,
            "seconds": {"both": TIMES, "forward": TIMES, "backward": TIMES},
        },
    ),
    (
        "attention",
        POINT
        | {
            "impl": "triton",
            "batch": 1,
            "dtype": "bfloat16",
            "seq": 128,
            "seconds": {"both": TIMES, "forward": TIMES, "backward": TIMES},
        },
    ),
    (
        "profile",
        {"size": "medium", "context": 512, "impl": "naive", "precision": "float32", "device": "cuda"}
        | {
            "kinds": {
                "products": {"inference": 9, "forward": 30, "backward": 30},
                "norms": {"inference": 9, "forward": 40, "backward": 0},
            },
            "attention": {"products": {"us": 10, "flops": 100}, "softmax": {"us": 20, "flops": 5}},
        },
    ),
    (
        "bench",
        {
            "size": "small",
            "mode": "step",
            "autocast": "bfloat16",
            "context": 512,
            "impl": "ridgeline",
            "seconds": TIMES,
        },
    ),
    (
        "leaderboard",
        {
            "board": "step",
            "size": "leaderboard",
            "impl": "ridgeline",
            "seconds": TIMES,
            "peak_memory_bytes": 137.8e9,
            "floor_seconds": {"products": 0.001, "rest": 0.0005},
        },
    ),
    ("leaderboard", {"board": "attention", "seconds": {"ridgeline": TIMES, "torch": TIMES}, "floor_seconds": 0.0015}),
    *[
        (
            "memory",
            {
                "size": "xl",
                "batch": 4,
                "impl": "ridgeline",
                "checkpoint": 0,
                "context": context,
                "mode": mode,
                "precision": precision,
                "measured_bytes": 100 << 30,
                "peak_bytes": 99 << 30,
            },
        )
        for context in (128, 2048)
        for mode in ("forward", "step")
        for precision in ("float32", "bfloat16")
    ],
    ("memory", XL | {"measured_bytes": 99 << 30, "peak_bytes": 99 << 30}),
    ("lecture6", {"description": "matmul(dim=8192)", "seconds": TIMES}),
    ("lecture6", {"description": "matmul(dim=16384)", "seconds": TIMES}),
]
SAID = {
    "warm-up": "mean of a step after 0, 5 warm-ups: 250 ms, 2.50 ms; the first step 2.00 s, of which compiling 1.50 s",
    "attention": "d 128, context 8192: forward 2.00 ms, backward 2.00 ms, 1.0 GiB before backward; "
    "16384: out of memory",
    "compiled": "float32, d 128, context 8192, forward: compiled 1.00 ms, plain 2.00 ms",
    "flash": "bfloat16, d 128, context 128, both: triton 2.00 ms, plain 2.00 ms",
    "flash-forward": "bfloat16, d 128, context 128, forward: triton 2.00 ms, plain 2.00 ms",
    "flash-backward": "bfloat16, d 128, context 128, backward: triton 2.00 ms, plain 2.00 ms",
    "weighted-sum": "16384 x 4096, float32: forward 2.00 ms, PyTorch's 2.00 ms; backward 2.00 ms, PyTorch's 2.00 ms",
    "models": "xl, bfloat16: forward: ours 2.00 ms, plain 2.00 ms; forward and backward: ours 2.00 ms, plain 2.00 ms",
    "compiled-models": "xl, bfloat16, backward: compiled 2.00 ms, plain 2.00 ms, ours 2.00 ms",
    "profile": "medium, float32: products 60%, norms 40% of training; softmax takes 2.0 times as long as attention's "
    "products, with 5.0% of their operations",
    "autocast": "step: small 2.00 ms",
    "leaderboard": "2.00 ms ±50%, floor 1.50 ms, peak 137.8 GB",
    "attention-board": "2.00 ms; PyTorch's own 2.00 ms, floor 1.50 ms",
    "peaks": "xl in float32 and bfloat16: 128 forward 100.0 GiB and 100.0 GiB, 128 step 100.0 GiB and 100.0 GiB, "
    "2048 forward 100.0 GiB and 100.0 GiB, 2048 step 99.0 GiB and 100.0 GiB; predicted within 1.0%",
    "scale": "products^2.87",
    "lecture": "`matmul(dim=16384)` 2.00 ms",
    "memory": "; measured peak of a step 99.0 GiB",
    "residuals": "",
    "checkpoint": "; measured: all kept 99.0 GiB and 4.00 s",
}


def page(root: Path, gpu: str | None = "NVIDIA H200", name: str = "h200") -> str:
    file = root / course.FOLDER / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"type": f"lm {verb}", "machine": {"gpu": gpu}} | row for verb, row in ROWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path, found in ((course.BENCH, OTHERS), (course.SURVEY, MODELS)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(
            "".join(json.dumps({"schema": store.SCHEMA, "run": "a"} | row) + "\n" for row in found)
        )
    return course.filled("".join(f"<!-- course {name} -->old<!-- /course -->|" for name in course.ANSWERS), root)


def test_answers_are_those_of_the_rows(tmp_path):
    said = [cell.split("-->")[1].removesuffix("<!-- /course ") for cell in page(tmp_path).split("|")[:-1]]
    assert dict(zip(course.ANSWERS, said, strict=True)) == SAID
    assert "2.50 ms" not in page(tmp_path, None), "a CPU's rows answer nothing"


def test_a_gpu_s_file_comes_before_another_s(tmp_path):
    page(tmp_path, name="a100")
    path, own = tmp_path / course.FOLDER / "h200.jsonl", {"type": "lm scale", "machine": {"gpu": "NVIDIA H200"}}
    path.write_text("")
    assert len(course.recorded(tmp_path)) > 1
    path.write_text(json.dumps(own) + "\n")
    assert course.recorded(tmp_path) == [own]


def test_the_guide_asks_for_every_answer():
    text = (ROOT / "docs/guide.md").read_text()
    assert {mark[2] for mark in course.MARK.finditer(text)} == set(course.ANSWERS)
    assert course.filled(text, ROOT) == text


@pytest.mark.parametrize("line", ["{", "[]", '{"type": "lm bench"}'])
def test_what_is_no_record_is_one_sentence(tmp_path, line):
    page(tmp_path)
    (tmp_path / course.FOLDER / "h200.jsonl").write_text(f"{line}\n")
    with pytest.raises(RidgelineError, match="line 1 is not a row that `ridgeline lm` recorded"):
        course.filled("<!-- course scale --><!-- /course -->", tmp_path)
    with pytest.raises(RidgelineError, match="a page wants the answer 'gone'"):
        course.filled("<!-- course gone --><!-- /course -->", Path("/nowhere"))


@pytest.mark.parametrize(
    ("words", "count", "facts"),
    [
        (["memory", *TINY, "--heads", "2"], 1, {"size": "tiny", "heads": 2, "impl": "ridgeline", "card": "cpu"}),
        (["memory", *TINY, "--grid", "8,16"], 8, {"card": "cpu", "batch": 1}),
        (["checkpoint", *TINY], 3, {"size": "tiny", "precision": "float32", "card": "cpu"}),
        (["precision", "--device", "cpu", "--json"], 1, {"device": "cpu"}),
        (["sizes", "--json"], 12, {}),
    ],
)
def test_verbs_record_what_they_print(words, count, facts, tmp_path, capsys):
    file = tmp_path / "new" / "rows.jsonl"
    for _ in range(2):
        assert cli.main(["lm", *words, "--record", str(file)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * count
    assert {row["type"] for row in rows} == {f"lm {words[0]}"}
    assert all(row["machine"].keys() == {"gpu", "threads", "torch"} and row["time"] for row in rows)
    assert all(facts.items() <= row.items() for row in rows)
    if words[0] == "sizes":
        printed = [{"size": name} | row for name, row in printed.items()]
    printed = printed["ways"] if words[0] == "checkpoint" else printed if isinstance(printed, list) else [printed]
    for row, told in zip(rows[count:], printed, strict=True):
        for name, value in told.items():
            if isinstance(value, int | str | bool) or value is None:
                assert row[name] == value, name


@pytest.mark.parametrize("verb", ["memory", "checkpoint", "precision", "sizes", "bench", "attention", "scale"])
def test_a_file_that_cannot_be_written_is_one_sentence(verb, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["lm", verb, "--record", str(tmp_path / "file" / "rows.jsonl")])
    said = capsys.readouterr()
    assert said.err.startswith("ridgeline: lm: --record ")
    assert said.out == ""
