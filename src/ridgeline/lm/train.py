"""Trains a language model on a text file: schedule, clipping, checkpoints that resume bitwise, distillation."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import ridgeline.optim
from ridgeline.lm import curves, distillation, folder
from ridgeline.lm.model import Transformer, called, load
from ridgeline.lm.setup import PRECISIONS, chosen_device, flags, made, shape
from ridgeline.lm.sizes import described
from ridgeline.lm.snapshots import Snapshots
from ridgeline.lm.tokens import Sequences, Text, in_order, read, split
from ridgeline.op import RidgelineError

# Options that a run must share with the run that it goes on with, besides the model's shape and the text.
FIXED = ("steps", "context", "batch", "accumulate", "rate", "final_rate", "warmup", "decay", "clip", "seed", "held_out",
         "precision", "autocast", "impl", "teacher_weight", "teacher_temperature")  # fmt: skip
VALIDATED = 16  # batches held out that one validation reads at most


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the text")
    flags(parser, context=128, batch=8, mode=None)
    parser.set_defaults(size="tiny")
    add = parser.add_argument
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json of the package tokenizers (else: bytes)")
    add("--steps", type=int, default=200, metavar="N", help="steps of the optimizer (200)")
    add("--accumulate", type=int, default=1, metavar="N", help="batches whose gradients a step adds up (1)")
    add("--rate", type=float, default=3e-3, metavar="X", help="the highest learning rate (0.003)")
    add("--final-rate", type=float, default=0.1, metavar="X", help="the last rate's share of the highest (0.1)")
    add("--warmup", type=float, default=0.1, metavar="X", help="share of the steps in which the rate rises (0.1)")
    add("--decay", type=float, default=0.1, metavar="X", help="weight decay of matrices (0.1)")
    add("--clip", type=float, default=1.0, metavar="X", help="the largest norm of all gradients; 0: any (1)")
    add("--held-out", type=float, default=0.1, metavar="X", help="share of the text for validation, its end (0.1)")
    add("--validate", type=int, metavar="STEPS", help="steps between validations (a tenth of all)")
    add("--out", type=Path, metavar="FOLDER", help="for checkpoints (the text's name and the size)")
    add("--save", type=int, metavar="STEPS", help="steps between checkpoints (a quarter of all); the last two stay")
    add("--resume", action="store_true", help="go on from the newest checkpoint, as if there had been no break")
    add("--export", type=Path, metavar="FOLDER", help="write the model in Hugging Face's layout at the end")
    add("--teacher", type=Path, metavar="FOLDER", help="learn from this model's logits too; Hugging Face's layout")
    add("--teacher-weight", type=float, default=0.5, metavar="X", help="share of the teacher in the loss (0.5)")
    add("--teacher-temperature", type=float, default=1.0, metavar="X", help="of both sides' logits (1)")
    add("--sample", type=int, default=200, metavar="N", help="tokens to write at the end (200)")
    add("--prompt", default="\n", metavar="TEXT", help="what the sample goes on with (a new line)")
    add("--temperature", type=float, default=0.8, metavar="X", help="of the sample; 0: the likeliest (0.8)")
    add("--plot", type=Path, metavar="FILE.svg", help="write the loss curves as a picture")


def check(options: argparse.Namespace) -> None:
    """Raises RidgelineError on a number out of its range, or on options that do not go together."""
    for name, least in (("steps", 1), ("accumulate", 1), ("sample", 0), ("validate", 1), ("save", 1), ("context", 1),
                        ("batch", 1)):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value < least:
            raise RidgelineError(f"lm: --{name} must be at least {least}, but is {value}")
    for name in ("final_rate", "warmup", "held_out", "teacher_weight"):
        if not 0 <= getattr(options, name) <= (0.9 if name == "held_out" else 1):
            most = "0.9" if name == "held_out" else "1"
            raise RidgelineError(f"lm: --{name.replace('_', '-')} must be between 0 and {most}")
    for name in ("rate", "decay", "clip", "temperature", "teacher_temperature"):
        value = getattr(options, name)
        if not (math.isfinite(value) and (value > 0 if name in ("rate", "teacher_temperature") else value >= 0)):
            raise RidgelineError(f"lm: --{name.replace('_', '-')} must be positive and finite, but is {value}")
    if "float16" in (options.precision, options.autocast):
        raise RidgelineError("lm: float16 needs its loss scaled; train in float32 or bfloat16")
    if options.export:
        folder.package("safetensors.torch", "--export")
    if options.plot and not options.plot.parent.is_dir():
        raise RidgelineError(f"lm: --plot {options.plot} is in a folder that does not exist")
    if options.remake and options.compile:
        raise RidgelineError("lm: torch.compile itself chooses what backward recomputes: leave --remake out")
    if options.autocast and options.precision != "float32":
        raise RidgelineError("lm: --autocast computes in half precision over float32 weights: leave --precision out")


def rate_at(step: int, options: argparse.Namespace) -> float:
    """Returns a step's learning rate: it rises in a line, then falls along half a cosine."""
    rise = round(options.warmup * options.steps)
    if step < rise:
        return options.rate * (step + 1) / rise
    along = (step - rise) / max(1, options.steps - 1 - rise)
    low = options.rate * options.final_rate
    return low + (options.rate - low) * (1 + math.cos(math.pi * along)) / 2


class Run:
    """A model in training: its optimizer, its text and how far it is."""

    def __init__(self, options: argparse.Namespace) -> None:
        check(options)
        self.options, self.device = options, chosen_device(options)
        self.text: Text = read(options.file, options.tokenizer)
        options.vocabulary = options.vocabulary or self.text.vocabulary
        if options.vocabulary < self.text.vocabulary:
            least = self.text.vocabulary
            raise RidgelineError(f"lm: --vocabulary must be at least the text's {least}, but is {options.vocabulary}")
        size = shape(options)
        training, self.held_out = split(self.text, options.held_out, options.context, options.file)
        self.sequences = Sequences(training, options.context, options.seed)
        torch.manual_seed(options.seed)
        dtype = PRECISIONS[options.precision]
        with torch.device(self.device):
            self.plain = made(size, options).to(dtype)
        self.model: Callable[..., torch.Tensor] = torch.compile(self.plain) if options.compile else self.plain
        self.hidden = torch.compile(self.plain.hidden) if options.compile else self.plain.hidden
        matrices = [p for p in self.plain.parameters() if p.dim() > 1]
        groups = [
            {"params": matrices, "weight_decay": options.decay},
            {"params": [p for p in self.plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        wide: dict[str, Any] = {"master_weights": True, "moment_dtype": torch.float32}
        if options.impl == "ridgeline":
            self.optimizer: Any = ridgeline.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), **wide)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))
        self.teacher = self._teacher()
        self.step = 0
        self.losses: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self.pending: list[torch.Tensor] = []  # losses still on the device, since reading one waits for it

    def _teacher(self) -> Transformer | None:
        options = self.options
        if options.teacher is None:
            return None
        teacher = load(options.teacher, options.impl, self.device).eval().requires_grad_(False)
        if teacher.size.vocabulary != self.plain.size.vocabulary:
            raise RidgelineError(
                f"lm: the teacher has a vocabulary of {teacher.size.vocabulary}, and the student one of "
                f"{self.plain.size.vocabulary}; distillation needs one and the same"
            )
        return teacher

    def context(self) -> AbstractContextManager[Any]:
        cast = self.options.autocast
        return torch.autocast(self.device.type, PRECISIONS[cast]) if cast else nullcontext()

    def loss(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of a batch: cross-entropy, or its mixture with the divergence from the teacher."""
        with self.context():
            if self.teacher is None:
                return self.model(tokens, target)
            with torch.no_grad():
                y = self.teacher.hidden(tokens).flatten(0, 1)
            x = self.hidden(tokens).flatten(0, 1)
            heads = self.plain.lm_head.weight, self.teacher.lm_head.weight
            mixed = self.options.teacher_weight, self.options.teacher_temperature
            return distillation.loss(x, heads[0], y, heads[1], target.flatten(), *mixed)

    def advance(self) -> None:
        """Takes one step of the optimizer."""
        options, total = self.options, torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step, options)
        for part in range(options.accumulate):
            position = (self.step * options.accumulate + part) * options.batch
            tokens, target = (t.to(self.device) for t in self.sequences.take(position, options.batch))
            loss = self.loss(tokens, target) / options.accumulate
            loss.backward()
            total += loss.detach()
        if options.clip:
            called("clip_grad_norm", options.impl)(list(self.plain.parameters()), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.pending.append(total)

    def flush(self) -> None:
        """Reads the losses that are still on the device. Raises RidgelineError if one is not finite."""
        if self.pending:
            self.losses += torch.stack(self.pending).tolist()
            self.pending.clear()
        wrong = [n for n, loss in enumerate(self.losses) if not math.isfinite(loss)]
        if wrong:
            raise RidgelineError(f"lm: the loss of step {wrong[0] + 1} is {self.losses[wrong[0]]}; lower --rate")

    @torch.no_grad()
    def validate(self) -> None:
        """Adds the mean cross-entropy of the first tokens held out."""
        if not len(self.held_out):
            return
        self.plain.eval()
        total, count = torch.zeros((), device=self.device), 0
        for tokens, target in in_order(self.held_out, self.options.context, self.options.batch, VALIDATED):
            with self.context():
                total += self.model(tokens.to(self.device), target.to(self.device)) * len(tokens)
            count += len(tokens)
        self.plain.train()
        self.validations.append((self.step, total.item() / count))

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must share with the run that goes on with it."""
        kept = {name: getattr(self.options, name) for name in FIXED}
        kept["teacher"] = str(self.options.teacher) if self.options.teacher else None
        kept["text"] = hashlib.sha256(self.text.tokens.numpy().tobytes()).hexdigest()
        return kept | {f"size's {name}": value for name, value in described(self.plain.size).items()}

    def state(self) -> dict[str, Any]:
        """Returns everything that the rest of the run depends on."""
        self.flush()
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "identity": self.identity(), "step": self.step, "model": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(), "random": random, "losses": self.losses,
            "validations": self.validations,
        }  # fmt: skip

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Goes back to a state. Raises RidgelineError if it is of another run."""
        try:
            for name, value in self.identity().items():
                if state["identity"][name] != value:
                    flag = f"--{name.replace('_', '-')}" if name in FIXED else f"the {name}"
                    shown = "another" if name == "text" else repr(state["identity"][name])
                    raise RidgelineError(f"lm: {path} was made with {flag} {shown}, and this run has {value!r}")
            self.plain.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.losses = state["step"], list(state["losses"])
            self.validations = [(step, loss) for step, loss in state["validations"]]
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        except (KeyError, TypeError) as error:
            raise RidgelineError(f"lm: {path} is no checkpoint of `ridgeline lm train`") from error

    @torch.no_grad()
    def sample(self, count: int, prompt: str, temperature: float) -> str:
        """Returns the prompt and `count` tokens more, drawn from the model."""
        dice = torch.Generator().manual_seed(self.options.seed)
        tokens = self.text.encode(prompt) or [0]
        self.plain.eval()
        for _ in range(count):
            seen = torch.tensor([tokens[-self.options.context :]], device=self.device)
            with self.context():
                logits = self.plain(seen)[0, -1, : self.text.vocabulary].float().cpu()
            if temperature:
                tokens.append(int((logits / temperature).softmax(-1).multinomial(1, generator=dice)))
            else:
                tokens.append(int(logits.argmax()))
        self.plain.train()
        return self.text.decode(tokens)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Gives a list that the first Ctrl-C adds to, in place of the exception; the second raises it."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, where no Ctrl-C arrives
        yield seen
        return
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr if that is a terminal: a function of the steps done and a text."""
    bars = folder.package("rich.progress", "the progress bar")
    console = folder.package("rich.console", "the progress bar").Console(stderr=True)
    columns = [bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn()]
    columns.append(bars.TextColumn("{task.description}", markup=False))
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def train(run: Run, snapshots: Snapshots) -> Path | None:
    """Trains to the end. Returns None or, if Ctrl-C stops it, the checkpoint that it leaves."""
    options = run.options
    validate = options.validate or max(1, options.steps // 10)
    save = options.save or max(1, options.steps // 4)
    last = time.monotonic()
    try:
        with interruptible() as stop, progress(options.steps) as show:
            if not run.step:
                run.validate()
            while run.step < options.steps:
                run.advance()
                done = run.step == options.steps
                if run.step % validate == 0 or done:
                    run.validate()
                if stop or run.step % save == 0 or done:
                    path = snapshots.save(run.step, run.state())
                    if stop and not done:
                        return path
                if done or time.monotonic() - last > 0.25:
                    run.flush()
                    held = f", held out {run.validations[-1][1]:.3f}" if run.validations else ""
                    show(run.step, f"loss {run.losses[-1]:.3f}{held}")
                    last = time.monotonic()
        return None
    finally:
        snapshots.wait()


def curves_of(run: Run) -> dict[str, curves.Points]:
    found: dict[str, curves.Points] = {"training": [(n + 1.0, y) for n, y in enumerate(run.losses)]}
    if run.validations:
        found["held out"] = [(float(n), y) for n, y in run.validations]
    return found


def main(options: argparse.Namespace) -> int:
    """Trains, and prints the curve and a sample."""
    run = Run(options)
    snapshots = Snapshots(options.out or Path(f"{options.file.stem}-{options.size}"))
    if options.resume:
        run.restore(snapshots.newest(), snapshots.files()[-1])
    elif snapshots.files():
        raise RidgelineError(
            f"lm: {snapshots.folder} already holds checkpoints; give --resume to go on, or another folder by --out"
        )

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    size, before = run.plain.size, run.step
    say(f"{options.size}: {size.parameters / 1e6:.2f} M parameters on {run.device.type}; "
        f"{len(run.sequences.tokens):,} tokens to train, {len(run.held_out):,} held out")  # fmt: skip
    start = time.perf_counter()
    stopped = train(run, snapshots)
    seconds = time.perf_counter() - start
    if stopped is not None:
        say(f"stopped after step {run.step} of {options.steps}, saved in {stopped}; "
            "the same command with --resume goes on from there")  # fmt: skip
        return 130
    rate = (run.step - before) * options.batch * options.accumulate * options.context / seconds
    if options.export:
        folder.write(run.plain, options.export)
    if options.plot:
        options.plot.write_text(curves.svg(f"{options.file.name}, {options.size}", curves_of(run), "step", "loss"))
    if options.json:
        print(json.dumps({"losses": run.losses, "held_out": run.validations, "tokens_per_second": rate}))
        return 0
    say(curves.text(curves_of(run)))
    held = f", held out {run.validations[-1][1]:.4f}" if run.validations else ""
    say(f"step {run.step}: loss {run.losses[-1]:.4f}{held}; {rate:,.0f} tokens/s; checkpoints in {snapshots.folder}")
    if options.sample:
        say(f"\n{run.sample(options.sample, options.prompt, options.temperature)}")
    return 0
