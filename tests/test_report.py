"""The report: what it says of rows, how it keeps to its time, and the page itself in headless Chromium."""

import argparse
import os
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import browser
import fixture_rows
from ridgeline import device
from ridgeline.lab.analysis import roofline, verdict
from ridgeline.lab.measurement import cases, query, results, store
from ridgeline.lab.measurement.candidates import Candidate
from ridgeline.lab.presentation import report
from ridgeline.lab.presentation.report import budget, command, compiler, interpreter, measure, page, view, worker
from ridgeline.op import RidgelineError, get, registry

H100, LAPTOP = fixture_rows.rows(), fixture_rows.rows(gpu=False)
MOST = 3 << 20  # bytes of the page


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
    kernels = [{"op": fixture_rows.HOSTILE, "left": {"sm_80": 1}, "spills": 0, "rows": [], "not_built": [row]}]
    left = [measure.Left(1, 2, fixture_rows.HOSTILE, "ridgeline bench")]
    other = view.Source(fixture_rows.rows(name="NVIDIA H200", seed=1, ops=("softmax",)), recorded=True)
    empty = view.Source([r for r in LAPTOP if r["type"] in ("run", "roof")])
    made = {
        "two": page.render([laptop, recorded], changes=changes, checks=[view.checked("here", laptop.checks)]),
        "three": page.render([laptop, recorded, other]),
        "hostile": page.render(
            [hostile], kernels=kernels, checks=[view.checked("here", hostile.checks)], left=left, minutes=5.5
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
    assert opened.drawn()
    opened.unfold()
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
    assert opened.drawn()
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
    opened.unfold()
    assert opened.drawn()
    assert width(opened) == 390
    assert opened.said() == []


def test_dark_paper(chromium, pages):
    opened = chromium.open(pages / "two.html", dark=True)
    assert opened.drawn()
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
    opened.unfold()
    assert opened.js("document.body.innerText").count("<script>alert(") > 3
    assert opened.js("[...document.scripts].filter(s => s.text.startsWith('alert')).length") == 0
    assert opened.js("document.querySelectorAll('img').length") == 0
    assert opened.said() == []
    assert opened.asked() == []
    assert not re.search(r"<script>alert", (pages / "hostile.html").read_text())


def test_a_run_that_timed_nothing(chromium, pages):
    opened = chromium.open(pages / "empty.html")
    assert "nothing was timed" in opened.js("document.querySelector('h1').innerText")
    assert opened.said() == []


def test_tables_can_be_heard(chromium, pages):
    """Every table has headers with a scope, every picture a name, and the words stand out from their ground."""
    opened = chromium.open(pages / "two.html")
    opened.unfold()
    assert opened.js("document.querySelectorAll('th:not([scope])').length") == 0
    named = "document.querySelectorAll(':is([role=img], [role=region]):not([aria-label])').length"
    assert opened.js(named) == 0
    levels = opened.js("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert all(after - before <= 1 for before, after in pairwise(levels))
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
    const words = 'h1, .beneath, dt, dd, .lead, .hint, .what, .share, th, td, .badge:not(.recorded), .gain';
    const ratios = [...document.querySelectorAll(words)].map(e => light(getComputedStyle(e).color) / light(ground(e)));
    return Math.min(...ratios.map(r => Math.max(r, 1 / r)));
})()"""


def test_headline_says_the_main_result():
    gpu, laptop = view.Source(H100), view.Source(LAPTOP)
    fast = r"NVIDIA H100 80GB HBM3: .* run at 9\d% of the hardware's limit, 1\.\d+x as fast as the best alternative\."
    assert re.fullmatch(fast, view.headline(gpu, []))
    right = view.checked("here", laptop.checks)
    wrong = view.checked("here", [row | {"ok": n > 1} for n, row in enumerate(laptop.checks)])
    assert (
        view.headline(laptop, [right]) == f"AMD EPYC 7R13, no GPU: all {right['passed']} checked results are correct."
    )
    assert view.headline(laptop, [right, wrong]).startswith("AMD EPYC 7R13, no GPU: 2 of ")
    assert view.headline(laptop, []) == "AMD EPYC 7R13, no GPU: 4 operations timed."
    assert "Ridgeline's kernels need a GPU" in view.beneath(laptop)


def test_whole_training_steps_are_shown_where_there_are_some():
    steps = view.Source(fixture_rows.steps(0, ("eager", 0.4), ("ridgeline", 0.25)), recorded=True)
    text = page.render([view.Source(LAPTOP), steps])
    rows = re.findall(r'<th scope="row">(ridgeline|eager)</th><td data-label="step">(.*?)</td>', text)
    assert rows == [("ridgeline", "250 ms ±10%"), ("eager", "400 ms ±10%")]
    assert "Llama 3.2 1B, 4 x 4096 tokens" in text
    assert 'id="steps"' not in page.render([view.Source(LAPTOP)])


def test_the_first_screen_says_what_is_wrong_and_what_was_left_out():
    source = view.Source(LAPTOP)
    wrong = [row | {"ok": n > 1, "reason": "off"} for n, row in enumerate(source.checks)]
    left = [measure.Left(38, 130, "benchmark cases", "ridgeline bench")]
    told = {s.label: s for s in view.states(source, [view.checked("here", wrong)], [], None, left, 5.5)}
    assert told["Machine"].text.startswith("AMD EPYC 7R13, 2 cores, 8.00 GiB of memory, no GPU")
    assert (told["Correct"].text, told["Correct"].tone) == (f"2 of {len(wrong)} results outside tolerance", "bad")
    assert told["Left out"].text == "to keep to 5.5 minutes: 38 benchmark cases"
    told = {s.label: s for s in view.states(source, [view.checked("here", source.checks)], [], None, [], None)}
    assert told["Correct"].tone == "good"
    assert "Left out" not in told


def test_the_first_screen_is_plain_html(pages, chromium):
    """What is run stands behind what is read, so the browser paints before it runs or unpacks anything."""
    text = (pages / "two.html").read_text()
    scripts = re.findall(r"<script([^>]*)>", text)
    assert [given for given in scripts if "application/gzip" not in given] == [""]
    assert text.index("<script>") > text.index("</main>")
    for words in ("checked results are correct", "no GPU", "GB/s", "NVIDIA H100 80GB HBM3: Ridgeline", "</nav>"):
        assert words in text[: text.index("<script")]
    opened = chromium.open(pages / "two.html")
    assert opened.js("document.querySelectorAll('.ladder, .chart svg, table.rungs').length") == 0
    assert opened.until("performance.getEntriesByType('paint').length")


def test_the_page_of_all_that_is_recorded_is_small():
    """Every recorded GPU beside a laptop, with a kernel of every implementation for every architecture."""
    recorded = [view.Source(rows, recorded=True) for rows in results.gpus(store.recorded()).values()]
    assert recorded
    facts = {
        "direction": "backward",
        "spilled": False,
        "spills": "none",
        "shared": "48.5 KiB",
        "occupancy": "50% (shared)",
    }
    pieces = compiler.pieces(registry())
    made = [
        (op.name, rung.name, arch, [facts | {"kernel": f"{op.name}_{rung.name}_{n}", "registers": n,
         "loads": f"{n} x 16", "stores": f"{n} x 8", "matrix": f"{n} x wgmma", "case": op.cases[0].name}], "")
        for n, (op, rung, arch) in enumerate(pieces)
    ]  # fmt: skip
    text = page.render([view.Source(LAPTOP), *recorded], kernels=measure.tables(pieces, made))
    assert len(text.encode()) < MOST
    assert len(re.sub(r'<script type="application/gzip".*?</script>', "", text, flags=re.S)) < 300_000


def test_a_fold_holds_every_figure(pages, chromium):
    opened = chromium.open(pages / "two.html")
    opened.js("document.querySelector('#op-gelu').open = true")
    assert opened.until("document.querySelector('#op-gelu .ladder')")
    opened.js("document.querySelectorAll('#op-gelu .fold').forEach(fold => { fold.open = true })")
    timed = [
        row for row in [*LAPTOP, *H100] if row["type"] == "bench" and row["op"] == "gelu" and row["status"] == "ok"
    ]
    assert opened.until(f"document.querySelectorAll('#op-gelu table.rungs tbody th').length == {len(timed)}")
    assert opened.js("document.querySelector('#op-gelu td.share .figure').innerText").rstrip("*").endswith("%")
    assert "[object" not in opened.js("document.querySelector('#op-gelu').innerText")


def test_an_address_opens_its_operation(pages, chromium):
    opened = chromium.open(pages / "two.html")
    opened.js("location.hash = 'op-softmax'")
    assert opened.until("document.querySelector('#op-softmax[open] .ladder')")


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


class Clock:
    """A clock that stands still, or moves by a step each time it is read."""

    def __init__(self, now=0.0, step=0.0):
        self.now, self.step = now, step

    def __call__(self):
        self.now += self.step
        return self.now


def test_without_a_gpu_recorded_figures_stand_beside(tmp_path, monkeypatch):
    """Measuring is tested with bench, check and inspect; here, what is gathered around it, and what was left out."""
    fixture_rows.write(tmp_path / "results/h100.jsonl")
    fixture_rows.write(tmp_path / "results/h200.jsonl", name="NVIDIA H200", seed=1, ops=("softmax",))
    fixture_rows.write(tmp_path / "results/b200.jsonl", name="NVIDIA B200", ops=("none",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command.store, "recorded", lambda: tmp_path / "results")
    late = [
        measure.Left(38, 130, "benchmark cases", "ridgeline bench"),
        measure.Left(1034, 1300, "checks in Triton's interpreter", "TRITON_INTERPRET=1 ridgeline check"),
    ]
    proofs = measure.Proofs([r for r in LAPTOP if r["type"] == "check"][:3], [], late[1:])
    ends = []
    monkeypatch.setattr(command.measure, "bench", lambda quick, until, clock: ends.append(until) or (LAPTOP, late[:1]))
    monkeypatch.setattr(
        command.measure,
        "proofs",
        lambda ops, interpret, until, clock: ends.append(until) or (proofs if interpret else 0),
    )
    before = time.monotonic()
    assert report.main(options(report, "--quick", "--minutes", 2, "--out", tmp_path / "out")) == 0
    assert before < ends[0] < ends[1] < before + 121
    text = (tmp_path / "out/index.html").read_text()
    for words in (
        "AMD EPYC 7R13",
        "this machine",
        "NVIDIA H100 80GB HBM3: Ridgeline",
        "recorded 2026-11-20, commit abc1234",
        "recorded 2026-11-21, commit abc1234",
        "All 3 results are within tolerance",
        "to keep to 2 minutes: 38 benchmark cases, 1,034 checks",
        "<b>38 of 130</b> benchmark cases: <code>ridgeline bench</code>",
        "<b>1,034 of 1,300</b>",
        "<code>TRITON_INTERPRET=1 ridgeline check</code>",
    ):
        assert words in text
    assert text.index("NVIDIA H100") < text.index("NVIDIA H200")
    assert "NVIDIA B200" not in text


def test_stages_share_one_budget():
    """Whatever the stages before took, each gets its share of what is left; none ends after the total."""
    clock = Clock(now=1000.0)
    total = budget.Budget(5, clock)
    assert total.until("times") == pytest.approx(1000 + 300 * budget.STAGES["times"])
    clock.now = 1050.0  # timing was over early: the rest gains
    proofs = total.until("proofs")
    assert 1050 + 300 * budget.STAGES["proofs"] < proofs < 1300
    clock.now = proofs
    assert total.until("page") == pytest.approx(1300)
    clock.now = 1400.0  # too late: what is yet to come ends at once
    assert total.until("proofs") == 1400
    assert sum(budget.STAGES.values()) == pytest.approx(1)


def paced(until=100.0, gpu=False, clock=None):
    told = []
    pace = budget.Pace(until, gpu, lambda *message: told.append(message), clock or Clock())
    return pace, told


def test_every_op_is_timed_once_before_any_twice_and_slow_cases_last():
    tasks = cases.chosen_work([get(op) for op in ("gelu", "hgemm", "softmax")], ("quick",), None, None)
    slow = [
        row | {"matmul": {"float32": row["copy"], "float16": row["copy"]}} for row in LAPTOP if row["type"] == "roof"
    ]
    pace, told = paced()
    order = pace.order(tasks, SimpleNamespace(path="run.jsonl", rows=slow))
    assert sorted(order, key=str) == sorted(tasks, key=str)
    assert {op.name for op, _, _ in order[:3]} == {"gelu", "hgemm", "softmax"}
    assert (order[-1][0].name, order[-1][1].name) == ("hgemm", "1024")
    assert told == [("run", "run.jsonl", len(tasks))]


def test_torch_compile_is_timed_only_while_all_other_cases_fit():
    def statuses(pace, left):
        rungs = get("gelu").implementations.values()
        return {c.rung.kind: (c.status, c.reason) for c in pace.fit([Candidate(r) for r in rungs], left)}

    clock = Clock()
    pace, _ = paced(until=200.0, clock=clock)
    assert statuses(pace, 10)["compile"] == ("ok", None)
    clock.now = 30.0  # it took 30 seconds: so may the next one
    assert statuses(pace, 9)["compile"][0] == "ok"
    clock.now = 160.0
    late = statuses(pace, 8)
    assert late["compile"] == ("skipped", budget.LATE)
    assert late["eager"] == late["triton"] == ("ok", None)
    assert statuses(paced(until=0.0, gpu=True)[0], 100)["compile"][0] == "ok"


def test_a_stage_ends_when_its_time_is_over():
    """Its process is ended in the middle of its work; what it has sent is kept."""
    begun = time.monotonic()
    working = worker.Worker("sleeping", sends_and_sleeps, 600)
    worker.collect([working], 0.0, clock=Clock(step=1.0), first=True)
    assert (working.found, working.ended) == ([("first",)], False)
    assert not working.process.is_alive()
    assert time.monotonic() - begun < 60
    worker.collect([done := worker.Worker("sleeping", sends_and_sleeps, 0)], time.monotonic() + 60)
    assert (done.found, done.ended) == ([("first",), ("second", os.environ.get("HOME"))], True)


def sends_and_sleeps(send, seconds):
    send("first")
    time.sleep(seconds)
    send("second", os.environ.get("HOME"))


def refuses(send, error):
    if error:
        raise RidgelineError(error)
    sys.exit(3)


@pytest.mark.parametrize(("error", "said"), [("no disk", "no disk"), ("", "refusing broke off with exit code 3")])
def test_a_stage_that_breaks_off_is_an_error(error, said):
    with pytest.raises(RidgelineError, match=said):
        worker.collect([worker.Worker("refusing", refuses, error)], time.monotonic() + 60)


def test_the_roof_is_measured_whatever_the_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows, left = measure.bench(True, 0.0, time.monotonic)
    assert [row["type"] for row in rows[:2]] == ["run", "roof"]
    cases = sum(len(case.dtypes) for op in registry().values() for case in op.cases if case.use == "quick")
    assert left[0].of == cases
    assert left[0].count >= cases - 3
    assert (left[0].what, left[0].command) == ("benchmark cases", "ridgeline bench")


def test_kernels_are_compiled_and_checked_until_the_time_is_over():
    pieces = len(compiler.pieces(["gelu"]))
    checks = sum(len(kernels) for *_, kernels in interpreter.groups(["gelu"]))
    late = measure.proofs(["gelu"], True, 0.0, time.monotonic, processes=2)
    assert [(item.count, item.of) for item in late.left] == [(checks, checks), (pieces, pieces)]
    assert [item.command.split()[-4:] for item in late.left] == [
        ["TRITON_INTERPRET=1", "ridgeline", "check"], ["inspect", "OP", "--arch", "ARCH"]
    ]  # fmt: skip
    assert sum(late.tables[0]["left"].values()) == pieces
    proofs = measure.proofs(["gelu"], True, time.monotonic() + 120, time.monotonic, processes=2)
    assert all(row["ok"] for row in proofs.checks)
    assert proofs.checks
    (table,) = proofs.tables
    found = {(row["impl"], row["arch"]): row for row in table["rows"]}
    assert table["left"] == {}
    assert found["cuda_packed", "sm_90"]["loads"].split(",")[0].endswith("x 16")
    assert found["triton", "gfx942"]["registers"] > 0
    refused = {(row["impl"], row["arch"]) for row in table["not_built"]}
    assert refused == {(i, "gfx942") for i in ("cuda_double", "cuda", "cuda_packed")}
    summary = {gpu["arch"]: gpu for gpu in view.overview(proofs.tables)}
    assert list(summary) == list(device.ARCHES)
    assert (summary["gfx942"]["unsupported"], summary["sm_90"]["unsupported"]) == (3, 0)


def test_ladders_are_compiled_first():
    """Each ladder's last rung for Hopper before anything else, CUDA C++ before the slower compilers."""
    ops = [get(name) for name in ("gelu", "index_add", "softmax")]
    order = [(op.name, rung.name, arch) for op, rung, arch in compiler.pieces(op.name for op in ops)]
    last = ("gelu", "cuda_packed"), ("index_add", "cuda_pass"), ("softmax", "cuda_cluster"), ("gelu", "cuda")
    assert order[:4] == [(*rung, "sm_90") for rung in last]
    cuda = [
        n
        for n, (op, rung, arch) in enumerate(order)
        if get(op).implementations[rung].kind == "cuda" and arch == "sm_90"
    ]
    assert cuda == list(range(len(cuda)))
    kernels = sum(rung.is_kernel for op in ops for rung in op.implementations.values())
    assert len(order) == len(set(order)) == len(device.ARCHES) * kernels


@pytest.mark.parametrize("rung", ["index_add cuda_small", "gemv cuda_complex", "dot atomic_half"])
def test_a_rung_that_refuses_an_ops_first_case_is_compiled_by_one_that_it_takes(rung: str) -> None:
    op, impl = rung.split()
    rows, reason = compiler.built(get(op), get(op).implementations[impl], "sm_90")
    assert {row["kernel"] for row in rows}
    assert reason == ""


@pytest.mark.parametrize("minutes", [0, -1, "nan", 5000])
def test_a_time_that_is_none_is_refused(minutes, tmp_path):
    with pytest.raises(RidgelineError, match="--minutes must be above 0 and under a day"):
        report.main(options(report, "--minutes", minutes, "--out", tmp_path))


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
    assert "gelu" in {point["op"] for point in roofline.points(query.of(H100, "bench"))}
    assert min(point["x"] for point in roofline.points(query.of(rows, "bench"))) > roofline.LEAST
    assert page._source(view.Source(rows), False, [])["flat"] == "gelu"


def test_whose_results_were_wrong_is_said():
    rows = [
        row | {"status": "wrong"} if row["type"] == "bench" and row["impl"] in ("torch", "triton") else row
        for row in H100
    ]
    wrong = [row["peer"] for row in rows if row["type"] == "bench" and row["status"] == "wrong"]

    def told(rows):
        return {s.label: s for s in view.states(view.Source(rows), [], [], None, [], None)}

    said = told(rows)["Not timed"]
    assert said.text.startswith(f"{wrong.count(False)} of Ridgeline's, {wrong.count(True)} of alternatives")
    assert said.tone == "bad"
    assert "Not timed" not in told([row for row in H100 if row.get("status") != "wrong"])


def test_whole_numbers_alone_stand_under_float32_s_roof():
    """No matrix product has been timed in int32."""
    rows = [row | ({"dtype": "int32"} if row["type"] == "bench" else {}) for row in H100]
    (flat,) = roofline.ceilings(query.one(rows, "roof"), {"int32"})
    assert flat["roof"].startswith("float32: 5")
    assert page._source(view.Source(rows), False, [])["chart"]


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
