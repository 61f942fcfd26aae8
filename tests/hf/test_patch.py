"""What a patched model must still do: be restored, copied, saved, compiled, checkpointed, sampled and trained."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from models import assert_same, build, pair, step, tokens

import ridgeline
from ridgeline import hf
from ridgeline.hf.logits import DeferredLogits
from ridgeline.op import RidgelineError


def state(model: Any) -> list[tuple[Any, ...]]:
    """Returns what unpatching must restore: every module's attributes and the configuration."""
    return [(n, type(m), sorted(m.__dict__), m.__dict__.get("forward")) for n, m in model.named_modules()]


def test_importing_ridgeline_imports_no_transformers() -> None:
    code = "import sys, ridgeline, ridgeline.hf; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_unpatch_restores(name: str) -> None:
    own, ours = pair(name)
    before, config = state(ours), ours.config.to_dict()
    hf.patch(ours)
    hf.unpatch(ours)
    hf.unpatch(ours)
    assert state(ours) == before
    assert ours.config.to_dict() == config
    assert ours.config._attn_implementation == own.config._attn_implementation
    ids = tokens()
    (a, b, _), (c, d, _) = step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def test_others_stay_as_they_are() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    functions = dict(vars(modeling_llama))
    model = build("Llama")
    other = LlamaForCausalLM(model.config)
    hf.patch(model)
    assert other.config._attn_implementation == "sdpa"
    assert dict(vars(modeling_llama)) == functions
    assert not any("forward" in m.__dict__ for m in other.modules())


def test_patching_twice_is_patching_once() -> None:
    own, ours = pair("Llama")
    first = str(hf.patch(ours))
    assert str(hf.patch(ours)) == first
    before = [m.__dict__.get("forward") for m in ours.modules()]
    assert str(hf.explain(ours)) == first
    assert [m.__dict__.get("forward") for m in ours.modules()] == before
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))
    hf.unpatch(ours)
    assert state(ours) == state(own)


def test_only_some_parts() -> None:
    own, ours = pair("Llama")
    report = hf.patch(ours, only=["norm", "loss"])
    assert {r.part for r in report.patched()} == {"norm", "loss"}
    assert ours.config._attn_implementation == "sdpa"
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))


def test_refusals() -> None:
    model = build("Llama")
    for wrong in ({"quantize": "fp5"}, {"memory": "all"}, {"only": ["softmax"]}):
        with pytest.raises(RidgelineError):
            hf.patch(model, **wrong)
    with pytest.raises(RidgelineError, match="takes a model of transformers"):
        hf.patch(torch.nn.Linear(2, 2))
    with pytest.raises(RidgelineError, match="strict"):
        hf.patch(build("Cohere"), strict=True)
    hf.patch(model, strict=True)


def test_a_changed_form_is_left_alone() -> None:
    ours = build("Llama")
    kind = type(ours.model.norm)

    class OtherRMSNorm(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2

    ours.model.norm.__class__ = OtherRMSNorm
    row = next(r for r in hf.patch(ours).rows if r.name == "model.norm")
    assert row.op is None
    assert row.reason == "its form is not known"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_patched_and_independent(how: Any) -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    twin = how(ours)
    for a, b in zip(ours.modules(), twin.modules(), strict=True):
        assert a is not b
        if "forward" in a.__dict__:
            assert b.forward.args[0] is b
    hf.unpatch(ours)
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(twin, input_ids=ids, labels=ids))
    hf.unpatch(twin)
    assert state(twin) == state(own)


def test_save_and_load(tmp_path: Any) -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    ours.save_pretrained(tmp_path)
    loaded = type(own).from_pretrained(tmp_path).train()
    assert loaded.config._attn_implementation == "sdpa"
    assert not any("forward" in m.__dict__ for m in loaded.modules())
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(loaded, input_ids=ids, labels=ids))
    torch.save(ours.state_dict(), io.BytesIO())
    assert ours.state_dict().keys() == own.state_dict().keys()


def test_logits_are_made_when_read() -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    ids = tokens()
    out = ours(input_ids=ids, labels=ids)
    assert type(out.logits) is DeferredLogits
    assert out.logits.shape == (2, 21, 97)
    assert out.logits.made is None
    made = out.logits * torch.ones(())
    assert type(made) is torch.Tensor
    want = own(input_ids=ids).logits
    torch.testing.assert_close(made, want)
    # Gradients flow from logits, whether torch sees them in Python or only below.
    grads = [torch.autograd.grad(f(m(input_ids=ids).logits), m.lm_head.weight)[0]
             for m in (own, ours) for f in (lambda y: y.square().sum(), lambda y: _Square.apply(y).sum())]  # fmt: skip
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_logits_read_after_the_step_raise() -> None:
    model = build("Llama")
    hf.patch(model)
    ids = tokens()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RidgelineError, match="before backward.. or optimizer.step"):
        out.logits.argmax()


@pytest.mark.parametrize("given", [
    {"num_items_in_batch": 50}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 5}, {"shift_labels": True},
    {"logits_to_keep": 9, "shift_labels": True},
])  # fmt: skip
def test_arguments_of_the_loss(given: dict[str, Any]) -> None:
    own, ours = pair("Gemma2")
    hf.patch(ours)
    ids = tokens()
    keep = given.get("logits_to_keep", 0)
    if "shift_labels" in given:
        given = given | {"shift_labels": tokens()[:, -keep:].contiguous()}
    inputs = {"input_ids": ids, "labels": ids, **given}
    assert_same(step(own, **inputs), step(ours, **inputs), torch.ones(2, keep or 21, dtype=torch.bool))


def test_gradient_checkpointing() -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    calls = []
    ours.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    for model in (own, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_compiled(name: str) -> None:
    own, ours = pair(name)
    hf.patch(ours)
    own.config.use_cache = ours.config.use_cache = False
    ids = tokens()
    want = step(own, input_ids=ids, labels=ids)
    torch._dynamo.reset()
    assert_same(
        want, step(torch.compile(ours, backend="aot_eager", fullgraph=name == "Llama"), input_ids=ids, labels=ids)
    )


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GptOss", "Mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name: str, cache: str) -> None:
    own, ours = pair(name)
    hf.patch(ours)
    ids, mask = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    given = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    want, found = (m.eval().generate(ids, attention_mask=mask, **given) for m in (own, ours))
    assert torch.equal(want, found)


def test_lora_on_a_patched_model() -> None:
    peft = pytest.importorskip("peft")
    own, ours = pair("Llama")
    hf.patch(ours)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    own = peft.get_peft_model(own, config)
    torch.manual_seed(1)
    ours = peft.get_peft_model(ours, config)
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))
    hf.unpatch(ours)
    report = hf.patch(ours)
    assert {r.part for r in report.patched()} == {"norm", "rotary", "mlp", "attention", "loss"}
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))


class _Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = tokens(16, 12)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16: bool, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows, losses = _Rows(), []
    own, ours = pair("Llama")
    hf.patch(ours)
    for model in (own, ours):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
            learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=bf16, seed=3,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        losses.append([trainer.evaluate()["eval_loss"], *trainer.predict(rows).predictions[0, 0, :3]])
    torch.testing.assert_close(torch.tensor(losses[2]), torch.tensor(losses[0]), rtol=2e-2 if bf16 else 1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(losses[3]), torch.tensor(losses[1]), rtol=5e-2 if bf16 else 1e-3, atol=2e-2)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # another test's precision
    own, ours = pair("Llama")
    hf.patch(ours)
    prepared = accelerate.Accelerator(cpu=True).prepare(ours)
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(prepared, input_ids=ids, labels=ids))


def test_what_attention_cannot_do_falls_back_and_says_so_once() -> None:
    own, ours = pair("Llama", attn_implementation="eager")
    report = hf.patch(ours)
    ids = tokens()
    with pytest.warns(UserWarning, match="attention weights are asked for"):
        found = ours(input_ids=ids, output_attentions=True, attention_mask=torch.tensor([[0] * 5 + [1] * 16, [1] * 21]))
    want = own(input_ids=ids, output_attentions=True, attention_mask=torch.tensor([[0] * 5 + [1] * 16, [1] * 21]))
    torch.testing.assert_close(found.attentions[1][1], want.attentions[1][1])
    torch.testing.assert_close(found.logits[1], want.logits[1])
    assert len(report.fallbacks) == 1
    assert "Fell back" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(input_ids=ids, output_attentions=True)


def test_dropout_in_attention_is_torchs() -> None:
    own, ours = pair("Llama", attention_dropout=0.4)
    report = hf.patch(ours)
    ids = tokens()
    torch.manual_seed(5)
    want = step(own, input_ids=ids, labels=ids)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="dropout 0.4 in training"):
        assert_same(want, step(ours, input_ids=ids, labels=ids))
    assert len(report.fallbacks) == 1


def test_hf_is_a_part_of_ridgeline() -> None:
    assert ridgeline.hf is hf
    assert "hf" in dir(ridgeline)


def test_explain_on_the_command_line(tmp_path: Any, capsys: Any) -> None:
    from ridgeline.cli import main

    build("Qwen3").config.save_pretrained(tmp_path)
    assert main(["explain", "--model", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in text
    assert "model.layers.*.self_attn.q_norm" in text
    assert main(["explain", "--model", str(tmp_path), "--quantize", "int4"]) == 0
    assert "int4_linear" in capsys.readouterr().out
    for wrong in (
        ["explain", "--model", str(tmp_path / "none")],
        ["explain"],
        ["explain", "gelu", "--quantize", "int8"],
    ):
        with pytest.raises(SystemExit):
            main(wrong)
