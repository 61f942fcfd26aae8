"""`ridgeline lm train`: it learns, repeats itself, resumes bitwise, and refuses what it cannot do in one sentence."""

from __future__ import annotations

import argparse
import json
import math
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import cli
from ridgeline.lm import curves, distillation, folder, train
from ridgeline.lm.snapshots import Snapshots
from ridgeline.lm.tokens import Sequences, in_order, read
from ridgeline.op import RidgelineError

SMALL = ["--layers=1", "--width=16", "--hidden=32", "--heads=1", "--context=16", "--batch=4", "--sample=0"]
SMALL += ["--device=cpu"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


def options(text: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.arguments(parser)
    out = () if "--out" in more else ("--out", str(text.parent / "run"))
    return parser.parse_args([str(text), *SMALL, *out, *more])


def ran(text: Path, *more: str) -> train.Run:
    """Returns a run after its last step, or after Ctrl-C."""
    given = options(text, *more)
    run, snapshots = train.Run(given), Snapshots(given.out)
    if given.resume:
        run.restore(snapshots.newest(), snapshots.files()[-1])
    train.train(run, snapshots)
    return run


def command(text: Path, *more: str) -> int:
    out = () if "--out" in more else ("--out", str(text.parent / "run"))
    return cli.main(["lm", "train", str(text), *SMALL, *out, *more])


def test_it_learns_and_repeats_itself(text: Path) -> None:
    one = ran(text, "--steps", "40", "--rate", "0.01")
    assert one.losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert one.losses[-1] < 2.7
    assert one.validations[-1][1] < one.validations[0][1] - 2
    assert [step for step, _ in one.validations] == list(range(0, 41, 4))
    assert ran(text, "--steps", "40", "--rate", "0.01", "--out", str(text.parent / "b")).losses == one.losses


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_resumes_bitwise_after_an_interruption(text: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    more = ["--steps", "9", "--accumulate", "2", "--validate", "2"]
    more += ["--autocast", "bfloat16"] if precision == "autocast" else ["--precision", precision]
    whole = ran(text, *more)
    plain, before = train.Run.advance, signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    out = ["--out", str(text.parent / "other")]

    def interrupted(self: train.Run) -> None:
        if self.step == 4:
            signal.raise_signal(signal.SIGINT)
        plain(self)

    monkeypatch.setattr(train.Run, "advance", interrupted)
    assert ran(text, *more, *out).step == 5
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(train.Run, "advance", plain)
    resumed = ran(text, *more, *out, "--resume")
    assert resumed.losses == whole.losses
    assert resumed.validations == whole.validations
    for one, two in zip(resumed.plain.parameters(), whole.plain.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_interruption_says_how_to_go_on(text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plain = train.Run.advance
    monkeypatch.setattr(train.Run, "advance", lambda self: (signal.raise_signal(signal.SIGINT), plain(self)))
    assert command(text, "--steps", "9") == 130
    assert "step 1 of 9" in (said := capsys.readouterr().out)
    assert "step-00000001.pt; the same command with --resume goes on" in said
    monkeypatch.setattr(train.Run, "advance", plain)
    assert command(text, "--steps", "9", "--resume", "--plot", str(text.parent / "a.svg")) == 0
    assert "step 9: loss" in capsys.readouterr().out
    assert len(ET.parse(text.parent / "a.svg").findall(".//{*}polyline")) == 2


def test_the_last_two_checkpoints_stay(text: Path) -> None:
    ran(text, "--steps", "8", "--save", "2")
    assert sorted(p.name for p in (text.parent / "run").iterdir()) == ["step-00000006.pt", "step-00000008.pt"]


def test_accumulation_is_a_larger_batch(text: Path) -> None:
    one = ran(text, "--steps", "4")
    two = ran(text, "--steps", "4", "--batch", "2", "--accumulate", "2", "--out", str(text.parent / "b"))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


def test_clipping_and_the_schedule_matter(text: Path) -> None:
    run = train.Run(options(text, "--steps", "4", "--clip", "1e-3", "--accumulate", "3"))
    seen: list[float] = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (seen.append(float(norm(run))), step())
    run.advance()
    assert seen[0] == pytest.approx(1e-3, rel=1e-4)
    given = options(text, "--steps", "20", "--warmup", "0.2", "--rate", "1", "--final-rate", "0.1")
    rates = [train.rate_at(n, given) for n in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def norm(run: train.Run) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in run.plain.parameters() if p.grad is not None]).norm()


@pytest.mark.parametrize("count", [17, 18, 33, 100, 161])
def test_each_pass_visits_the_text(count: int) -> None:
    tokens = torch.arange(count)
    sequences = Sequences(tokens, 16, seed=1)
    for number in range(3):
        x, y = sequences.take(number * sequences.passed, sequences.passed)
        assert torch.equal(x + 1, y)
        assert len(x.unique()) == sequences.passed * 16
    again = Sequences(tokens, 16, seed=1).take(2, 3)
    assert all(torch.equal(a, b) for a, b in zip(again, sequences.take(2, 3), strict=True))
    assert sum(len(x) for x, _ in in_order(tokens, 16, 2, 99)) == (count - 1) // 16


def test_a_student_nears_its_teacher(text: Path) -> None:
    pytest.importorskip("safetensors")
    teacher, given = text.parent / "teacher", ["--steps", "30", "--rate", "0.01"]
    assert command(text, *given, "--width", "32", "--out", str(text.parent / "t"), "--export", str(teacher)) == 0
    more = "--teacher", str(teacher), "--teacher-weight", "1", "--teacher-temperature", "2"
    run = train.Run(options(text, *given, *more))
    tokens = run.held_out[None, :16]

    def apart() -> float:
        with torch.no_grad():
            return float(distillation.divergence(run.plain(tokens), run.teacher(tokens), 1.0))

    before = apart()
    train.train(run, Snapshots(text.parent / "run"))
    assert apart() < before / 2
    assert run.losses[-1] < run.losses[0] / 2


def test_a_teacher_of_another_vocabulary(text: Path) -> None:
    pytest.importorskip("safetensors")
    teacher = text.parent / "teacher"
    assert command(text, "--steps", "1", "--vocabulary", "300", "--export", str(teacher)) == 0
    with pytest.raises(RidgelineError, match=r"vocabulary of 300.*256"):
        train.Run(options(text, "--teacher", str(teacher)))


def test_a_divergence_by_its_formula() -> None:
    student, teacher = torch.randn(2, 3, 7, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    wanted = (p * (p / q).log()).sum(-1).mean() * 9
    assert float(distillation.divergence(student, teacher, 3.0)) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("group", [1, 40, 1 << 20])
def test_a_student_s_loss_in_groups_is_that_of_all_rows(group: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(distillation, "GROUP", group)
    x, w, y, v = (
        torch.randn(*size, requires_grad=size in ((9, 6), (13, 6))) for size in ((9, 6), (13, 6), (9, 8), (13, 8))
    )
    target, share, temperature = torch.randint(13, (9,)), 0.3, 2.0
    z = x @ w.mT
    own = torch.nn.functional.cross_entropy(z, target)
    wanted = (1 - share) * own + share * distillation.divergence(z, y @ v.mT, temperature)
    grads = torch.autograd.grad(3 * wanted, (x, w))
    found = distillation.loss(x, w, y, v, target, share, temperature)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(3 * found, (x, w)), grads)


def test_prints_a_sample_and_json(text: Path, capsys: Any) -> None:
    assert (
        command(text, "--steps", "20", "--rate", "0.01", "--sample", "5", "--prompt", "the", "--temperature", "0") == 0
    )
    assert len(capsys.readouterr().out.split("\n\n")[-1].strip("\n").encode()) >= 8
    assert command(text, "--steps", "2", "--json", "--out", str(text.parent / "b")) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2


def test_a_tokenizer(text: Path, capsys: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["?", *sorted(set(text.read_text().split()))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = text.parent / "tokenizer.json"
    made.save(str(path))
    given = read(text, path)
    assert (len(given.tokens), given.vocabulary) == (360, len(words))
    assert command(text, "--steps", "2", "--tokenizer", str(path), "--sample", "3", "--prompt", "the quick") == 0
    assert "the quick" in capsys.readouterr().out
    text.write_bytes(b"abc \xff")
    with pytest.raises(RidgelineError, match="not UTF-8 at byte 4"):
        read(text, path)
    path.write_text("{}")
    with pytest.raises(RidgelineError, match="no file of the package tokenizers"):
        read(text, path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--size", "huge"], "no size 'huge'"),
        (["--context", "4000"], "1,800 tokens, and a context of 4000"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rate", "nan"], "--rate must be"),
        (["--held-out", "1"], "--held-out must be between 0 and 0.9"),
        (["--vocabulary", "100"], "--vocabulary must be at least"),
        (["--precision", "float16"], "float16 needs"),
        (["--autocast", "bfloat16", "--precision", "bfloat16"], "--precision out"),
        (["--resume"], "no checkpoint to resume"),
        (["--plot", "/nowhere/a.svg"], "does not exist"),
        (["--teacher", "/nowhere"], "no model's folder"),
    ],
)
def test_bad_options(text: Path, more: list[str], words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command(text, *more)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (text.parent / "run").exists()


def test_bad_text(tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match="cannot be read: No such file"):
        read(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(RidgelineError, match="is empty"):
        read(tmp_path / "empty")


def test_checkpoints_that_cannot_be_used(text: Path, capsys: Any) -> None:
    ran(text, "--steps", "4", "--save", "2")
    with pytest.raises(SystemExit):
        command(text, "--steps", "4")
    assert "already holds checkpoints" in capsys.readouterr().err
    for more, words in ((["--rate", "1"], "--rate 0.003"), (["--hidden", "64"], "the size's hidden 32")):
        with pytest.raises(RidgelineError, match=words):
            ran(text, "--steps", "4", *more, "--resume")
    newest = Snapshots(text.parent / "run").files()[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        RidgelineError, match=r"step-00000004\.pt is damaged \([^.]*\); remove it to resume from step-00000002\.pt"
    ):
        ran(text, "--steps", "4", "--resume")
    torch.save({"identity": {}}, newest)
    with pytest.raises(RidgelineError, match="no checkpoint of `ridgeline lm train`"):
        ran(text, "--steps", "4", "--resume")


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    snapshots = Snapshots(tmp_path / "run")
    snapshots.save(1, {"x": torch.ones(1)})
    with pytest.raises(RidgelineError, match="cannot be written"):
        snapshots.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_loss_that_is_not_finite(text: Path) -> None:
    run = train.Run(options(text))
    with torch.no_grad():
        run.plain.model.norm.weight.fill_(math.nan)
    run.advance()
    with pytest.raises(RidgelineError, match="loss of step 1 is nan; lower --rate"):
        run.flush()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RidgelineError, match="--export needs the package nothing_like_it.*pip install"):
        folder.package("nothing_like_it.torch", "--export")


def test_curves() -> None:
    points = [(float(n), 5 - n / 10) for n in range(20)]
    drawn = curves.text({"a": points, "b": [(0, math.nan), (10, 4.5)]}).splitlines()
    assert drawn[0].strip() == "5.000 |*"
    assert "* a, o b" in drawn[-1]
    ET.fromstring(curves.svg("<loss>", {"a": points, "one": [(1, 1)]}, "step", "loss"))
    ET.fromstring(curves.stacked("x", [0, 1, 2], {"a": [1, 2, 3], "b": [0, 1, 0]}, "event", "memory", "MiB"))
    ET.fromstring(curves.svg("flat", {"a": [(1, 2), (2, 2)]}, "x", "y"))
