"""Whole training steps: who has the turn when, what becomes of failures, the floor, kinds of kernels, and the rows."""

from __future__ import annotations

import argparse
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fixture_rows
from ridgeline.lab.measurement import compare, results, store
from ridgeline.lab.measurement.model import bench as model_bench
from ridgeline.lab.measurement.model import kinds as model_kinds
from ridgeline.lab.measurement.model import step as model_step
from ridgeline.lab.measurement.model import table as model_table
from ridgeline.lab.measurement.model.step import Missing, Task
from ridgeline.lab.presentation import front
from ridgeline.op import RidgelineError

RATE = {"median": 1e12, "low": 0.9e12, "high": 1.1e12}
ROOF = {"matmul": {"bfloat16": RATE}, "lasting": {"bfloat16": {**RATE, "median": 5e11}}, "launch_us": 1.0}
ROOF |= {name: {"median": 1e9, "low": 1e9, "high": 1e9} for name in ("read", "write", "copy", "add")}
WORK = {"parameters": 1000, "products": 10**9, "attention": 10**8, "bytes": {"adamw": 14000}}
GIB = 1 << 30


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "HOUSE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


class Variants:
    """Stands in for the processes: threads that answer from a script. log: (variant, command) in the order of answers.

    script: {variant: {command: (status, value)}} where an answer differs from the usual one. late: the variant that
    asks for its first turn only after another one has made its first steps.
    """

    def __init__(self, monkeypatch, total=0, late=None, **script):
        self.log, self.script, self.total, self.late = [], script, total, late
        self.prepared = threading.Event()
        monkeypatch.setattr(model_bench.Process, "start", self._start())

    def _start(self):
        variants = self

        def start(process):
            process.status, process.reason = "ok", None
            process.connection, theirs = Pipe()
            thread = threading.Thread(target=variants.serve, args=(theirs, process.task), daemon=True)
            thread.start()
            process.process = SimpleNamespace(join=thread.join, is_alive=thread.is_alive, exitcode=0)
            process.process.terminate = process.process.kill = lambda: None
            process.send("imports")

        return start

    def serve(self, connection, task):
        try:
            while True:
                command, arguments = connection.recv()
                if command == "prepare":
                    if task.variant == self.late:
                        assert self.prepared.wait(60)
                    connection.send(("turn", None))
                    connection.recv()
                self.log.append((task.variant, command))
                if command == "prepare":
                    self.prepared.set()
                special = self.script.get(task.variant, {})
                connection.send(special.get(command) or ("ok", self.usual(command, arguments)))
        except (EOFError, OSError):
            pass

    def usual(self, command, arguments):
        memory = {"peak_bytes": 30 * GIB, "reserved_bytes": 30 * GIB, "held_bytes": GIB}
        return {
            "imports": {"parameters": 1000, "host_bytes": 100 * GIB, "versions": {}},
            "build": {"work": WORK, "total_bytes": self.total, "patched": None},
            "prepare": {"losses": [5.0, 4.9], **memory},
            "measure": {"seconds": 0.01 * arguments.get("steps", 1), "loss": 4.0, **memory},
            "host": {"host_us": 900.0},
            "small": {"host_small_us": 500.0},
            "profile": {"kinds": dict.fromkeys(model_kinds.KINDS, 0.001), "kernels": [], "launches": 3},
        }.get(command, {})

    def turns(self, command="measure"):
        return [variant for variant, done in self.log if done == command]


def measured(steps=6, **options):
    """The rows of a run of all variants, the newest of each, by variant."""
    rows: list[dict] = []
    tasks = [Task("llama-1b", 2, 8, variant, "cuda", **options) for variant in model_step.VARIANTS]
    model_bench.record(tasks, lambda: ROOF, steps, lambda text: None, rows.append)
    assert rows[0]["type"] == "roof"
    return {row["variant"]: row for row in model_table.newest(rows)}


def test_variants_take_turns(monkeypatch):
    variants = Variants(monkeypatch)
    rows = measured()
    names = [*model_step.VARIANTS]
    assert variants.turns() == names * model_bench.ROUNDS
    assert variants.turns("park") == []
    assert {row["status"] for row in rows.values()} == {"ok"}
    row = rows["ridgeline"]
    assert row["seconds"] == {"median": 0.01, "low": 0.01, "high": 0.01}
    assert row["tokens_per_second"]["median"] == 1600
    assert row["floor"]["seconds"] == pytest.approx(1e-3 + 1e-4 + 1.4e-5)
    assert row["share"] == pytest.approx(0.1114)
    assert row["share_lasting"] == pytest.approx(0.2214)
    assert row["peak_bytes"] == 30 * GIB
    assert row["losses"] == [5.0, 4.9]


def test_waiting_variants_are_parked_where_memory_is_short(monkeypatch):
    variants = Variants(monkeypatch, total=34 * GIB)
    rows = measured()
    assert variants.turns() == [*model_step.VARIANTS] * model_bench.ROUNDS
    for number, (variant, command) in enumerate(variants.log):
        if command == "measure":
            assert variants.log[number + 1] == (variant, "park")
    assert {row["between"] for row in rows.values()} == {"on the host"}


def test_one_variant_at_a_time_in_repeated_rounds(monkeypatch):
    variants = Variants(monkeypatch)
    rows = measured(graph=True)
    once = ["eager", "compile", "liger", "ridgeline"]
    assert variants.turns() == variants.turns("build")[-8:] == once * model_bench.APART
    assert set(rows) == {f"{variant} (graph)" for variant in once}
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_what_fails_is_a_row_and_the_others_go_on(monkeypatch):
    variants = Variants(
        monkeypatch,
        liger={"build": ("skipped", "the package liger_kernel is not installed")},
        compile={"prepare": ("ok", {"losses": [5.0, 4.8], "reserved_bytes": 0})},
        eager={"measure": ("oom", "it needs more memory than there is")},
        ridgeline={"profile": ("wrong", "it raised ValueError: no")},
    )
    rows = measured()
    assert {name: row["status"] for name, row in rows.items()} == {
        "ridgeline": "ok", "liger": "skipped", "compile": "wrong", "eager": "oom"
    }  # fmt: skip
    assert "its loss of step 2 is 4.8000, and that of eager is 4.9000" in rows["compile"]["reason"]
    assert variants.turns() == ["ridgeline", "eager", *["ridgeline"] * 5]
    assert rows["ridgeline"]["undetailed"].startswith("profile: it raised")
    assert rows["ridgeline"]["host_us"] == 900.0


def test_losses_that_are_no_numbers(monkeypatch, house):
    run = store.Run(dict.fromkeys(store.MACHINE))
    lost = float("nan")
    Variants(
        monkeypatch,
        liger={"prepare": ("ok", {"losses": [5.0, lost], "reserved_bytes": 0})},
        ridgeline={"measure": ("ok", {"seconds": 0.1, "loss": lost, "peak_bytes": None})},
    )
    tasks = [Task("llama-1b", 2, 8, variant, "cpu") for variant in ("ridgeline", "liger", "eager")]
    model_bench.record(tasks, lambda: ROOF, 6, lambda text: None, run.write)
    rows = {row["variant"]: row for row in model_table.newest(store.load(run.path))}
    assert rows["liger"]["losses"] == [5.0, None]
    assert "its loss of step 2 is nan" in rows["liger"]["reason"]
    assert (rows["ridgeline"]["status"], rows["eager"]["status"]) == ("wrong", "ok")
    assert "not finite" in rows["ridgeline"]["reason"]


def test_a_step_that_did_not_fit_beside_others_is_tried_with_them_parked(monkeypatch):
    variants = Variants(monkeypatch, late="liger", liger={"prepare": ("oom", "it needs more memory than there is")})
    rows = measured()
    assert variants.turns("prepare").count("liger") == 2
    assert rows["liger"]["status"] == "oom"
    assert rows["ridgeline"]["between"] == "on the host"


def test_every_process_is_ended_after_an_interruption(monkeypatch):
    Variants(monkeypatch)
    started = []
    start = model_bench.Process.start
    monkeypatch.setattr(model_bench.Process, "start", lambda self: (start(self), started.append(self)))

    def stop(text):
        if text.startswith("round 2"):
            raise KeyboardInterrupt

    tasks = [Task("llama-1b", 2, 8, variant, "cuda") for variant in model_step.VARIANTS]
    with pytest.raises(KeyboardInterrupt):
        model_bench.record(tasks, lambda: ROOF, 6, stop, lambda row: None)
    assert len(started) == 4
    assert not any(process.process.is_alive() for process in started)


def test_learning_rates(monkeypatch, house, capsys):
    nested = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4096))
    assert model_step.rate(nested) == 1e-5
    for width, rate in ((64, 2e-4), (1024, 2e-4), (1025, 2e-5), (3072, 2e-5), (3073, 1e-5), (1 << 14, 1e-5)):
        config = SimpleNamespace(hidden_size=width)
        config.get_text_config = lambda config=config: config
        assert model_step.rate(config) == rate
    built = {"work": WORK, "total_bytes": 0, "patched": None, "learning_rate": 1e-5}
    Variants(monkeypatch, **{name: {"build": ("ok", built)} for name in model_step.VARIANTS})
    rows = measured()
    assert {row["learning_rate"] for row in rows.values()} == {1e-5}
    older = {name: value for name, value in rows["eager"].items() if name != "learning_rate"}
    model_table.show([*rows.values()])
    model_table.show([older])
    shown = capsys.readouterr().out
    assert shown.count("losses of the first steps") == 2
    assert shown.count("learning rate 1e-05") == 1


@pytest.mark.parametrize(("seq", "window"), [(7, None), (7, 3), (7, 1), (3, 9)])
def test_pairs(seq, window):
    met = torch.ones(seq, seq).tril()
    if window is not None:
        met = met.triu(1 - window)
    assert model_step.pairs(seq, window) == met.sum()


def test_windows():
    config = SimpleNamespace(sliding_window=4, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
    assert model_step.windows(config) == [4, None]
    assert model_step.windows(SimpleNamespace(num_hidden_layers=2)) == [None, None]


KERNELS = [
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "MmBackward0/aten::mm", "products"),
    ("sm90_xmma_gemm_bf16", "LigerFusedLinearCrossEntropyFunction/aten::mm", "products"),
    ("liger_cross_entropy_kernel", "LigerFusedLinearCrossEntropyFunction", "loss"),
    ("_fwd", "ridgeline::rms_norm_fwd", "norms"),
    ("_fwd", "ridgeline::linear_cross_entropy_fwd", "loss"),
    ("nvjet_tst_128", "ridgeline::linear_cross_entropy_fwd/aten::mm", "products"),
    ("_fwd", "ridgeline::attention_fwd", "attention"),
    ("_multiply", "GatedBackward/ridgeline::gated_linear_bwd", "products"),
    ("_gate", "ridgeline::topk_gate_fwd", "elementwise"),
    *[
        (name, f"GptOssExperts/ridgeline::{op}", "products")
        for name in ("_fwd", "_bwd", "_put", "_combine", "_up")
        for op in (
            "moe_fwd",
            "moe_bwd",
            "moe_alone",
            "moe_consume",
            "moe_few_bits",
            "grouped_matmul_fwd",
            "grouped_matmul_bwd",
            "grouped_matmul_add",
            "grouped_matmul_collect",
        )
    ],
    ("_step", "Optimizer.step#AdamW.step/ridgeline::adamw", "optimizer"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "aten::_fused_adamw_", "optimizer"),
    ("_fwd", "ridgeline::rope_fwd", "elementwise"),
    ("flash_fwd_kernel", "aten::scaled_dot_product_attention/aten::_flash_attention_forward", "attention"),
    ("sm90_gemm", "aten::matmul/aten::bmm", "attention"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "", "norms"),
    ("triton_poi_fused_mul_silu_7", "", "elementwise"),
    ("triton_red_fused__log_softmax_2", "", "loss"),
    ("Memcpy DtoD (Device -> Device)", "aten::copy_", "elementwise"),
    ("void at::native::vectorized_elementwise_kernel<4>", "aten::mul", "elementwise"),
    ("something", "", "rest"),
]


@pytest.mark.parametrize(("name", "owner", "kind"), KERNELS)
def test_kinds_of_kernels(name, owner, kind):
    assert model_kinds.kind(name, owner) == kind


def test_kernels_are_summed_by_name_owner_and_kind():
    def event(name, kernels=(), parent=None, device="DeviceType.CPU", micro=0.0):
        span = SimpleNamespace(elapsed_us=lambda: micro)
        return SimpleNamespace(name=name, kernels=kernels, cpu_parent=parent, device_type=device, time_range=span,
                               is_user_annotation=False)  # fmt: skip

    def kernel(name, duration):
        return SimpleNamespace(name=name, duration=duration)

    outer = event("autograd::engine::evaluate_function: MmBackward0")
    inner = event("aten::mm", [kernel("gemm", 2.0), kernel("gemm", 3.0)], outer)
    gpu = [event(name, device="DeviceType.CUDA", micro=m) for name, m in (("gemm", 2.0), ("gemm", 3.0), ("lone", 1.0))]
    lines = model_kinds.kernels([outer, inner, *gpu])
    assert [(x["name"], x["owner"], x["kind"], x["calls"]) for x in lines] == [
        ("gemm", "aten::mm", "products", 2), ("lone", "", "rest", 1)
    ]  # fmt: skip
    found = model_kinds.by_kind(lines)
    assert found["products"] == pytest.approx(5e-6)
    assert found["rest"] == pytest.approx(1e-6)


@pytest.mark.kernels
def test_the_profiler_is_told_the_names_of_ops(device):
    import ridgeline

    x = torch.randn(4, 8, device=device, requires_grad=True)
    w = torch.ones(8, device=device, requires_grad=True)
    with model_kinds.named(), torch.profiler.profile() as profiler:
        ridgeline.rms_norm(x, w, impl="triton").sum().backward()
    names = {event.name for event in profiler.events()}
    assert {"ridgeline::rms_norm_fwd", "ridgeline::rms_norm_bwd"} <= names


def test_the_lasting_rate():
    rate = model_bench.lasting("cpu", side=16, seconds=0.01)
    assert 0 < rate["low"] <= rate["median"] <= rate["high"]


# --- rows that are recorded


def test_the_newest_row_of_each_variant_is_kept(house):
    first, second = (
        fixture_rows.steps(0, ("ridgeline", 0.3), ("eager", 0.4)),
        fixture_rows.steps(1, ("ridgeline", 0.25)),
    )
    results.merge(first)
    made = results.merge(second)
    assert [len(rows) for rows in (made.before, made.after, made.added, made.lost, made.left_out)] == [1, 1, 0, 0, 0]
    kept = {row["variant"]: row for row in results.newest(made.path) if row["type"] == "model"}
    assert {name: row["seconds"]["median"] for name, row in kept.items()} == {"ridgeline": 0.25, "eager": 0.4}
    assert {row["run"] for row in results.newest(made.path) if row["type"] == "roof"} == {
        row["run"] for row in kept.values()
    }
    (change,) = [row for row in compare.compare(made.before, made.after) if row["op"] == "llama-1b"]
    assert (change["case"], change["direction"], change["impl"]) == ("4x4096", "step", "ridgeline")
    assert (change["gain"], change["change"]) == (pytest.approx(1.2), "same")
    again = results.merge(first)
    assert [row["variant"] for row in again.left_out] == ["ridgeline"]
    assert results.merge(second).path.read_bytes() == again.path.read_bytes()


def test_ops_and_steps_stand_in_one_file(house):
    results.merge(fixture_rows.steps(0, ("ridgeline", 0.3)))
    cases = fixture_rows.rows(seed=1, ops=("gelu",))
    made = results.merge(cases)
    kinds = {row["type"] for row in results.newest(made.path)}
    assert "model" in kinds
    assert not made.lost


def test_a_step_of_a_folder_s_model_is_not_kept(house):
    rows = fixture_rows.steps(0, ("ridgeline", 0.3), ("eager", 0.4))
    rows[-1]["model"] = "tiny"
    made = results.merge(rows)
    assert [row["model"] for row in made.left_out] == ["tiny"]


def test_a_timed_row_needs_its_figures(house):
    rows = fixture_rows.steps(0, ("ridgeline", 0.3))
    del rows[-1]["seconds"]
    store.append(house / "a.jsonl", rows)
    with pytest.raises(RidgelineError, match="'seconds'"):
        store.load(house / "a.jsonl")


def test_the_table_shows_figures_and_reasons(capsys):
    rows = [row for row in fixture_rows.steps(0, ("ridgeline", 0.25), ("eager", 0.4)) if row["type"] == "model"]
    full = {"variant": "liger", "status": "oom", "reason": "it needs more memory than there is"}
    rows.append(rows[0] | full | {"seconds": None, "losses": None})
    model_table.show(rows)
    said = capsys.readouterr().out
    for words in ("Llama 3.2 1B, 4 x 4096 tokens", "65,536", "80%", "27.0 GiB", "11.7000", "32.0 ms"):
        assert words in said, said
    assert "liger: oom: it needs more memory than there is" in said


def test_the_pages_show_steps_only_if_there_are_some():
    rows = [row for row in fixture_rows.steps(0, ("ridgeline", 0.25), ("eager", 0.4)) if row["type"] == "model"]
    assert model_table.markdown([]) == ""
    assert "| ridgeline | 250 ms" in model_table.markdown(rows)
    said = model_table.headline(rows)
    assert said is not None
    assert "runs at 65,536 tokens/s" in said
    assert "1.60x as fast as plain transformers" in said
    assert model_table.headline(rows[1:]) is None
    assert front.model_table is model_table


# --- options


def options(**given) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--record", action="store_true")
    model_bench.arguments(parser)
    return argparse.Namespace(**(vars(parser.parse_args(["--model", "llama-1b"])) | given))


def test_a_machine_without_transformers_says_so(monkeypatch):
    monkeypatch.setattr(model_bench, "find_spec", lambda name: None)
    with pytest.raises(RidgelineError, match=r"transformers, which is not installed \(pip install transformers\)"):
        model_bench.chosen(options(), "cpu")


def test_options_become_tasks(monkeypatch, tmp_path):
    monkeypatch.setattr(model_bench, "find_spec", lambda name: object())
    (tmp_path / "config.json").write_text("{}")
    tasks = model_bench.chosen(options(memory="low", variants="eager,ridgeline,eager"), "cpu")
    assert [task.label for task in tasks] == ["eager", "ridgeline (memory=low)"]
    with pytest.raises(RidgelineError, match="--record keeps steps of the sizes llama-1b"):
        model_bench.chosen(options(model=str(tmp_path), record=True), "cpu")
    with pytest.raises(RidgelineError, match="--small .* --graph"):
        model_bench.chosen(options(graph=True, small=True), "cuda")


def test_liger_is_applied_to_the_model_it_knows(monkeypatch):
    applied = []
    module = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": lambda model: applied.append(model)})
    monkeypatch.setattr(model_step, "find_spec", lambda name: object())
    monkeypatch.setattr(model_step, "import_module", {"liger_kernel.transformers.monkey_patch": module}.get)
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama")  # type: ignore[assignment]
    model.config.get_text_config = lambda: SimpleNamespace(hidden_size=64)
    made, optimizer, report = model_step.varied(Task("llama-1b", 1, 8, "liger", "cpu"), model)
    assert (applied, made, report) == ([model], model, None)
    assert type(optimizer) is torch.optim.AdamW
    model.config.model_type = "other"
    with pytest.raises(Missing, match="no kernels for the model type 'other'") as caught:
        model_step.varied(Task("llama-1b", 1, 8, "liger", "cpu"), model)
    assert caught.value.status == "unsupported"


def test_peers_that_are_missing_say_how_to_install_them(monkeypatch):
    monkeypatch.setattr(model_step, "find_spec", lambda name: None)
    for variant, words in (("liger", "pip install liger-kernel"), ("ridgeline", "ridgeline.hf")):
        with pytest.raises(Missing, match=words) as caught:
            model_step.varied(Task("llama-1b", 1, 8, variant, "cpu"), None)
        assert caught.value.status == "skipped"


def test_the_profilers_own_events_take_no_kernels():
    def event(name, kernels=(), device="DeviceType.CPU", micro=0.0):
        span = SimpleNamespace(elapsed_us=lambda: micro)
        return SimpleNamespace(name=name, kernels=kernels, cpu_parent=None, device_type=device, time_range=span,
                               is_user_annotation=False)  # fmt: skip

    one = SimpleNamespace(name="FusedAdam", duration=2.0)
    full = event("Command Buffer Full", [one, one, one])
    twice = [event("aten::_fused_adamw_", [one]), event("aten::_fused_adamw_", [one])]
    lines = model_kinds.kernels([full, *twice, event("FusedAdam", device="DeviceType.CUDA", micro=2.0)])
    assert [(line["kind"], line["calls"]) for line in lines] == [("optimizer", 1)]
