"""Generation: the loop against the plain model, batches that change, blocks that run out, the exact rule, the verb."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import cli
from ridgeline.lm import folder, lab
from ridgeline.lm.blocks import Blocks
from ridgeline.lm.decoder import Decoder, quantize
from ridgeline.lm.generate import Stream
from ridgeline.lm.loop import Limits, Loop, Row
from ridgeline.lm.model import Transformer
from ridgeline.lm.sizes import Size
from ridgeline.lm.speculation import Sampling, accept, distribution
from ridgeline.op import RidgelineError
from ridgeline.ops.decode.sample import sample

SIZE = Size(2, 48, 80, 4, 2, 16, vocabulary=61, theta=500.0)
QWEN = Size(2, 48, 80, 4, 2, 16, vocabulary=61, theta=1e4, eps=1e-6, qk_norm=True, tied=True)
SMALL = Size(1, 32, 48, 2, 1, 16, vocabulary=61)
PROMPTS = [[3, 9, 27], [5], [1, 2, 3, 4, 5, 6, 7] * 6, [60, 0, 33, 8] * 3, [17, 17, 2, 40, 41]]


def made(size: Size = SIZE, seed: int = 3) -> Transformer:
    """A model with random weights, larger than at the start of training, so that its choices are clear."""
    torch.manual_seed(seed)
    model = Transformer(size)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model.eval().requires_grad_(False)


def loop(
    model: Transformer, draft: Transformer | None = None, how: Sampling | None = None, blocks: int = 64,
    stops: frozenset[int] = frozenset(), **limits: Any,
) -> Loop:  # fmt: skip
    given = Limits(**{"batch": 3, "chunk": 8, "ahead": 3} | limits)
    two = [None if m is None else Decoder(m, blocks, 16, 160, given.invariant) for m in (model, draft)]
    assert two[0] is not None
    return Loop(two[0], two[1], Blocks(blocks, 16), how or Sampling(), given, stops)


def run(this: Loop, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    rows = [this.add(p, count + 3 * n) for n, p in enumerate(prompts)]
    got: dict[Row, list[int]] = {row: [] for row in rows}
    for row, tokens in this.run():
        got[row] += tokens
    assert this.blocks.free == this.blocks.count
    assert all(row.tokens == p + got[row] for row, p in zip(rows, prompts, strict=True))
    return list(got.values())


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def plain() -> dict[Size, list[list[int]]]:
    return {s: [greedy(made(s), p, 12 + 3 * n) for n, p in enumerate(PROMPTS)] for s in (SIZE, QWEN)}


@pytest.mark.parametrize("size", [SIZE, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_members_come_and_go(size: Size, batch: int, plain: dict[Size, list[list[int]]]) -> None:
    this = loop(made(size), batch=batch)
    assert run(this, PROMPTS) == plain[size]
    assert set(this.graphs) <= {1, 2, 4, batch}


@pytest.mark.kernels
@pytest.mark.parametrize("draft", [None, SMALL], ids=["plain", "draft"])
def test_kernels_give_the_same_tokens(draft: Size | None, device: str) -> None:
    """In Triton's interpreter, and on a GPU with a CUDA graph for each number of rows."""
    model = made(replace(SIZE, layers=1))
    wanted = [greedy(model, p, 2 + 3 * n) for n, p in enumerate(PROMPTS[:2])]
    this = loop(model.to(device), made(draft).to(device) if draft else None, blocks=4, ahead=1)
    assert run(this, PROMPTS[:2], 2) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, 40, 0.9)], ids=["greedy", "drawn"])
def test_invariant_in_graphs_of_bfloat16(how: Sampling, draft: bool) -> None:
    size = Size(2, 512, 1024, 8, 2, 64, vocabulary=1000)
    model, other = (made(s).to("cuda", torch.bfloat16) for s in (size, replace(size, layers=1)))
    prompts = [[7 * n + m for m in range(3 + 40 * n)] for n in range(4)]

    def one(chosen: int | None = None) -> list[list[int]]:
        this = loop(model, other if draft else None, how, batch=4, chunk=64, invariant=True)
        this.added = chosen or 0
        return run(this, prompts if chosen is None else [prompts[chosen]], 20 if chosen is None else 20 + 3 * chosen)

    together = one()
    assert [one(n)[0] for n in range(4)] == together


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_of_a_prompt(chunk: int, plain: dict[Size, list[list[int]]]) -> None:
    assert run(loop(made(), chunk=chunk), PROMPTS) == plain[SIZE]


@pytest.mark.parametrize("blocks", [5, 6, 9])
def test_out_of_blocks_a_sequence_waits(blocks: int, plain: dict[Size, list[list[int]]]) -> None:
    this = loop(made(), blocks=blocks, batch=5)
    assert run(this, PROMPTS) == plain[SIZE]
    assert this.tally.waits or this.joins > 5 or blocks > 6


def test_more_than_all_blocks_is_refused() -> None:
    with pytest.raises(RidgelineError, match="sequence 0 of up to 100 tokens needs 7 blocks of 16, and there are 6"):
        loop(made(), blocks=6).add([1] * 50, 50)
    with pytest.raises(RidgelineError, match="sequence 0 of up to 161 tokens is longer than the decoder's longest"):
        loop(made()).add([1] * 100, 61)
    with pytest.raises(RidgelineError, match="has the token 61, which the model does not know"):
        loop(made()).add([1, 61], 2)
    with pytest.raises(RidgelineError, match="must have at least one token"):
        loop(made()).add([], 2)


def test_blocks() -> None:
    blocks, held, other = Blocks(4, 16), list[int](), list[int]()
    assert blocks.extend(held, 33)
    assert (len(set(held)), blocks.free) == (3, 1)
    assert not blocks.extend(other, 17)
    assert not other
    assert blocks.extend(other, 16)
    blocks.release(held)
    assert (held, blocks.free) == ([], 3)
    for wrong in ((4, 24), (0, 16)):
        with pytest.raises(RidgelineError, match="block"):
            Blocks(*wrong)


def test_stops_end_a_sequence(plain: dict[Size, list[list[int]]]) -> None:
    stops = frozenset({plain[SIZE][0][4]})
    wanted = [
        [*t[: next(n for n, x in enumerate(t) if x in stops)], *stops] if stops & {*t} else t for t in plain[SIZE]
    ]
    for draft in (None, made(SMALL)):
        assert run(loop(made(), draft, stops=stops), PROMPTS) == wanted


@pytest.mark.parametrize(("draft", "blocks", "ahead"), [("small", 64, 1), ("small", 6, 3), ("same", 64, 4)])
def test_greedy_speculation_is_plain_greedy(
    draft: str, blocks: int, ahead: int, plain: dict[Size, list[list[int]]]
) -> None:
    other = made() if draft == "same" else made(SMALL, 5)
    this = loop(made(), other, blocks=blocks, ahead=ahead)
    assert run(this, PROMPTS) == plain[SIZE]
    tally = this.tally
    assert tally.drafted
    assert (tally.accepted == tally.drafted) == (draft == "same")


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, top_p=0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft", [None, SMALL], ids=["plain", "draft"])
def test_invariant_gives_what_a_sequence_gets_alone(how: Sampling, draft: Size | None) -> None:
    def one(prompts: list[list[int]], chosen: int | None = None, **limits: Any) -> list[list[int]]:
        this = loop(made(), made(draft) if draft else None, how, invariant=True, **limits)
        if chosen is not None:
            this.added = chosen  # its draws depend on its number
            return run(this, [prompts[chosen]], 12 + 3 * chosen)
        return run(this, prompts)

    together = one(PROMPTS)
    assert one(PROMPTS, blocks=9) == together
    for n in (0, 3) if draft is None else (3,):
        assert one(PROMPTS, n) == [together[n]]


def test_sequences_may_come_while_others_run(plain: dict[Size, list[list[int]]]) -> None:
    this = loop(made(), batch=2)
    rows = [this.add(p, 12 + 3 * n) for n, p in enumerate(PROMPTS[:2])]
    for row, _ in this.run():
        if len(rows) < 5 and row.number == len(rows) - 2:
            rows.append(this.add(PROMPTS[len(rows)], 12 + 3 * len(rows)))
    assert [row.tokens[len(p) :] for row, p in zip(rows, PROMPTS, strict=True)] == plain[SIZE]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_few_bits(kind: str) -> None:
    model = made(Size(2, 64, 96, 4, 2, 16, vocabulary=61))
    before = Decoder(model, 1, 16, 16).weight_bytes
    quantize(model, kind)
    assert Decoder(model, 1, 16, 16).weight_bytes < before
    together = run(loop(model, batch=5), PROMPTS)
    assert [len(t) for t in together] == [12 + 3 * n for n in range(5)]
    if kind != "fp8":  # its rounding of the input depends on no other row, but its product may
        assert together == run(loop(model, batch=1), PROMPTS)
    with pytest.raises(RidgelineError, match="weights are quantised already"):
        quantize(model, "int8")
    with pytest.raises(RidgelineError, match=r"--quantize int4 does not take layers.0.self_attn.q_proj: no group"):
        quantize(made(Size(1, 40, 80, 2, 1, 16)), "int4")


FILTERS = [Sampling(), Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, None, 0.6), Sampling(0.9, 9, 0.8, 0.1)]


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_distribution_is_what_sample_draws_from(how: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 20) * 2
    p = distribution(logits, how)
    torch.testing.assert_close(p.sum(-1), torch.ones(1))
    many = sample(logits.expand(4000, -1), seed=7, **how._asdict())
    assert chi_squared(torch.bincount(many, minlength=20).tolist(), p[0]) < 4  # type: ignore[arg-type]
    for token, logprob in zip(
        *sample(logits.expand(50, -1), seed=8, return_logprobs=True, **how._asdict()), strict=True
    ):
        assert float(logprob) == pytest.approx(math.log(float(p[0, token])), abs=1e-5)


def chi_squared(counts: list[int], p: torch.Tensor) -> float:
    """How many standard deviations the statistic is above its mean; outcomes expected under 5 times count as one."""
    expected = (p.double() * sum(counts)).tolist()
    assert all(e or not c for e, c in zip(expected, counts, strict=True))
    cells = [(c, e) for c, e in zip(counts, expected, strict=True) if e >= 5]
    rest = [(c, e) for c, e in zip(counts, expected, strict=True) if 0 < e < 5]
    if rest:
        cells.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    freedom = len(cells) - 1
    statistic = sum((c - e) ** 2 / e for c, e in cells if e)
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else statistic


def test_accept_draws_from_the_target() -> None:
    torch.manual_seed(1)
    rows, n, V = 60_000, 2, 5
    p, q = (torch.randn(k, V).mul(1.5).softmax(-1).expand(rows, -1, -1) for k in (n + 1, n))
    drafted = torch.stack([q[:, i].multinomial(1)[:, 0] for i in range(n)], 1)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        return logits.exp().multinomial(1)[:, 0]

    tokens, counts = accept(p, q, drafted, torch.rand(rows, n), draw)
    for place in range(n + 1):
        there = tokens[counts > place, place]
        assert chi_squared(torch.bincount(there, minlength=V).tolist(), p[0, place]) < 4
    share = torch.minimum(p[0, 0], q[0, 0]).sum()
    assert float((counts > 1).float().mean()) == pytest.approx(float(share), abs=0.01)


@pytest.mark.parametrize("how", [Sampling(1.0), Sampling(0.8, top_k=6, top_p=0.9)], ids=["plain", "filtered"])
def test_speculation_draws_as_plain_sampling_does(how: Sampling) -> None:
    """Three tokens after a prompt, drawn 3,000 times: their joint distribution is the target's own."""
    tiny = Size(1, 16, 24, 1, 1, 16, vocabulary=7)
    target, other, runs = made(tiny, 3), made(tiny, 9), 3000
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*s, t): share * float(w)
            for s, share in expected.items()
            for t, w in enumerate(distribution(target(torch.tensor([[2, *s]]))[0, -1:], how)[0])
        }
    for draft in (None, other):
        this = loop(target, draft, how, blocks=600, batch=500, ahead=2, seed=11)
        rows = [this.add([2], 3) for _ in range(runs)]
        for _ in this.run():
            pass
        found = Counter(tuple(row.tokens[1:]) for row in rows)
        keys = list(expected)
        assert chi_squared([found[k] for k in keys], torch.tensor([expected[k] for k in keys])) < 4
        assert set(found) <= set(keys)
        if draft:
            assert 0 < this.tally.accepted < this.tally.drafted


def test_vocabularies_must_agree() -> None:
    with pytest.raises(RidgelineError, match="the draft has a vocabulary of 7, and the model one of 61"):
        loop(made(), made(Size(1, 16, 24, 1, 1, 16, vocabulary=7)))
    with pytest.raises(RidgelineError, match="proposes 1 to 15 tokens ahead, but is asked for 16"):
        loop(made(), made(SMALL), ahead=16)


def test_nan_is_an_error() -> None:
    model = made()
    model.lm_head.weight[5] = float("nan")
    for draft in (None, made(SMALL)):
        with pytest.raises(RidgelineError, match="the logits of sequence 0 are NaN"):
            run(loop(model, draft), [[1, 2]])


def test_streams_hold_back_half_a_character() -> None:
    text = "aé€ 😀!"
    stream = Stream(lambda t: bytes(t).decode(errors="replace"))
    pieces = [stream.push([b]) for b in text.encode()]
    assert "".join(pieces) == text
    assert pieces[:3] == ["a", "", "é"]
    assert Stream(lambda t: bytes(t).decode(errors="replace")).push([195], last=True) == "\ufffd"


# --- the verb


def called(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["lm", "generate", *words, "--device", "cpu"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("Hello\n\nand good bye to you\n")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    folder.write(made(Size(1, 32, 64, 2, 1, 16, vocabulary=256)), path)
    return path


def test_the_verb(capsys: pytest.CaptureFixture[str], text: Path, model: Path, tmp_path: Path) -> None:
    words = str(model), "--prompt", str(text), "--tokens", "9"
    found = json.loads(called(capsys, *words, "--json"))
    whole = folder.read(model)
    own = made(whole[0])
    assert [s["tokens"] for s in found["sequences"]] == [
        greedy(own, list(s), 9) for s in (b"Hello", b"and good bye to you")
    ]
    assert found["tokens_per_second"] > 0
    assert found["floor_tokens_per_second"] > found["tokens_per_second"]
    assert found["read_rate_is"] == "measured"
    record = tmp_path / "rows.jsonl"
    drafted = called(capsys, *words, "--draft", str(model), "--ahead", "2", "--invariant", "--record", str(record))
    assert "[0] " in drafted
    assert "[1] " in drafted
    assert "proposed tokens accepted" in drafted
    assert json.loads(record.read_text())["tokens"] > 0
    alone = called(
        capsys, *words, "--whole", "--quantize", "int8", "--temperature", "1", "--top-k", "9", "--repeat", "1"
    )
    assert "floor: weights and cache read at" in alone
    assert len(json.loads(called(capsys, *words, "--repeat", "3", "--json"))["sequences"]) == 6


def test_one_sequence_streams(capsys: pytest.CaptureFixture[str], text: Path, model: Path) -> None:
    words = str(model), "--prompt", str(text), "--whole", "--tokens", "12"
    wanted = json.loads(called(capsys, *words, "--json"))["sequences"][0]["text"]
    assert called(capsys, *words).startswith(wanted)
    parts = called(capsys, *words[:3], "--tokens", "12", "--stream").splitlines()
    assert {part[:4] for part in parts[:4]} == {"[0] ", "[1] "}


def test_the_read_roof_is_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rate, source = lab.read_rate(torch.device("cuda"))
    assert source == "recorded"
    assert 4e12 < rate < 5e12


def test_checkpoints_of_training(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat. " * 60)
    out, small = (
        tmp_path / "run",
        ["--width", "32", "--hidden", "48", "--heads", "2", "--layers", "1", "--context", "32"],
    )
    train = ["lm", "train", str(book), "--steps", "3", "--out", str(out), "--device", "cpu", "--sample", "0", *small]
    assert cli.main([*train, "--export", str(tmp_path / "export")]) == 0
    capsys.readouterr()
    made = [
        json.loads(called(capsys, str(f), "--prompt", str(text), "--tokens", "5", "--json"))
        for f in (out, tmp_path / "export")
    ]
    assert made[0]["sequences"] == made[1]["sequences"]


def test_folders_of_few_bits(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from ridgeline import formats, quantize_int4

    whole, state = made(Size(1, 64, 96, 2, 1, 32, vocabulary=256)), {}
    for name, weight in list(whole.state_dict().items()):
        if "layers" not in name or weight.dim() == 1:
            state[name] = weight
            continue
        q, scale, zero = quantize_int4(weight, group=32)
        state |= {
            f"{name.removesuffix('weight')}{n}": t
            for n, t in zip(("qweight", "qzeros", "scales"), formats.pack_awq(q, scale, zero))
        }
    folder.write(whole, tmp_path / "model")
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model" / folder.WEIGHTS)
    path = tmp_path / "model" / folder.CONFIG
    told = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    path.write_text(json.dumps(told))
    words = str(tmp_path / "model"), "--prompt", str(text), "--tokens", "5", "--json"
    found = json.loads(called(capsys, *words))
    for module in list(whole.modules()):
        if isinstance(module, torch.nn.Linear) and module is not whole.lm_head:
            q, scale, zero = quantize_int4(module.weight, group=32)
            codes = formats.nibbles(q).float() - zero.float().repeat_interleave(32, 1)  # type: ignore[union-attr]
            module.weight.copy_(codes * scale.repeat_interleave(32, 1))
    assert [s["tokens"] for s in found["sequences"]] == [
        greedy(whole, list(s), 5) for s in (b"Hello", b"and good bye to you")
    ]
    del state["model.layers.0.mlp.up_proj.scales"]
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model" / folder.WEIGHTS)
    with pytest.raises(SystemExit):
        called(capsys, *words)
    assert "lacks the tensor model.layers.0.mlp.up_proj.scales" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["nowhere"],
            "nowhere is no folder with a config.json or with checkpoints of `ridgeline lm train`, and none of",
        ),
        (["MODEL", "--blocks", "1", "--block", "16"], "needs 2 blocks of 16, and there are 1"),
        (["MODEL", "--block", "20"], "a block must hold a multiple of 16 tokens, but holds 20"),
        (["MODEL", "--top-p", "2"], "--top-p must be from 0 to 1, but is 2.0"),
        (["MODEL", "--draft", "OTHER"], "the draft has a vocabulary of 300, and the model one of 256"),
        (["MODEL", "--draft", "MODEL", "--ahead", "16"], "a draft proposes 1 to 15 tokens ahead, but is asked for 16"),
        (["MODEL", "--prompt", "nothing.txt"], "--prompt nothing.txt cannot be read: No such file"),
    ],
)
def test_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], text: Path, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    folder.write(made(Size(1, 16, 24, 1, 1, 16, vocabulary=300)), other)
    given = [{"MODEL": str(model), "OTHER": str(other)}.get(w, w) for w in words]
    with pytest.raises(SystemExit) as error:
        called(capsys, "--prompt", str(text), "--tokens", "9", *given)
    assert error.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
