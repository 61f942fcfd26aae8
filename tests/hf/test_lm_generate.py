"""`ridgeline lm generate` on folders of transformers' models: greedy tokens are those of `generate`, one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build

from ridgeline import cli
from ridgeline.lm import loading
from ridgeline.lm.blocks import Blocks
from ridgeline.lm.decoder import Decoder
from ridgeline.lm.loop import Limits, Loop, Sampling

TEXTS = ["a", "good day to you", "one two three four five six seven eight nine ten"]
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama 3.1's positions": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Qwen3": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(kind.split()[0], vocab_size=300, **KINDS[kind]).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)  # clear choices, which rounding does not change
    model.save_pretrained(tmp_path)
    count, wanted = 20, []
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())])
        made = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
        wanted.append(made[0, ids.shape[1] :].tolist())
    assert len({tuple(t) for t in wanted}) == 3
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    words = ["lm", "generate", str(tmp_path), "--prompt", str(prompts), "--tokens", str(count), "--device", "cpu"]
    for more in ([], ["--batch", "2", "--chunk", "16", "--block", "16"], ["--draft", str(tmp_path), "--invariant"]):
        assert cli.main([*words, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [s["tokens"] for s in found["sequences"]] == wanted


def test_stops_are_the_folders(tmp_path: Path) -> None:
    model = build("Llama", vocab_size=300).eval()
    ids = torch.tensor([[7, 8, 9]])
    free = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()
    stop = free[6]
    model.generation_config.eos_token_id = stop
    model.save_pretrained(tmp_path)
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()
    own = loading.load(str(tmp_path), torch.device("cpu"))
    assert own.stops == {stop}
    loop = Loop(Decoder(own.model, 4, 16, 64), None, Blocks(4, 16), Sampling(), Limits(1), own.stops)
    row = loop.add([7, 8, 9], 12)
    for _ in loop.run():
        pass
    assert row.tokens == wanted


def test_the_folders_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "<unk>": 1, **{f"w{n}": n for n in range(2, 97)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model = build("Llama").eval()
    model.save_pretrained(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = torch.tensor([[0, 7, 30, 5]])
    wanted = model.generate(
        ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w7 w30 w5")
    command = ["lm", "generate", str(tmp_path), "--prompt", str(prompts), "--tokens", "8", "--device", "cpu"]
    assert cli.main([*command, "--ignore-stops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sequences"][0]
    assert found == {"tokens": wanted[0, 4:].tolist(), "text": made.decode(wanted[0, 4:].tolist())}
    assert cli.main([*command, "--ignore-stops"]) == 0
    assert capsys.readouterr().out.startswith(found["text"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        cli.main(command)
    assert (
        "has a vocabulary of 97, but its text has tokens up to 255; give its tokenizer.json" in capsys.readouterr().err
    )
