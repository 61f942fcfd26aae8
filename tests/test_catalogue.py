"""What serves a call and why, on GPUs that are not here and on the CPU; the verb `check`; what a machine says of itself."""

import argparse
import json

import pytest

from ridgeline.lab import catalogue, check, machine
from ridgeline.op import RidgelineError, get, op_modules


def served(answer):
    return [rung["impl"] for rung in answer["rungs"] if rung["serves"]]


def explain(op, device, **wanted):
    op = get(op)
    return catalogue.explain(
        op, *next(check.chosen_cases(op, ("check", "quick", "bench"), wanted.get("case"), wanted.get("dtype"))), device
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
    """What says whether a rung takes a call is given the call's options, whatever the case's are."""
    found = get(op)
    for case in found.cases:
        if case.use == "check":
            assert served(catalogue.explain(found, case, case.dtypes[0], "sm_90")), case.name


def test_lists_of_tensors_on_the_cpu():
    assert served(explain("clip_grad_norm", "cpu", case="lists")) == ["torch"]


@pytest.mark.parametrize(
    "wrong", [{"device": "sm_1"}, {"device": "tpu"}, {"device": "cpu", "case": "none"}, {"device": "cpu", "dtype": "int3"}]
)
def test_wrong_words_are_one_sentence(wrong):
    with pytest.raises(RidgelineError, match=r"no device|no case"):
        explain("gelu", wrong.pop("device"), **wrong)


def test_the_verbs_print_json(capsys):
    assert catalogue.list_main(argparse.Namespace(ops=["gelu", "mul"], json=True)) == 0
    assert {row["op"] for row in json.loads(capsys.readouterr().out)} == {"gelu", "mul"}
    options = {"ops": ["mul"], "impl": "torch", "case": "1001", "dtype": None, "device": "cpu"}
    assert check.main(argparse.Namespace(**options, json=True)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ok"] for row in rows] == [True] * 3
    assert check.main(argparse.Namespace(**options, json=False)) == 0
    assert "3 checked, 0 broken" in capsys.readouterr().out


def test_the_facts_of_this_machine():
    facts = machine.facts("cpu")
    assert set(facts) == {"gpu", "arch", "cpu", "cores", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "os"}
    assert facts["gpu"] is None
    assert machine.what_runs("cpu")["eager"] is None
    assert "GPU" in machine.what_runs("cpu")["gluon"]
