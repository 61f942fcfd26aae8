"""The recorded file of a GPU: what a merge replaces, keeps and prints, under two writers, a kill and wrong rows."""

import argparse
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

import fixture_rows
from ridgeline.lab.measurement import bench, compare, merging, query, results, store
from ridgeline.op import RidgelineError, get

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def house(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HOUSE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "h100.jsonl"


def run(number: int, *ops: str, slower: float = 1.0) -> list[dict]:
    """The rows of a run as they are read, of benchmark cases that there are; the run is later the higher its number."""
    rows = fixture_rows.rows(seed=number, ops=ops, slower=slower)
    cases = {op: [case.name for case in get(op).cases if case.use == "bench"] for op in fixture_rows.RUNGS}
    rows = [row for row in rows if "case" not in row or row["case"] in cases[row["op"]]]
    return [store.OPTIONAL.get(row["type"], {}) | row for row in rows]


def recorded(path: Path, *kinds: str) -> dict:
    """The recorded rows of those types (default: those with times) by what they are the newest of."""
    return {results.place(row): row for row in store.load(path) if row["type"] in (kinds or ("bench", "older"))}


def test_a_merge_replaces_what_the_new_run_timed_and_nothing_else(path):
    first, second = run(0), run(1, "softmax")
    made = results.merge(first)
    assert made.path == path
    bench_rows = [row for row in first if row["type"] == "bench"]
    assert len(made.added) == len(bench_rows)
    assert [made.before, made.older, made.lost, made.left_out] == [[]] * 4
    was = recorded(path)
    made, now = results.merge(second), recorded(path)
    assert now.keys() == was.keys()
    for place, row in now.items():
        assert row["run"] == (second if row["op"] == "softmax" else first)[0]["run"]
        assert row["type"] == "bench"
        assert row["op"] == "softmax" or row == was[place]
    softmax = [row for row in bench_rows if row["op"] == "softmax"]
    assert [results.place(row) for row in made.before] == [results.place(row) for row in made.after]
    assert {results.place(row) for row in made.after} == {results.place(row) for row in softmax}
    assert {row["run"] for row in made.before} == {first[0]["run"]}
    assert [made.added, made.older, made.lost, made.left_out] == [[]] * 4


def test_an_older_run_replaces_nothing(path):
    results.merge(run(1))
    before = path.read_bytes()
    made = results.merge(run(0, "softmax"))
    assert path.read_bytes() == before
    assert [made.before, made.added] == [[], []]
    assert len(made.left_out) == len([row for row in run(0, "softmax") if row["type"] == "bench"])


def test_the_same_run_again_changes_nothing(path):
    results.merge(run(0))
    before = path.read_bytes()
    made = results.merge(run(0))
    assert path.read_bytes() == before
    assert [made.before, made.added, made.older, made.lost, made.left_out] == [[]] * 5
    results.merge([row | {"law": 0.25} if row["type"] == "bench" else row for row in run(0)])
    assert {row["law"] for row in recorded(path).values()} == {0.25}


def test_implementations_that_the_newest_run_left_out_are_for_ladders_alone(path):
    """But for those of other packages, which no ladder shows, and those that could not run."""
    first, second = run(0, "softmax"), run(1, "softmax")
    naive = next(row for row in first if row["type"] == "bench" and row["impl"] == "naive")
    first += [naive | {"impl": "another package's", "peer": True}]
    first = [row | {"status": "oom", "reason": "full"} if row.get("impl") == "triton_row" else row for row in first]
    results.merge(first)
    made = results.merge([row for row in second if row.get("impl") in (None, "cuda_cluster")])
    kinds = {row["impl"]: row["type"] for row in recorded(path).values()}
    assert kinds == {
        "cuda_cluster": "bench",
        **dict.fromkeys(("naive", "torch", "compile", "triton"), "older"),
    }
    assert {row["impl"] for row in made.older} == {"naive", "torch", "compile", "triton"}
    assert {row["impl"] for row in made.lost} == {"another package's", "triton_row"}
    made = results.merge(run(2, "softmax"))
    assert {row["type"] for row in recorded(path).values()} == {"bench"}
    assert {row["impl"] for row in made.before} == set(kinds)


def test_counters_are_the_newest_of_those_that_implementations_still_name(path):
    counter = get("reduce_sum").implementations["v3"].counter
    case = next(case for case in get("reduce_sum").cases if case.use == "bench")
    facts = run(0)[:2]
    row = {"type": "counter", "status": "ok", "op": "reduce_sum", "case": case.name, "dtype": case.dtypes[0]}
    row |= {"schema": store.SCHEMA, "run": facts[0]["run"], "direction": "forward", "unit": "inst"}
    row |= {"impl": "v3", "counter": counter, "value": 1.0}
    results.merge([*facts, row, row | {"impl": "v2", "counter": "one of old"}, row | {"status": "unsupported"}])
    assert [row["value"] for row in recorded(path, "counter").values()] == [1.0]
    later = [fact | {"run": run(1)[0]["run"]} for fact in (*facts, row | {"value": 2.0})]
    results.merge(later)
    assert [row["value"] for row in recorded(path, "counter").values()] == [2.0]


def test_runs_that_no_row_leads_to_disappear(path):
    results.merge(run(0, "softmax", "mul"))
    results.merge(run(1, "softmax"))
    names = [run(number)[0]["run"] for number in range(3)]
    rows = store.load(path)
    assert [(row["run"], row["type"]) for row in rows[:4]] == [(n, k) for n in names[:2] for k in ("run", "roof")]
    results.merge([row for row in run(2, "softmax", "mul") if row["type"] != "counter"])
    assert {row["run"] for row in store.load(path) if row["type"] == "bench"} == {names[2]}
    assert {row["run"] for row in store.load(path) if row["type"] in ("run", "roof")} == {
        row["run"] for row in store.load(path) if row["type"] not in ("run", "roof")
    }


def test_cases_and_implementations_that_are_no_more_are_left_out(path):
    row = next(row for row in run(0) if row["type"] == "bench")
    others = [row | {"op": "gone"}, row | {"case": "gone"}, row | {"impl": "gone"}]
    others += [row | {"case": next(case.name for case in get(row["op"]).cases if case.use == "quick")}]
    made = results.merge([*run(0)[:2], row, *others])
    assert len(recorded(path)) == 1
    assert len(made.left_out) == 4
    stale = [results.pack(other) for other in (*run(0)[:2], row, *others)]
    store.replace(path, stale)
    assert [row["type"] for row in results.newest(path)] == ["run", "roof", "bench"]
    assert len(results.merge(run(1, "mul")).lost) == 4


def test_a_round_trip_keeps_rows_and_their_order(path):
    rows = results.join(results.pack(row) for row in run(0))
    with store.locked(path.parent):
        store.replace(path, rows)
    read = store.load(path)
    assert [results.pack(row) for row in read] == rows
    assert results.join(rows) == rows
    some = rows.copy()
    random.Random(0).shuffle(some)
    assert results.join(some) == rows
    before = path.read_bytes()
    store.replace(path, [results.pack(row) for row in read])
    assert path.read_bytes() == before
    assert results.newest(path) == store.load(path) == read
    was = {results.place(row): row for row in run(0) if row["type"] == "bench"}
    for place, row in recorded(path).items():
        assert row["seconds"]["median"] == pytest.approx(was[place]["seconds"]["median"], rel=1e-5)
        assert {k: v for k, v in row.items() if not isinstance(v, (dict, float, int))}.items() <= was[place].items()
        assert row["bytes"] == was[place]["bytes"]
    assert len(path.read_text().splitlines()) < len(rows) / 2
    assert "null" not in path.read_text()


def test_ops_cases_and_implementations_stand_in_order(path):
    results.merge(run(0))
    rows = [row for row in store.load(path) if row["type"] == "bench"]
    assert list(dict.fromkeys(row["op"] for row in rows)) == sorted({row["op"] for row in rows})
    softmax = [row for row in rows if row["op"] == "softmax"]
    cases, ladder = [case.name for case in get("softmax").cases], list(get("softmax").implementations)
    assert [*dict.fromkeys(row["case"] for row in softmax)] == sorted({r["case"] for r in softmax}, key=cases.index)
    assert [row["impl"] for row in softmax[:6]] == sorted({row["impl"] for row in softmax}, key=ladder.index)
    assert list(dict.fromkeys(row["direction"] for row in softmax)) == ["forward", "backward"]


def single(number: int) -> list[dict]:
    """A run of one row: of all such runs together those of one whole run."""
    facts, rows = run(0)[:2], [row for row in run(0) if row["type"] == "bench"]
    return [row | {"run": f"20261120-{number:06d}-abc1234"} for row in (*facts, rows[number])]


def singles(numbers: range) -> None:
    for number in numbers:
        results.merge(single(number))


def test_two_writers_lose_nothing(path):
    writers = [FORK.Process(target=singles, args=(range(start, 30, 2),)) for start in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    assert {row["run"] for row in recorded(path).values()} == {single(number)[0]["run"] for number in range(30)}
    assert [p.name for p in path.parent.iterdir()] == ["h100.jsonl"]


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_kill_before_the_rename_leaves_the_old_file(path, step):
    results.merge(run(0))
    before = path.read_bytes()

    def killed() -> None:
        owner, name = (store.os, "fsync") if step == "fsync" else (store.Path, "replace")
        setattr(owner, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        results.merge(run(1))

    victim = FORK.Process(target=killed)
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert path.read_bytes() == before
    results.merge(run(1))
    assert {row["run"] for row in store.load(path)} == {run(1)[0]["run"]}
    assert [p.name for p in path.parent.iterdir()] == ["h100.jsonl"]


def test_a_kill_at_any_time_leaves_a_whole_file(path):
    for number in range(4):
        victim = FORK.Process(target=singles, args=(range(number * 10, number * 10 + 10),))
        victim.start()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.05 * (number + 1))
        victim.kill()
        victim.join(10)
        assert results.newest(path)
    results.merge(run(1))
    assert results.works(results.newest(path)).keys() == results.works(run(1)).keys()


def test_a_merge_says_what_it_replaced_and_what_differs(path, capsys):
    results.merge(run(0))
    second = run(1, "softmax", "mul")
    for row in second:
        if row["type"] != "bench":
            continue
        old = recorded(path)[results.place(row)]
        row["seconds"] = old["seconds"]
        if (row["op"], row["impl"], row["dtype"]) == ("softmax", "triton", "float32"):
            row["seconds"] = {end: 2 * value for end, value in old["seconds"].items()}
    second = [row for row in second if (row["type"], row.get("impl")) != ("bench", "torch")]
    made = results.merge(second)
    merging.tell(made)
    said = " ".join(capsys.readouterr().err.split())
    counts = {op: sum(row["op"] == op for row in made.before) for op in ("mul", "softmax")}
    assert f"{path}: rows replaced: {sum(counts.values())} (mul {counts['mul']}, softmax {counts['softmax']})" in said
    assert "added: none" in said
    assert f"rows left to ladders, since the new run timed their work without them: {len(made.older)} (mul" in said
    assert said.count("slower") == sum(query.key(row)[2] == "float32" and row["impl"] == "triton"
                                       and row["op"] == "softmax" for row in made.after)  # fmt: skip
    assert "slower" in said
    assert "0.500x" in said
    assert "faster" not in said
    assert "cuda_cluster" not in said


def test_what_no_longer_runs_is_said(path, capsys):
    results.merge(run(0, "mul"))
    broken = [row | {"status": "wrong", "reason": "r"} if row.get("impl") == "cuda" else row for row in run(1, "mul")]
    merging.tell(results.merge(broken))
    assert "gone" in capsys.readouterr().err


def test_rows_that_cannot_be_recorded_are_one_sentence(path):
    for rows, says in (
        (run(0, "mul") + fixture_rows.rows(name="NVIDIA H200"), "these are on h100, h200"),
        (fixture_rows.rows(gpu=False), "these are on cpu"),
        ([row for row in run(0, "mul") if row["type"] != "roof"], "come without its 'roof' row"),
    ):
        with pytest.raises(RidgelineError, match=says):
            results.merge(rows)
    assert not path.exists()
    path.write_text(json.dumps(run(0)[0] | {"schema": 1}) + "\n")
    with pytest.raises(RidgelineError, match=r"^\S+ was written by an older Ridgeline \(schema 1\); this one reads"):
        results.merge(run(1))


def test_a_commit_is_named_where_a_run_does_not_know_it(path):
    rows = run(0, "mul")
    with pytest.raises(RidgelineError, match="runs that do not know theirs, and all of these do"):
        results.merge(rows, at="0123456789")
    facts = {"commit": "unknown", "dirty": False}
    rows = [row | {"run": "20261120-021500-unknown-2"} | (facts if row["type"] == "run" else {}) for row in rows]
    for wrong in ("012345", "main", "0123456g"):
        with pytest.raises(RidgelineError, match="--commit takes 7 to 40 hexadecimal digits"):
            results.merge(rows, at=wrong)
    results.merge(rows, at="0123456789")
    found = store.load(path)
    assert {row["run"] for row in found} == {"20261120-021500-0123456-2"}
    assert (found[0]["commit"], found[0]["dirty"]) == ("0123456", True)


def test_two_machines_runs_of_one_second_stay_apart(path):
    mine, other = run(0, "softmax"), run(0, "mul")
    other[0] = other[0] | {"command": "another"}
    for _ in range(2):
        results.merge(mine)
        results.merge(other)
    name = mine[0]["run"]
    assert {row["op"]: row["run"] for row in recorded(path).values()} == {"softmax": name, "mul": f"{name}-2"}
    commands = {row["run"]: row["command"] for row in store.load(path) if row["type"] == "run"}
    assert commands == {name: "bench", f"{name}-2": "another"}


def options(**given) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    return argparse.Namespace(**(vars(parser.parse_args([])) | given))


def test_the_verb_merges_runs_made_elsewhere(path, tmp_path, capsys):
    files = [fixture_rows.write(tmp_path / f"{seed}.jsonl", seed=seed, ops=("mul",)) for seed in (0, 1)]
    files += [fixture_rows.write(tmp_path / "h200.jsonl", name="NVIDIA H200", ops=("mul",))]
    assert bench.main(options(merge=[str(file) for file in files])) == 0
    assert {row["run"] for row in store.load(path)} == {run(1)[0]["run"]}
    assert path.with_stem("h200").exists()
    assert "rows replaced: none; added:" in capsys.readouterr().err
    cpu = fixture_rows.write(tmp_path / "cpu.jsonl", gpu=False)
    before = path.read_bytes()
    with pytest.raises(RidgelineError, match="these are on cpu"):
        bench.main(options(merge=[str(fixture_rows.write(tmp_path / "2.jsonl", seed=2)), str(cpu)]))
    with pytest.raises(RidgelineError, match="takes neither ops nor --record"):
        bench.main(options(merge=[str(files[0])], record=True))
    assert path.read_bytes() == before


def test_a_recorded_gpu_is_compared_by_its_name(path, tmp_path, capsys):
    results.merge(run(0, "mul"))
    other = fixture_rows.write(tmp_path / "other.jsonl", seed=1, ops=("mul",), slower=2.0)
    assert compare.main(argparse.Namespace(before="h100", after=str(other), json=False)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{run(0)[0]['run']} on NVIDIA H100 80GB HBM3, then {run(1)[0]['run']} on" in said
    assert "slower" in said
    results.merge(run(1, "softmax"))
    assert compare.title(store.load(path)) == "2 recorded runs on NVIDIA H100 80GB HBM3"


def test_what_is_committed(tmp_path):
    """Small, as a merge writes it, and each row with the machine and the roof that it was held against."""
    assert sum(file.stat().st_size for file in (ROOT / "results").rglob("*.json*")) < 3e6
    files = sorted((ROOT / "results").glob("*.jsonl"))
    for file in files:
        rows = store.load(file)
        facts = {(row["run"], row["type"]) for row in rows if row["type"] in results.FACTS}
        measured = [row for row in rows if row["type"] not in results.FACTS]
        assert facts == {(row["run"], kind) for row in measured for kind in results.FACTS}
        assert {store.slug(row["machine"]["gpu"]) for row in query.of(rows, "run")} == {file.stem}
        store.replace(tmp_path / file.name, [results.pack(row) for row in rows])
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        places = [results.place(row) for row in measured]
        assert len(places) == len(set(places))
