"""The store under two writers, a kill, and wrong files."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import fixture_rows
from ridgeline.lab.analysis import ladder
from ridgeline.lab.measurement import columns, query, store
from ridgeline.op import RidgelineError

MACHINE = dict.fromkeys(store.MACHINE) | {"cpu": "a cpu"}
BENCH = next(row for row in fixture_rows.rows() if row["type"] == "bench") | {"op": "gelu"}
del BENCH["run"]
WRITER = """
import sys
from pathlib import Path
from ridgeline.lab.measurement.store import append
for i in range(int(sys.argv[3])):
    append(Path(sys.argv[1]), [{"schema": 3, "type": "note", "run": sys.argv[2], "i": i, "text": "x" * (i % 977)}])
    if i == 0:
        print("started", flush=True)
"""


@pytest.fixture(autouse=True)
def house(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HOUSE", tmp_path / "house")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store.commit.cache_clear()
    yield
    store.commit.cache_clear()


def writer(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)], stdout=subprocess.PIPE, text=True
    )


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "two.jsonl"
    writers = [writer(path, name, 300) for name in "ab"]
    assert [w.wait(60) for w in writers] == [0, 0]
    rows = store.load(path)
    for name in "ab":
        assert [row["i"] for row in rows if row["run"] == name] == list(range(300))


def test_a_kill_in_the_middle_tears_nothing(tmp_path):
    path = tmp_path / "killed.jsonl"
    victim = writer(path, "victim", 10**7)
    assert victim.stdout.readline() == "started\n"
    time.sleep(0.05)
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    before = store.load(path)
    assert [row["i"] for row in before] == list(range(len(before)))
    store.append(path, [{"schema": 3, "type": "note", "run": "next"}])
    assert store.load(path) == [*before, {"schema": 3, "type": "note", "run": "next"}]


@pytest.mark.parametrize("torn", ['{"schema": 2, "ty', "x" * 5000])
def test_a_torn_line_is_left_out_and_then_healed(tmp_path, torn):
    path = tmp_path / "torn.jsonl"
    row = {"schema": 3, "type": "note", "run": "a"}
    store.append(path, [row])
    with path.open("a") as file:
        file.write(torn)
    assert store.load(path) == [row]
    store.append(path, [row])
    assert store.load(path) == [row, row]
    assert path.read_text().count("\n") == 2


def test_a_run_is_written_as_it_goes(tmp_path):
    run = store.Run(MACHINE, command="ridgeline bench")
    run.write(BENCH | {"op": "softmax"}, BENCH)
    rows = store.load(run.path)
    assert rows == [store.OPTIONAL.get(row["type"], {}) | row for row in run.rows]
    assert [row["type"] for row in rows] == ["run", "bench", "bench"]
    assert {row["run"] for row in rows} == {run.name} == {run.path.stem}
    assert rows[0]["machine"] == MACHINE
    assert run.path.parent == tmp_path / "cache" / "ridgeline" / "cpu"


def test_runs_of_one_second_do_not_meet():
    runs = [store.Run(MACHINE) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(len(store.load(run.path)) == 1 for run in runs)


def test_a_named_commit_makes_a_run_dirty(tmp_path):
    run = store.Run(MACHINE | {"gpu": "NVIDIA H100 80GB HBM3"}, at="0123456789abcdef")
    assert run.path.parent == tmp_path / "cache" / "ridgeline" / "h100"
    assert run.name.endswith("-0123456")
    assert (run.rows[0]["commit"], run.rows[0]["dirty"]) == ("0123456", True)
    with pytest.raises(RidgelineError, match="--commit takes 7 to 40 hexadecimal digits of a commit, and is 'HEAD'"):
        store.Run(MACHINE, at="HEAD")


def test_recording_does_not_make_the_next_run_dirty(tmp_path):
    house = store.HOUSE
    for name in ("pyproject.toml", "results/h100.jsonl"):
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text("before")

    def git(*arguments):
        user = "-c", "user.name=a", "-c", "user.email=a@b"
        subprocess.run(["git", "-C", str(house), *user, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    for name, dirty in (("results/h100.jsonl", False), ("pyproject.toml", True)):
        (house / name).write_text("after")
        store.commit.cache_clear()
        assert store.commit()[1] is dirty


def test_a_bad_file_does_not_hide_the_runs_before_it(capsys):
    good, bad = store.Run(MACHINE), store.Run(MACHINE)
    good.write(BENCH)
    bad.path.write_text("hello\n")
    assert store.latest("cpu") == good.path
    assert f"skipped: {bad.path} is not a results file" in capsys.readouterr().err
    for _ in range(2):
        store.Run(MACHINE).path.write_text('{"schema": 1, "type": "run", "run": "a"}\n')
    assert store.latest("cpu") == good.path
    said = capsys.readouterr().err
    assert "was written by an older Ridgeline (schema 1); this one reads schemas 2 and 3 (and 2 more)" in said
    assert said.count("\n") == 1


def test_finding_runs():
    first, second, third = (store.Run(MACHINE) for _ in range(3))
    first.write(BENCH)
    second.write(BENCH | {"op": "mul"})
    assert store.runs("cpu") == [first.path, second.path, third.path]
    assert store.runs("h100") == []
    assert store.latest("cpu") == second.path
    assert store.latest("cpu", "gelu") == first.path
    assert store.latest("cpu", before=second.name) == first.path
    assert store.latest("cpu", "softmax") is None
    assert store.find("latest") == third.path
    assert store.find(second.name) == second.path
    assert store.find(str(second.path)) == second.path
    with pytest.raises(RidgelineError, match="no run, recorded GPU or file"):
        store.find("19990101")
    with pytest.raises(RidgelineError, match="several runs"):
        store.find("2")


def test_a_recorded_gpu_is_found_by_its_name(tmp_path):
    h100 = fixture_rows.write(tmp_path / "results/h100.jsonl")
    assert store.find("h100") == store.find("latest") == h100
    run = store.Run(MACHINE)
    assert store.find("latest") == run.path
    with pytest.raises(RidgelineError, match=f"starts with 'h200'; the newest runs: {run.name}; recorded GPUs: h100"):
        store.find("h200")


def test_a_ladder_is_of_this_gpu_else_of_what_is_recorded(tmp_path):
    fixture_rows.write(tmp_path / "results/h100.jsonl")
    fixture_rows.write(tmp_path / "results/h200.jsonl", name="NVIDIA H200", seed=1, ops=("softmax",))

    def timed(op, here, gpu=None):
        return store.slug(query.one(ladder.newest(op, here, gpu), "run")["machine"]["gpu"])

    assert [timed("softmax", here) for here in ("h100", "h200", "cpu", "b200")] == ["h100", "h200", "h100", "h100"]
    assert [timed("softmax", "h100", "h200"), timed("mul", "h200")] == ["h200", "h100"]
    with pytest.raises(RidgelineError, match="no run recorded on h200 has timed mul"):
        ladder.newest("mul", "cpu", "h200")
    with pytest.raises(RidgelineError, match="'b200' is not a recorded GPU; the recorded ones: h100, h200"):
        ladder.newest("softmax", "cpu", "b200")


def test_a_gain_is_between_two_times_of_one_run():
    rows = [
        BENCH | {"impl": impl, "run": run, "type": kind}
        for impl, run, kind in (("cuda_packed", "2", "bench"), ("torch", "2", "bench"), ("cuda", "1", "older"))
    ]
    (steps,) = ladder.ladder(rows, "gelu").values()
    assert [(step["impl"], step["gain"]) for step in steps] == [("torch", None), ("cuda", None), ("cuda_packed", None)]
    (steps,) = ladder.ladder([row for row in rows if row["run"] == "2"], "gelu").values()
    assert [(step["impl"], step["gain"]) for step in steps] == [("torch", None), ("cuda_packed", 1.0)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no rows"),
        (b"hello\n", "line 1"),
        (b"[1]\n", "line 1"),
        (b"\xff\xfe\n", "line 1"),
        (b'{"schema": 2, "type": "note", "run": "a"}\n{"sche\n{"schema": 2, "type": "note", "run": "a"}\n', "line 2"),
        (b'{"schema": 4, "type": "run", "run": "a"}\n', "newer Ridgeline"),
        (b'{"schema": 4, "type": "bench", "run": "a", "rows": {"of": [1]}}\n', "newer Ridgeline"),
        (b'{"schema": 1, "type": "run", "run": "a"}\n', "older Ridgeline"),
        (b'{"schema": 2, "type": "bench", "run": "a", "rows": 3}\n', "line 1"),
        (b'{"schema": 2, "type": "bench", "run": "a", "rows": [3]}\n', "line 1"),
        (b'{"schema": 2, "type": "bench", "run": "a", "rows": [{}]}\n', "line 1, a bench row, has no valid 'op'"),
        (b'{"schema": 2, "type": 3, "run": "a"}\n', "line 1"),
        (b'{"schema": 3, "type": "bench", "run": "a", "rows": {}}\n', "line 1 is not a row"),
        (b'{"schema": 3, "type": "bench", "run": "a", "rows": {"impl": 3}}\n', "line 1 is not a row"),
        (
            b'{"schema": 3, "type": "bench", "run": "a", "rows": {"impl": ["b"], "law": [1, 2]}}\n',
            "line 1 is not a row",
        ),
        (b'{"schema": 3, "type": "bench", "run": "a", "rows": {"impl": ["b"]}}\n', "a bench row, has no valid 'op'"),
    ],
)
def test_files_that_are_not_runs_are_one_sentence(tmp_path, content, says):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    with pytest.raises(RidgelineError, match=says):
        store.load(path)


TIMES = {"median": 2.0, "low": 1.0, "high": 3.0}
DONE = {"impl": "a", "kind": "a", "peer": True, "status": "ok", "seconds": TIMES, "throttled": False, "held_bytes": 0}
FAILED = {"impl": "b", "kind": "b", "peer": False, "status": "unsupported", "reason": "no"}
GROUPS = [
    [DONE],
    [FAILED],
    [DONE, FAILED | {"peer": True}, DONE | {"peer": False, "throttled": True}],
    [DONE, DONE | {"impl": "c", "reason": "a note", "seconds": {"median": 1, "low": 1, "high": 1}}],
    [FAILED | {"law": 0.5}, DONE, FAILED | {"reason": "no, too"}],
    [FAILED | {"seconds": TIMES, "throttled": False}, DONE],
    [{k: v for k, v in DONE.items() if k not in ("throttled", "seconds")}, DONE | {"held_bytes": 0.0}],
    [DONE | {"samples": [1, 2], "law": 0}, DONE | {"samples": [1, 2], "law": False}],
    [DONE | {"seconds": {"median": 1.0}}, DONE | {"tags": {}}],
    [{k: v for k, v in DONE.items() if k != "throttled"}],
]


@pytest.mark.parametrize("rows", GROUPS)
def test_columns_hold_rows_and_their_types(rows):
    packed = columns.pack(rows)
    read = columns.unpack(json.loads(json.dumps(packed)))
    assert [json.dumps(row, sort_keys=True) for row in read] == [json.dumps(row, sort_keys=True) for row in rows]
    assert json.dumps(columns.pack(read)) == json.dumps(packed)


def test_columns_leave_out_what_is_usual_and_say_once_what_is_alike():
    packed = columns.pack([DONE, FAILED, DONE | {"impl": "c"}])
    assert packed == {
        "impl": ["a", "b", "c"], "kind": ["a", "b", "a"], "peer": [True, False, True],
        "status": ["ok", "unsupported", "ok"], "seconds": TIMES, "held_bytes": 0, "reason": "no",
    }  # fmt: skip
    assert columns.pack([DONE | {"peer": False}]).keys() == {"impl", "kind", "seconds", "held_bytes"}


def test_an_older_recorded_file_reads_the_same(tmp_path):
    """Rows one by one under `rows`, and a machine for each run, as files of schema 2 have them."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    first = fixture_rows.rows()
    again = [row | {"run": "later"} for row in first[:2]]
    rows = [store.OPTIONAL.get(row["type"], {}) | row for row in (*first, *again)]
    with old.open("w") as file:
        for row in rows:
            inner = {k: v for k, v in row.items() if k not in store.WORK}
            outer = {k: v for k, v in row.items() if k in store.WORK} | {"schema": 2}
            file.write(json.dumps(outer | {"rows": [inner]} if row["type"] == "bench" else outer | inner) + "\n")
    store.replace(new, rows)
    assert store.load(old) == store.load(new) == rows
    assert [json.loads(line)["machine"] for line in new.read_text().splitlines() if '"machine"' in line][1:] == [
        rows[0]["run"]
    ]
    new.write_text(new.read_text().replace(f'"machine":"{rows[0]["run"]}"', '"machine":"none"'))
    with pytest.raises(RidgelineError, match="a run row, has no valid 'machine'"):
        store.load(new)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(RidgelineError, match="No such file"):
        store.load(tmp_path / "none.jsonl")


def test_an_unwritable_folder_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RidgelineError, match="cannot write results to"):
        store.Run(MACHINE)
    if os.getuid():
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
        with pytest.raises(RidgelineError, match="cannot write results to"):
            store.append(folder / "run.jsonl", [{"schema": 2}])
        assert not list(folder.iterdir())


def test_what_is_not_a_number_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        store.append(tmp_path / "run.jsonl", [{"schema": 2, "x": float("nan")}])
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        (None, "cpu"),
    ],
)
def test_slugs(gpu, slug):
    assert store.slug(gpu) == slug


def test_rows_are_json(tmp_path):
    store.append(tmp_path / "run.jsonl", [{"schema": 2, "type": "run", "run": "a", "name": "µ\n\u2028"}])
    assert json.loads((tmp_path / "run.jsonl").read_text())["name"] == "µ\n\u2028"


LM = dict.fromkeys(("case", "dtype", "direction", "impl"), "") | {
    "schema": store.SCHEMA, "type": "lm", "run": "a", "part": "bench", "status": "ok"
}  # fmt: skip
FIGURE = {"schema": store.SCHEMA, "type": "figure", "run": "a", "subject": "streams", "what": "a copy", "status": "ok"}


def test_a_row_that_lacks_what_readers_rely_on_is_one_sentence(tmp_path):
    """Each field taken out, and each made something else, of each type of row."""
    path, rows = tmp_path / "run.jsonl", [*fixture_rows.rows(), *fixture_rows.steps(0, ("eager", 0.4)), LM, FIGURE]
    for kind, fields in store.FIELDS.items():
        row = next(row for row in rows if row["type"] == ("bench" if kind == "older" else kind)) | {"type": kind}
        for name in fields:
            for broken in ({k: v for k, v in row.items() if k != name}, row | {name: None}, row | {name: [1]}):
                path.write_text(json.dumps(broken) + "\n")
                with pytest.raises(RidgelineError, match=f"line 1, a {kind} row, has no valid '{name}'"):
                    store.load(path)
    for broken, name in (
        (BENCH | {"run": "a", "seconds": {"median": 0, "low": 0, "high": 0}}, "seconds"),
        (FIGURE | {"seconds": {"median": 1.0}}, "seconds"),
        (rows[1] | {"copy": {"median": 1.0}}, "copy"),
        (rows[0] | {"machine": {"gpu": None}}, "arch"),
    ):
        path.write_text(json.dumps(broken) + "\n")
        with pytest.raises(RidgelineError, match=f"has no valid '{name}'"):
            store.load(path)
