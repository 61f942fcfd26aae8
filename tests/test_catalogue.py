"""What serves a call and why, on GPUs that are not here and on the CPU; the verb `check`; what a machine says of itself."""

import argparse
import json
from contextlib import suppress

import pytest

from ridgeline import device as devices
from ridgeline import select
from ridgeline.lab import catalogue, check, machine
from ridgeline.op import Case, Columns, RidgelineError, Spec, get, op_modules, registry, tensors_of


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


@pytest.mark.parametrize("name", op_modules())
def test_the_answer_is_what_a_call_does(name, monkeypatch):
    """For every check case on GPUs that are not here: the kernel that is said to serve is chosen, and none where none is said to."""
    op, real, chosen = get(name), select.select, []

    def watched(asked, impl, *args, direction="fwd", **more):
        found = real(asked, impl, *args, direction=direction, **more)
        chosen.extend([found.name] if asked is op and direction == "fwd" else [])
        return found

    monkeypatch.setattr(select, "select", watched)
    for arch in devices.KNOWN:
        for case, dtype in check.chosen_cases(op, ("check",), None, None):
            args, kwargs = case.make(dtype, "meta")
            if not tensors_of(args)[0].numel():  # of which an op may choose nothing
                continue
            (serves,) = served(catalogue.explain(op, case, dtype, arch)) or (None,)
            with devices.pretend(arch):
                del chosen[:]
                if serves is None:
                    with pytest.raises(RidgelineError, match="no implementation serves"):
                        op.function(*args, **kwargs)
                elif op.implementations[serves].is_kernel:
                    op.function(*args, **kwargs)
                    assert chosen[:1] == [serves]
                else:
                    with suppress(RuntimeError):  # of a meta tensor in plain PyTorch
                        op.function(*args, **kwargs)
                    assert not chosen


def test_no_8_bit_floats_on_an_a100(capsys):
    """The formula is not what a call gets there that names no implementation: it raises."""
    answer = explain("fp8_matmul", "sm_80")
    assert not served(answer)
    rungs = {rung["impl"]: rung for rung in answer["rungs"]}
    assert "for kernels alone" in rungs["naive"]["left"]
    assert "no matrix units for 8-bit floats" in rungs["triton"]["reason"]
    catalogue.show(get("fp8_matmul"), answer)
    assert "Nothing serves this call" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["matmul", "linear", "gated_linear", "int8_matmul", "fp8_matmul"])
def test_rows_that_the_copy_engine_does_not_take(name):
    """Of K = 2047, or 4097 of single bytes: `explain` says so of each rung that wants whole 16 bytes, and another one serves."""
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
    assert machine.what_runs("cpu")["eager"] is None
    assert "GPU" in machine.what_runs("cpu")["gluon"]
