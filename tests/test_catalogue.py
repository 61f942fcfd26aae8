"""What runs a call and why, on GPUs that are not here and on the CPU; cards by name; the verbs `list` and `check`."""

import argparse
import json
from contextlib import suppress
from dataclasses import replace

import pytest

from ridgeline import device as devices
from ridgeline import select
from ridgeline.lab.analysis import cards, catalogue, doctor
from ridgeline.lab.measurement import cases, check, machine, store
from ridgeline.op import Case, Columns, RidgelineError, Spec, get, op_modules, registry, tensors_of


def served(answer):
    return [rung["impl"] for rung in answer["rungs"] if rung["serves"]]


def explain(op, device, **wanted):
    op = get(op)
    return catalogue.explain(
        op, *next(cases.chosen_cases(op, ("check", "quick", "bench"), wanted.get("case"), wanted.get("dtype"))), device
    )


def test_a_kernel_serves_a_gpu_that_is_not_here():
    answer = explain("gelu", "sm_90")
    assert answer["arch"] == "sm_90"
    assert served(answer) == ["triton"]
    assert all(rung["reason"] is None for rung in answer["rungs"] if rung["kind"] != "compile")
    reasons = {rung["impl"]: rung["reason"] for rung in explain("gelu", "gfx942")["rungs"]}
    assert "NVIDIA" in reasons["cuda"]
    assert reasons["triton"] is None


def test_plain_pytorch_serves_the_cpu():
    answer = explain("softmax", "cpu")
    assert served(answer) == ["torch"]
    assert all(rung["reason"] for rung in answer["rungs"] if rung["kind"] in ("cuda", "triton", "gluon"))


@pytest.mark.parametrize("op", op_modules())
def test_every_case_is_explained(op):
    """Whether an implementation supports a call is asked with the call's options, whichever a case has."""
    found = get(op)
    for case in found.cases:
        if case.use == "check":
            assert served(catalogue.explain(found, case, case.dtypes[0], "sm_90")), case.name


def test_lists_of_tensors_on_the_cpu():
    assert served(explain("clip_grad_norm", "cpu", case="lists")) == ["torch"]


@pytest.mark.parametrize("name", op_modules())
def test_the_answer_is_what_a_call_does(name, monkeypatch):
    """For every check case, on cards that are not here, a call chooses the kernel that `explain` names, or none.

    In every dtype on an H100, and in one of them on each other card: which kernels run depends on the card.
    """
    op, real, chosen = get(name), select.select, []

    def watched(asked, impl, *args, direction="fwd", **more):
        found = real(asked, impl, *args, direction=direction, **more)
        chosen.extend([found.name] if asked is op and direction == "fwd" else [])
        return found

    monkeypatch.setattr(select, "select", watched)
    for card in ("h100", "rtx3090", "b200", "rtx5090", "mi300x"):
        for n, (case, dtype) in enumerate(cases.chosen_cases(op, ("check",), None, None)):
            args, kwargs = case.make(dtype, "meta")
            if not tensors_of(args)[0].numel():  # an op may choose nothing for an empty tensor
                continue
            if card != "h100" and dtype != case.dtypes[n % len(case.dtypes)]:
                continue
            (serves,) = served(catalogue.explain(op, case, dtype, card)) or (None,)
            with devices.pretend(card):
                del chosen[:]
                if serves is None:
                    with pytest.raises(RidgelineError, match="no implementation serves"):
                        op.function(*args, **kwargs)
                elif op.implementations[serves].is_kernel:
                    op.function(*args, **kwargs)
                    assert chosen[:1] == [serves]
                else:
                    with suppress(RuntimeError):  # plain PyTorch on a meta tensor
                        op.function(*args, **kwargs)
                    assert not chosen


@pytest.mark.parametrize("card", ["a100", "rtx3090"])
def test_no_8_bit_floats_before_ada(card, capsys):
    """A call that names no implementation raises: the formula in plain PyTorch does not run by default."""
    answer = explain("fp8_matmul", card)
    assert not served(answer)
    rungs = {rung["impl"]: rung for rung in answer["rungs"]}
    assert "only kernels run" in rungs["naive"]["left"]
    assert "no matrix units for 8-bit floats" in rungs["triton"]["reason"]
    catalogue.show(get("fp8_matmul"), answer)
    assert "Nothing runs this call by default" in capsys.readouterr().out
    assert served(explain("fp8_matmul", "rtx4090")) == served(explain("fp8_matmul", "l40s")) == ["triton"]
    assert served(explain("quantize_fp8", card)) == ["triton"]  # encoded without an instruction for it


def test_what_a_consumer_blackwell_card_lacks():
    """sm_120 has neither Hopper's matrix instructions nor its shared memory, and each refusal says which."""
    found = {
        (name, rung["impl"]): rung["reason"]
        for name in ("attention", "matmul", "softmax", "group_norm", "cumsum", "copy")
        for rung in explain(name, "rtx5090")["rungs"]
    }
    for hopper in (("attention", "gluon"), ("matmul", "gluon"), ("matmul", "cuda_cluster")):
        assert found[hopper] == "it is written for sm_90, and NVIDIA GeForce RTX 5090 is sm_120"
    for large in (("softmax", "cuda_cluster"), ("group_norm", "cuda_cluster"), ("cumsum", "cuda_ring")):
        assert found[large] == "it needs 227 KiB of shared memory per block, and NVIDIA GeForce RTX 5090 has 99"
    assert found["copy", "cuda_bulk"] is None
    rungs = explain("matmul", "rtx5090", case="4096x4096x4096", dtype="bfloat16")["rungs"]
    assert {rung["impl"]: rung["reason"] for rung in rungs}["triton_persistent"] is None


@pytest.mark.parametrize("name", ["matmul", "linear", "gated_linear", "int8_matmul", "fp8_matmul"])
def test_rows_that_the_copy_engine_does_not_take(name):
    """K = 2047, or 4097 single bytes: `explain` says which implementations need whole 16 bytes, and names another."""
    x, square = Spec(1024, 2047), Columns(2047, 1024)
    made = {"matmul": (x, square), "linear": (x, x), "gated_linear": (x, x, x)}.get(name)
    wanted = {"case": "4095x4093x4097"} if name == "int8_matmul" else {"case": "4095x4093x4097 blocks"}
    answer = (
        catalogue.explain(get(name), Case("", made), "bfloat16", "sm_90") if made else explain(name, "sm_90", **wanted)
    )
    reasons = {rung["impl"]: rung["reason"] for rung in answer["rungs"]}
    assert "16 bytes" in reasons["gluon"]
    assert "strides" in reasons["gluon"]
    assert reasons["gluon_padded"] is None
    assert served(answer) == ["torch" if name == "linear" else "gluon_padded"]  # a linear layer alone is PyTorch's


@pytest.mark.parametrize(
    "wrong",
    [{"device": "sm_1"}, {"device": "tpu"}, {"device": "cpu", "case": "none"}, {"device": "cpu", "dtype": "int3"}],
)
def test_wrong_words_are_one_sentence(wrong):
    with pytest.raises(RidgelineError, match=r"unknown GPU|no case"):
        explain("gelu", wrong.pop("device"), **wrong)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("sm_89", "rtx4090"),
        ("sm89", "rtx4090"),
        ("L40S", "l40s"),
        ("sm_90", "h100"),
        ("H200", "h200"),
        ("gfx942", "mi300x"),
    ],
)
def test_cards_by_name(name, card):
    assert devices.known(name) == devices.KNOWN[card]
    with devices.pretend(name) as pretended:
        assert devices.here() is pretended is devices.KNOWN[card]
    assert explain("softmax", name)["device"] == devices.KNOWN[card].name


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rtx4080", "rtx4090"), ("H300", "h100"), ("sm_88", "sm_80"), ("mi300", "mi300x"), ("tpu", None)],
)
def test_a_wrong_name_lists_what_there_is(name, meant):
    with pytest.raises(RidgelineError, match=f"unknown GPU '{name}'") as error, devices.pretend(name):
        pass
    told = str(error.value)
    assert ("perhaps" in told) == (meant is not None)
    assert meant is None or meant in told.split(" is meant")[0]
    assert all(word in told for word in (*devices.KNOWN, *devices.ARCHES))
    with pytest.raises(RidgelineError, match="this machine is cpu or cuda"):
        explain("softmax", name)
    with pytest.raises(RidgelineError, match="this machine is cpu or cuda"):
        doctor.main(argparse.Namespace(device=name, json=False, quick=True, topology=False))


def test_an_h200_has_more_than_an_h100():
    """Rules tell the two apart by L2 alone: 55 MiB is between them (test_ladders has packed atomics by it)."""
    h100, h200 = devices.known("h100"), devices.known("h200")
    assert replace(h200, name=h100.name, l2=h100.l2) == h100
    assert h100.l2 < 55 << 20 < h200.l2


def test_the_supported_cards():
    """Measured are those with recorded results; all others are compiled alone."""
    found = {row["card"]: row for row in cards.supported()}
    assert [*found] == [*devices.KNOWN]
    assert {row["state"] for row in found.values()} == {*cards.STATES}
    recorded = {path.name.removesuffix(".jsonl") for path in store.recorded().iterdir()}
    assert {card for card, row in found.items() if row["state"] == "measured"} == recorded & {*found}
    assert found["h100"]["kinds"] == ["cuda", "triton", "gluon"]
    assert found["rtx4090"]["kinds"] == ["cuda", "triton"]
    assert found["mi300x"]["kinds"] == ["triton"]
    assert cards.state(devices.Device("NVIDIA H100 80GB HBM3", "cuda", "sm_90", 90)) == "measured"
    assert cards.state(devices.Device("NVIDIA RTX A6000", "cuda", "sm_86", 86)) == "compiled"
    assert cards.state(devices.Device("Tesla T4", "cuda", "sm_75", 75)) is None


def test_doctor_tells_of_a_card(capsys):
    options = argparse.Namespace(device="rtx4090", quick=False, json=True, topology=False)
    assert doctor.main(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["card"] == {
        "name": "NVIDIA GeForce RTX 4090",
        "arch": "sm_89",
        "multiprocessors": 128,
        "shared_memory": 101_376,
        "l2": 72 << 20,
    }
    assert told["state"] == "compiled"
    assert told["runs"]["triton"] is None
    assert "none of the" in told["runs"]["gluon"]
    assert [row["op"] for row in told["ops"]] == [*registry()]
    assert {row["op"]: row["impl"] for row in told["ops"]}["softmax"] == "triton"
    assert doctor.main(argparse.Namespace(device="RTX 3090", quick=False, json=False, topology=False)) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA GeForce RTX 3090" in page
    assert "none has run on one" in page
    assert "none: name one" in page  # fp8_matmul


@pytest.mark.parametrize("arguments", [doctor.arguments, catalogue.explain_arguments])
def test_help_lists_the_cards(arguments):
    parser = argparse.ArgumentParser()
    arguments(parser)
    told = " ".join(parser.format_help().split())
    assert all(word in told for word in (*devices.KNOWN, *devices.ARCHES))


def test_the_verbs_print_json(capsys):
    assert catalogue.list_main(argparse.Namespace(ops=["gelu", "mul"], json=True)) == 0
    assert {row["op"] for row in json.loads(capsys.readouterr().out)} == {"gelu", "mul"}
    options = {"ops": ["mul"], "impl": "torch", "case": "1001", "dtype": None, "device": "cpu"}
    assert check.main(argparse.Namespace(**options, json=True)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in rows] == [True] * 3
    assert check.main(argparse.Namespace(**options, json=False)) == 0
    assert "3 checked, 0 broken" in capsys.readouterr().out


def test_a_list_of_an_op_names_its_cases(capsys):
    assert catalogue.list_main(argparse.Namespace(ops=["matmul"], json=False)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(case.name in told for case in get("matmul").cases)
    assert {case.use for op in registry().values() for case in op.cases} <= {*catalogue.USES}
    assert catalogue.list_main(argparse.Namespace(ops=[], json=False)) == 0
    assert "cases, " not in capsys.readouterr().out


def test_the_facts_of_this_machine():
    facts = machine.facts("cpu")
    assert set(facts) == {
        "gpu",
        "arch",
        "cpu",
        "cores",
        "memory_bytes",
        "driver",
        "cuda",
        "torch",
        "triton",
        "python",
        "os",
    }
    assert facts["gpu"] is None
    assert doctor.what_runs("cpu")["eager"] is None
    assert "GPU" in doctor.what_runs("cpu")["gluon"]


def test_a_loaded_op_is_found_without_reading_folders(monkeypatch):
    """Backwards ask for ops at every step; looking through the folders takes milliseconds."""
    wanted = get("silu_mul")
    monkeypatch.setattr("ridgeline.op.OPS", None)
    assert get("silu_mul") is wanted
