"""The report: what it says of rows, and the page itself in headless Chromium."""

import argparse
import os
import re
import time
from pathlib import Path

import pytest

import browser
import fixture_rows
from ridgeline.lab import report, roofline, verdict
from ridgeline.lab.report import command, measure, page, view
from ridgeline.op import RidgelineError, get

H100, LAPTOP = fixture_rows.rows(), fixture_rows.rows(gpu=False)


def options(module, *arguments):
    parser = argparse.ArgumentParser()
    module.arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A laptop's report beside recorded runs, one with hostile names, and one of a run that timed nothing."""
    folder = tmp_path_factory.mktemp("report")
    laptop, recorded = view.Source(LAPTOP), view.Source(H100, recorded=True)
    changes = view.changes(recorded, view.Source(fixture_rows.rows(seed=1, slower=1.1)))
    hostile = view.Source(fixture_rows.rows(hostile=True))
    row = {"impl": fixture_rows.HOSTILE, "group": "cuda", "arch": "gfx942", "reason": fixture_rows.HOSTILE}
    kernels = [{"op": fixture_rows.HOSTILE, "left": 1, "spills": 0, "rows": [], "not_built": [row]}]
    other = view.Source(fixture_rows.rows(name="NVIDIA H200", seed=1, ops=("softmax",)), recorded=True)
    empty = view.Source([r for r in LAPTOP if r["type"] in ("run", "roof")])
    made = {
        "two": page.render([laptop, recorded], changes=changes, notes=["a note"]),
        "three": page.render([laptop, recorded, other]),
        "hostile": page.render(
            [hostile], kernels=kernels, checks=[{"title": "here", "note": "", **view.checked(hostile.checks)}]
        ),
        "empty": page.render([empty]),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text)
    return folder


@pytest.fixture(scope="module")
def chromium():
    if not browser.executable():
        if os.environ.get("CI") == "true":
            pytest.fail(browser.INSTALL)
        pytest.skip(browser.INSTALL)
    with browser.Browser() as running:
        yield running


def width(opened):
    return opened.js("Math.max(document.documentElement.scrollWidth, innerWidth)")


@pytest.mark.parametrize(("name", "charts"), [("two", 2), ("three", 3)])
def test_charts_are_drawn_and_nothing_is_asked_for(chromium, pages, name, charts):
    opened = chromium.open(pages / f"{name}.html")
    marks = opened.js(
        "[...document.querySelectorAll('[data-chart]')].map(c => c.querySelectorAll('.mark-symbol path').length)"
    )
    assert len(marks) == charts
    assert min(marks) > 20
    assert opened.said() == []
    assert opened.asked() == []
    assert width(opened) == 1280
    assert len(opened.screenshot()) > 20_000


def test_legend_and_menus_filter(chromium, pages):
    opened = chromium.open(pages / "two.html")
    shown = "document.querySelectorAll('[data-chart=\"2\"] .mark-symbol path').length"
    before = opened.js(shown)
    opened.js("""(() => {
        const menus = [...document.querySelectorAll('[data-chart="2"] .vega-bind')];
        const menu = menus.find(bind => bind.textContent.startsWith('op')).querySelector('select');
        menu.selectedIndex = 1;
        menu.dispatchEvent(new Event('change', {bubbles: true}));
    })()""")
    assert opened.until(f"{shown} < {before}")
    assert opened.js(shown) > 0
    assert opened.said() == []


def test_a_phone_scrolls_down_only(chromium, pages):
    opened = chromium.open(pages / "two.html", width=390, height=844)
    opened.js("document.querySelectorAll('.fold').forEach(fold => { fold.open = true })")
    assert width(opened) == 390
    assert opened.said() == []


def test_dark_paper(chromium, pages):
    opened = chromium.open(pages / "two.html", dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('.chart .mark-line path').getAttribute('stroke')"
    dark_ground, dark_line, picture = opened.js(ground), opened.js(line), opened.screenshot()
    opened.dark(False)
    assert opened.until(f"{line} != '{dark_line}'")
    assert opened.js(ground) != dark_ground
    assert picture != opened.screenshot()
    assert opened.said() == []


def test_hostile_names_are_text(chromium, pages):
    opened = chromium.open(pages / "hostile.html")
    assert opened.js("document.body.innerText").count("<script>alert(") > 3
    assert opened.js("[...document.scripts].filter(s => s.text.startsWith('alert')).length") == 0
    assert opened.js("document.querySelectorAll('img').length") == 0
    assert opened.said() == []
    assert opened.asked() == []
    assert not re.search(r"<script>alert", (pages / "hostile.html").read_text())


def test_a_run_that_timed_nothing(chromium, pages):
    opened = chromium.open(pages / "empty.html")
    assert "Nothing could be timed" in opened.js("document.querySelector('h1').innerText")
    assert opened.said() == []


def test_tables_can_be_heard(chromium, pages):
    """Every table has headers with a scope, every picture a name, and the words stand out from their ground."""
    opened = chromium.open(pages / "two.html")
    assert opened.js("document.querySelectorAll('th:not([scope])').length") == 0
    assert (
        opened.js(
            "[...document.querySelectorAll('[role=img], [role=region]')].filter(e => !e.getAttribute('aria-label')).length"
        )
        == 0
    )
    assert opened.js(
        "[...document.querySelectorAll('h1, h2, h3')].map(h => +h.tagName[1]).every((n, i, all) => !i || n - all[i - 1] <= 1)"
    )
    for dark in (False, True):
        opened.dark(dark)
        assert opened.js(CONTRAST) >= 4.5


CONTRAST = """(() => {
    const linear = (x) => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(x => linear(x / 255));
        return .2126 * r + .7152 * g + .0722 * b + .05;
    };
    const ground = (e) => {
        const colour = getComputedStyle(e).backgroundColor;
        return /^rgb\\(/.test(colour) ? colour : ground(e.parentElement);
    };
    const words = 'h1, .beneath, dt, dd, .lead, .hint, th, td, .badge:not(.recorded), .gain';
    const ratios = [...document.querySelectorAll(words)].map(e => light(getComputedStyle(e).color) / light(ground(e)));
    return Math.min(...ratios.map(r => Math.max(r, 1 / r)));
})()"""


def test_headline_says_the_main_result():
    assert re.search(
        r"kernels reach 9\d% of the measured roof of one NVIDIA H100 80GB HBM3 and run 1\.\d+x",
        view.headline(view.Source(H100)),
    )
    assert re.search(r"On this AMD EPYC 7R13, .* up to \d+x as fast", view.headline(view.Source(LAPTOP)))


def test_verdicts_name_the_bound_and_what_would_help():
    said = {
        (v["op"], v["case"], v["impl"], v["direction"]): v for v in verdict.judged(H100) if v["dtype"] == "bfloat16"
    }
    naive = said["gelu", "16384x16384", "naive", "forward"]["verdict"]
    assert "Bounded by memory" in naive
    assert "11x the bytes" in naive
    assert "fuse it" in said["gelu", "16384x16384", "cuda_packed", "forward"]["verdict"]
    assert said["gelu", "1024x1024", "cuda_packed", "forward"]["bound"] in ("host", "launch")
    assert "matrix units" in said["matmul", "8192", "triton", "forward"]["verdict"]


def test_changes_since_the_last_run():
    now, before = view.Source(fixture_rows.rows(seed=1, slower=1.1)), view.Source(H100)
    found = view.changes(now, before)
    assert found["rows"]
    assert {row["tone"] for row in found["rows"] if row["impl"] in ("triton", "cuda_packed")} == {"slower"}
    assert view.changes(before, before)["rows"] == []


def test_a_share_with_the_cache_s_help_has_a_star():
    source = view.Source(H100)
    row = next(r for r in source.bench if r["status"] == "ok")
    assert view.line(row | {"cached": True, "share": 1.2}, source, [row])["percent"] == "120%*"
    assert view.line(row | {"cached": False}, source, [row])["percent"].endswith("%")


def test_the_verb_shows_recorded_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = fixture_rows.write(tmp_path / "run.jsonl")
    assert report.main(options(report, "--run", run, "--out", tmp_path / "out")) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out/index.html")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["index.html"]


def test_without_a_gpu_recorded_figures_stand_beside(tmp_path, monkeypatch):
    """The measuring is left to the tests of bench, check and inspect; here, what is gathered around it."""
    fixture_rows.write(tmp_path / "results/h100/20261120-021500-abc1234.jsonl")
    fixture_rows.write(
        tmp_path / "results/h200/20261121-021500-abc1234.jsonl", name="NVIDIA H200", seed=1, ops=("softmax",)
    )
    fixture_rows.write(tmp_path / "results/b200/20261121-021500-abc1234.jsonl", name="NVIDIA B200", ops=("none",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command.store, "recorded", lambda: tmp_path / "results")
    monkeypatch.setattr(command.measure, "bench", lambda quick: LAPTOP)
    monkeypatch.setattr(
        command.measure, "interpreted", lambda seconds: ([r for r in LAPTOP if r["type"] == "check"][:3], "")
    )
    monkeypatch.setattr(command.measure, "kernels", lambda ops, until, report: ([], ["left out: nothing"]))
    assert report.main(options(report, "--quick", "--out", tmp_path / "out")) == 0
    text = (tmp_path / "out/index.html").read_text()
    for words in (
        "AMD EPYC 7R13",
        "this machine",
        "one NVIDIA H100 80GB HBM3 and run",
        "recorded 2026-11-20, commit abc1234",
        "one NVIDIA H200 and run",
        "recorded 2026-11-21, commit abc1234",
        "3 passed",
        "left out: nothing",
    ):
        assert words in text
    assert text.index("of one NVIDIA H100") < text.index("of one NVIDIA H200")
    assert [text.count(f"All that was timed on NVIDIA {name}") for name in ("H100 80GB HBM3", "H200")] == [4, 1]
    assert "NVIDIA B200" not in text


def test_kernels_are_compiled_until_the_time_box_ends():
    tables, notes = measure.kernels(["gelu"], 0.0, lambda text: None)
    assert tables[0]["rows"] == []
    assert "16 of 16" in notes[0]
    assert tables[0]["left"] == 16
    tables, notes = measure.kernels(["gelu"], time.monotonic() + 120, lambda text: None)
    found = {(row["impl"], row["arch"]): row for row in tables[0]["rows"]}
    assert notes == []
    assert found["cuda_packed", "sm_90"]["loads"].split(",")[0].endswith("x 16")
    assert found["triton", "gfx942"]["registers"] > 0
    assert {(row["impl"], row["arch"]) for row in tables[0]["not_built"]} == {
        (i, "gfx942") for i in ("cuda_double", "cuda", "cuda_packed")
    }


def test_ladders_are_compiled_first():
    """Each ladder's last rung for Hopper before anything else, and rungs that refuse an op's first case by one that they take."""
    ops = [get(name) for name in ("gelu", "index_add", "softmax")]
    order = [(op.name, rung.name, arch) for op, rung, arch in measure._order(ops)]
    last = ("gelu", "cuda_packed"), ("index_add", "cuda_pass"), ("softmax", "cuda_cluster"), ("gelu", "cuda")
    assert order[:4] == [(*rung, "sm_90") for rung in last]
    cuda = [
        n
        for n, (op, rung, arch) in enumerate(order)
        if get(op).implementations[rung].kind == "cuda" and arch == "sm_90"
    ]
    assert cuda == list(range(len(cuda)))
    assert (
        len(order) == len(set(order)) == 4 * sum(rung.is_kernel for op in ops for rung in op.implementations.values())
    )


@pytest.mark.parametrize("rung", ["index_add cuda_small", "gemv cuda_complex", "dot atomic_half"])
def test_a_rung_that_refuses_an_ops_first_case_is_compiled_by_one_that_it_takes(rung: str) -> None:
    op, impl = rung.split()
    rows, reason = measure._built(get(op), get(op).implementations[impl], "sm_90")
    assert {row["kernel"] for row in rows}
    assert reason == ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RidgelineError, match="cannot write"):
        report.main(options(report, "--run", fixture_rows.write(tmp_path / "run.jsonl"), "--out", tmp_path / "file"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run.jsonl"]


def test_work_next_to_no_arithmetic_is_not_drawn():
    """A few rows added into a large tensor would stretch the axis by decades; the op's other work stays."""
    rows = [
        row | ({"flops": row["bytes"] // 10**5} if row["type"] == "bench" and row["op"] == "gelu" else {})
        for row in H100
    ]
    assert "gelu" in {point["op"] for point in roofline.points(verdict.of(H100, "bench"))}
    assert min(point["x"] for point in roofline.points(verdict.of(rows, "bench"))) > roofline.LEAST
    assert page._source(view.Source(rows))["flat"] == "gelu"


def test_whose_results_were_wrong_is_said():
    rows = [
        row | {"status": "wrong"} if row["type"] == "bench" and row["impl"] in ("torch", "triton") else row
        for row in H100
    ]
    wrong = [row["peer"] for row in rows if row["type"] == "bench" and row["status"] == "wrong"]
    assert f"not timed: {wrong.count(False)} of Ridgeline's, {wrong.count(True)} of peers." in view.beneath(
        view.Source(rows)
    )
    assert "Wrong" not in view.beneath(view.Source([row for row in H100 if row.get("status") != "wrong"]))


def test_whole_numbers_alone_stand_under_float32_s_roof():
    """No matrix product has been timed in int32."""
    rows = [row | ({"dtype": "int32"} if row["type"] == "bench" else {}) for row in H100]
    (flat,) = roofline.ceilings(verdict.one(rows, "roof"), {"int32"})
    assert flat["roof"].startswith("float32: 5")
    assert page._source(view.Source(rows))["chart"]


def test_the_roofline_verb_writes_pictures(tmp_path, capsys):
    run = fixture_rows.write(tmp_path / "run.jsonl")
    assert roofline.main(options(roofline, "gelu", "--run", run, "--out", tmp_path / "out", "--json")) == 0
    names = {p.name: p.stat().st_size for p in Path(tmp_path / "out").iterdir()}
    assert set(names) == {"roofline.svg", "roofline.png", "roofline-dark.svg", "roofline-dark.png"}
    assert min(names.values()) > 5_000
    svg = (tmp_path / "out/roofline.svg").read_text()
    assert "ridge " in svg
    assert "memory: copy" in svg
    with pytest.raises(RidgelineError, match="is not in run"):
        roofline.main(options(roofline, "nothing", "--run", run))
