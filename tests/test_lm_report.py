"""`ridgeline lm report` and `lm survey`: what is recorded, what the page shows of it, and comparing two runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest

import browser
from ridgeline.lab.measurement import compare
from ridgeline.lm import command, lab, parts, report, survey, views
from ridgeline.op import RidgelineError

TIMES = {"median": 2.0, "low": 1.9, "high": 2.1}


def parsed(verb, *words):
    return command.parser_of(verb).parse_args(list(map(str, words)))


def step(impl, way, scale=1.0, **more):
    row = {"part": "bench", "case": "small 4 x 512", "dtype": "bfloat16", "direction": way, "impl": impl}
    seconds = {end: value * scale for end, value in TIMES.items()}
    figures = {"tokens_per_second": 1024 / scale, "mfu": 0.4, "peak_bytes": int(3e9 * scale)}
    return row | {"status": "ok", "seconds": seconds} | figures | more


def recording(path, scale=1.0):
    run = lab.Recording(path, "cpu", "a" * 40)
    for way in ("forward", "backward", "step"):
        run.write(step("ours", way, scale))
        run.write(step("plain", way, 3.0))
    run.write({k: v for k, v in step("plain", "step").items() if k != "seconds"} | {"predicted_bytes": 9 << 30})
    run.write(step("<script>alert(1)</script>", "step"))
    run.write(step("compiled", "all") | {"status": "out of memory", "reason": "no more", "seconds": None})
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The parts that a CPU answers in a moment, as a recorded run."""
    path = tmp_path_factory.mktemp("lm") / "run.jsonl"
    options = parsed("report", "--size", "tiny", "--context", 32, "--batch", 1, "--device", "cpu")
    run = lab.Recording(path, "cpu", "b" * 40)
    for name in ("profile", "memory", "precision", "checkpoint", "first", "leaderboard"):
        for row in parts.PARTS[name][0](options):
            run.write(row)
    for row in map(json.loads, recording(path.with_name("other.jsonl")).read_text().splitlines()):
        if row["type"] == "lm":
            run.write({k: v for k, v in row.items() if k not in ("schema", "run", "type")})
    return path


def test_a_recorded_run_makes_a_page_that_asks_for_nothing(tiny, tmp_path, capsys):
    assert report.main(parsed("report", "--recorded", tiny, "--out", tmp_path)) == 0
    page = (tmp_path / "index.html").read_text()
    assert len(page) < 3 << 20
    for words in ("recorded 20", "commit bbbbbbb", "Where the memory goes", "The five largest of", "float16 += float16",
                  "Softmax against products", "keep everything", "The first step of a process",
                  "Planned memory of a step, 2 x 32768 tokens", "attention 1 x 512",
                  "out of memory, no more", "script-src &#39;none&#39;"):  # fmt: skip
        assert words in page, words
    assert "<script>alert" not in page
    assert "left out" not in page
    if not browser.executable():
        if os.environ.get("CI") == "true":
            pytest.fail(browser.INSTALL)
        pytest.skip(browser.INSTALL)
    with browser.Browser() as chromium:
        for width in (1280, 390):
            opened = chromium.open(tmp_path / "index.html", width=width, dark=width == 390)
            assert opened.said() == opened.asked() == []
            assert opened.js("Math.max(document.documentElement.scrollWidth, innerWidth)") == width


def test_a_gpu_s_run_stands_beside_a_cpu_s(tiny, tmp_path, monkeypatch):
    recording(tmp_path / "results/h200.jsonl")
    monkeypatch.setattr(lab, "recorded", lambda: tmp_path / "results")
    left = {"status": "left out", "reason": "for time"}
    monkeypatch.setattr(report, "gathered", lambda options: [step("ours", "step"), step("compiled", "all") | left])
    assert report.main(parsed("report", "--size", "tiny", "--device", "cpu", "--out", tmp_path / "out")) == 0
    page = (tmp_path / "out/index.html").read_text()
    assert "this machine" in page
    assert "commit aaaaaaa" in page
    assert "bench, small 4 x 512 bfloat16 compiled</b>: for time" in page
    _, rows = lab.recording(tmp_path / "out/run.jsonl")
    assert [row["impl"] for row in rows] == ["ours", "compiled"]


def test_a_recorded_run_shows_the_boards_of_its_gpu(tmp_path, monkeypatch):
    file = tmp_path / "course/h200.jsonl"
    file.parent.mkdir()
    board = {"type": "lm leaderboard", "time": "2026-11-28T01:02:03Z"}
    step = {"board": "step", "batch": 2, "context": 32768, "peak_memory_bytes": 137_800_000_000, "seconds": TIMES}
    alone = {"board": "attention", "context": 16384, "seconds": {"ridgeline": TIMES, "torch": TIMES}}
    rows = [board | step | {"floor_seconds": {"products": 1e-4, "rest": 1e-4}}]
    rows += [{"type": "lm scale"}, board | {"board": "step"}, board | alone | {"floor_seconds": 1e-4}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(lab.store, "recorded", lambda: tmp_path)
    assert [row["impl"] for row in lab.boards("h200")] == ["ridgeline", "ridgeline", "torch"]
    assert report.main(parsed("report", "--recorded", recording(tmp_path / "h200.jsonl"), "--out", tmp_path)) == 0
    page = (tmp_path / "index.html").read_text()
    for words in ("2 x 32768, 2026-11-28", "attention 1 x 16384, 2026-11-28", "128 GiB"):
        assert words in page, words
    file.write_text("{\n")
    with pytest.raises(RidgelineError, match="line 1 is no JSON"):
        lab.boards("h200")
    assert lab.boards("h100") == []


def test_compare_holds_two_runs_against_each_other(tmp_path, capsys):
    one, two = recording(tmp_path / "one.jsonl"), recording(tmp_path / "two.jsonl", 0.8)
    parser = argparse.ArgumentParser()
    compare.arguments(parser)
    assert compare.main(parser.parse_args([str(one), str(two), "--json"])) == 0
    rows = json.loads(capsys.readouterr().out)
    said = {(r["impl"], r["direction"], "after_bytes" in r): r["change"] for r in rows}
    assert said["ours", "step", False] == "faster"
    assert said["plain", "step", False] == "same"
    assert said["ours", "step", True] == "less"
    assert compare.main(parser.parse_args([str(one), str(two)])) == 0
    assert "peaks of memory: 3 less" in capsys.readouterr().out


def test_a_run_that_is_none_is_refused(tmp_path):
    (tmp_path / "text").write_text("no rows\n")
    with pytest.raises(RidgelineError, match="is not a results file of Ridgeline"):
        report.main(parsed("report", "--recorded", tmp_path / "text", "--out", tmp_path))
    lab.Recording(tmp_path / "empty", "cpu", "a" * 40)
    with pytest.raises(RidgelineError, match="holds no run of"):
        report.main(parsed("report", "--recorded", tmp_path / "empty", "--out", tmp_path))
    with pytest.raises(RidgelineError, match="--minutes must be above 0"):
        report.main(parsed("report", "--minutes", "nan", "--out", tmp_path))
    with pytest.raises(RidgelineError, match="there is no size 'huge'"):
        report.main(parsed("report", "--size", "huge", "--out", tmp_path))
    with pytest.raises(RidgelineError, match="--context must be at least 1"):
        report.main(parsed("report", "--context", 0, "--out", tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RidgelineError, match="cannot be written"):
        report.main(parsed("report", "--out", tmp_path / "file"))


def test_a_survey_keeps_its_rows_and_says_what_it_left(tmp_path):
    words = ("--sizes=tiny", "--precisions=float32", "--impls=ours", "--context=16", "--batch=1", "--most=64")
    path = tmp_path / "run.jsonl"
    options = parsed("survey", *words, "--minutes=1.5", "--device=cpu", f"--record={path}")
    assert survey.main(options) == 0
    _, rows = lab.recording(path)
    timed = {r["direction"] for r in rows if r["part"] == "bench" and r.get("seconds")}
    assert timed == {"forward", "backward", "step"}
    assert next(r["fits"] for r in rows if "fits" in r) == 64
    assert any("overhead" in r for r in rows)
    assert all(r["predicted_bytes"] > 0 for r in rows if "kinds" in r)
    late = list(survey.rows(parsed("survey", *words, "--minutes=1e-9", "--device=cpu")))
    assert {row["status"] for row in late if "kinds" not in row} == {"left out"}


@pytest.mark.parametrize(("words", "said"), [
    (("--sizes=huge",), "--sizes takes some of"), (("--impls=best",), "--impls takes some of"),
    (("--precisions=int8",), "--precisions takes some of"), (("--minutes=0",), "--minutes must be"),
    (("--limit=-1",), "--limit must be"),
])  # fmt: skip
def test_a_survey_of_what_is_not_there_is_one_sentence(words, said):
    with pytest.raises(RidgelineError, match=said):
        survey.main(parsed("survey", *words))


def test_a_process_that_hangs_or_dies_is_said():
    lines = lab.Lines([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(600)"])
    assert lines.next(30) == {}
    start = time.monotonic()
    assert lines.next(0.2) is None
    lines.end()
    assert time.monotonic() - start < 10
    lines = lab.Lines([sys.executable, "-c", "raise SystemExit('no disk')"])
    assert lines.next(30) is None
    assert lines.fault() == "the process ended with 1 and said: no disk"
    lines.end()


def test_jobs_come_in_the_order_of_their_worth():
    order = survey.jobs(parsed("survey"))
    assert order[:3] == ["bench:xl:bfloat16:ours", "bench:xl:bfloat16:plain", "bench:small:bfloat16:ours"]
    assert [job.endswith("compiled") for job in order] == sorted(job.endswith("compiled") for job in order)
    assert len(order) == len(set(order)) == 8 * 3 + 4


def test_a_graph_alone_needs_a_gpu():
    with pytest.raises(RidgelineError, match="needs a GPU"):
        survey.check(parsed("survey", "--impls", "graph", "--device", "cpu"))


def test_graphs_are_timed_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey, "chosen_device", lambda options: SimpleNamespace(type="cuda"))
    order = survey.jobs(parsed("survey"))
    assert sum(job.endswith(":graph") for job in order) == sum(job.endswith(":compiled") for job in order) == 8
    assert survey.options_of("bench:small:bfloat16:graph", parsed("survey")).graph
    assert not getattr(survey.options_of("bench:small:bfloat16:ours", parsed("survey")), "graph", False)


def test_the_headline_claims_no_speed_within_the_noise():
    about = {"name": "a card", "rows": [step("ours", "step"), step("plain", "step", 1.02)]}
    assert "within the noise" in report.headline(about)[0]
    about["rows"][1] = step("plain", "step", 2.0)
    assert report.headline(about)[0] == "a card: a step of small at 2.0x the speed of the plain formulas"
    assert views.bench([]).tables == []
