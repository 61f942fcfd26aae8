"""`ridgeline lm generate`: text from a model, by the loop of `loop.py`, with tokens a second beside their floor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.few_bits import KINDS
from ridgeline.lm import lab, loading
from ridgeline.lm.blocks import Blocks
from ridgeline.lm.decoder import Decoder, quantize
from ridgeline.lm.loop import Limits, Loop, Row, Sampling
from ridgeline.op import RidgelineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def arguments(parser: argparse.ArgumentParser) -> None:
    add, whole, positive = parser.add_argument, lab.whole, lab.positive
    add("model", metavar="MODEL_OR_FOLDER", help="a size's name (random weights), a folder of Hugging Face's (Llama or "
        "Qwen3; full weights, GPTQ or AWQ), or a folder of checkpoints of `lm train`")  # fmt: skip
    add("--prompt", type=Path, required=True, metavar="FILE", help="a prompt a line")
    add("--whole", action="store_true", help="the file is one prompt")
    add("--repeat", type=positive, default=1, metavar="N", help="take each prompt so often (1)")
    add("--tokens", type=positive, default=64, metavar="N", help="tokens to make for each (64)")
    add("--batch", type=positive, default=32, metavar="N", help="sequences that run at once, at most (32)")
    add("--quantize", choices=KINDS, help="replace the linear layers, but the last, by layers of few bits")
    add("--draft", metavar="MODEL_OR_FOLDER", help="a smaller model of the same vocabulary that proposes tokens")
    add("--ahead", type=positive, default=4, metavar="N", help="tokens that the draft proposes, 1 to 15 (4)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: the likeliest token (0)")
    add("--top-k", type=positive, metavar="N", help="draw from the N likeliest")
    add("--top-p", type=float, metavar="X", help="draw from the fewest with this mass")
    add("--min-p", type=float, metavar="X", help="draw from those with this share of the likeliest's probability")
    add("--seed", type=whole, default=0, metavar="N", help="of draws and of random weights (0)")
    add("--invariant", action="store_true", help="give each sequence the tokens that it gets alone")
    add("--ignore-stops", action="store_true", help="go on after a token that ends a text")
    add("--chunk", type=positive, default=512, metavar="N", help="tokens of a prompt at once (512)")
    add("--block", type=positive, default=64, metavar="N", help="tokens of a block of the cache (64)")
    add("--blocks", type=positive, metavar="N", help="blocks of the cache (enough for the batch, or what fits)")
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (the folder's; else: bytes)")
    add("--precision", choices=DTYPES, help="of weights and cache (a folder's own)")
    add("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    add("--stream", action="store_true", help="write text as it comes, also of several sequences")
    add("--record", type=Path, metavar="FILE", help="append the figures to a file of JSON lines")
    add("--json", action="store_true", help="print JSON")


class Stream:
    """A sequence's text as it comes: characters whose bytes are not all there yet wait."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode, self.tokens = decode, list[int]()
        self.start = self.read = 0  # tokens before start are of no more use; the text of those before read is written

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Returns the text that these tokens complete."""
        self.tokens += tokens
        before, now = (self.decode(self.tokens[self.start : end]) for end in (self.read, len(self.tokens)))
        if now.endswith("\ufffd") and not last:
            return ""
        self.start, self.read = self.read, len(self.tokens)
        return now[len(before) :]


def prompts(options: argparse.Namespace, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Returns the tokens of each prompt. Raises RidgelineError if the file cannot be read or holds none."""
    try:
        text = options.prompt.read_text()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise RidgelineError(f"lm: --prompt {options.prompt} cannot be read: {said}") from None
    lines = [text] if options.whole else [line for line in text.splitlines() if line.strip()]
    if not any(lines):
        raise RidgelineError(f"lm: --prompt {options.prompt} is empty, and generation goes on from a text")
    return [encode(line) for line in lines for _ in range(options.repeat)]


def blocks_of(options: argparse.Namespace, models: list[Any], longest: int, count: int) -> Blocks:
    """Returns the blocks asked for, or enough for a batch of the longest sequences, at most what a GPU has room for."""
    if options.blocks:
        return Blocks(options.blocks, options.block)
    most = min(options.batch, count) * -(-longest // options.block)
    weight = models[0].model.embed_tokens.weight
    if weight.is_cuda:
        sizes = [m.size for m in models]
        token = sum(2 * s.layers * s.groups * s.dim for s in sizes) * weight.element_size()
        most = min(most, int(0.9 * torch.cuda.mem_get_info()[0]) // (token * options.block))
    return Blocks(max(1, most), options.block)


def loop_of(options: argparse.Namespace) -> tuple[Loop, Callable[[Sequence[int]], str]]:
    """Returns the loop of the flags, its prompts waiting, and what makes tokens text."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("lm: --device cuda needs a GPU, and PyTorch sees none; leave --device out to use the CPU")
    for name, low, high in (("temperature", 0, float("inf")), ("top_p", 0, 1), ("min_p", 0, 1)):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise RidgelineError(f"lm: --{name.replace('_', '-')} must be from {low} to {high}, but is {value}")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given: Any = {"dtype": DTYPES.get(options.precision), "tokenizer": options.tokenizer, "seed": options.seed}
    own = loading.load(options.model, device, **given)
    if options.quantize:
        quantize(own.model, options.quantize)
    models = [own.model]
    if options.draft:
        weight = own.model.model.embed_tokens.weight
        models.append(loading.load(options.draft, device, **given | {"dtype": weight.dtype}).model)
    texts = prompts(options, own.encode)
    longest = max(map(len, texts)) + options.tokens + options.ahead
    blocks = blocks_of(options, models, longest, len(texts))
    target, *draft = [Decoder(m, blocks.count, blocks.size, longest, options.invariant) for m in models]
    how = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    limits = Limits(options.batch, options.chunk, options.ahead, options.invariant, options.seed)
    loop = Loop(
        target, draft[0] if draft else None, blocks, how, limits, frozenset() if options.ignore_stops else own.stops
    )
    for tokens in texts:
        loop.add(tokens, options.tokens)
    return loop, own.decode


def figures(loop: Loop) -> dict[str, Any]:
    """Returns what the run took beside its floor: the bytes of weights and caches at the read roof."""
    tally, (rate, source) = loop.tally, lab.read_rate(loop.target.device)
    found: dict[str, Any] = {
        "prompt_tokens": tally.prompt_tokens, "prompt_seconds": tally.prompt_seconds, "steps": tally.steps,
        "tokens": tally.tokens, "seconds": tally.seconds, "waits": tally.waits, "read_rate": rate,
        "read_rate_is": source, "weight_bytes": loop.target.weight_bytes,
    }  # fmt: skip
    if tally.drafted:
        found |= {"drafted": tally.drafted, "accepted": tally.accepted}
    if tally.seconds:
        floor = tally.read / rate
        found |= {"tokens_per_second": tally.tokens / tally.seconds, "floor_tokens_per_second": tally.tokens / floor}
        found["share_of_floor"] = floor / tally.seconds
    return found


def summary(found: dict[str, Any]) -> str:
    lines = []
    if found["prompt_seconds"]:
        rate = found["prompt_tokens"] / found["prompt_seconds"]
        lines.append(f"prompts: {found['prompt_tokens']:,} tokens, {rate:,.0f} tokens/s")
    if "tokens_per_second" in found:
        step, read = found["seconds"] / found["steps"], lab.units.scaled(found["read_rate"], "B/s")
        lines += [
            f"steps: {found['steps']:,} of {lab.units.seconds(step)}, {found['tokens_per_second']:,.0f} tokens/s",
            f"floor: weights and cache read at {read} ({found['read_rate_is']}) allow "
            f"{found['floor_tokens_per_second']:,.0f} tokens/s; the steps reach {found['share_of_floor']:.3f} of it",
        ]
    else:
        lines.append("steps: too few to time, since the first of each number of rows is left out")
    if "drafted" in found:
        lines.append(f"draft: {found['accepted']:,} of {found['drafted']:,} proposed tokens accepted")
    if found["waits"]:
        lines.append(f"blocks: {found['waits']:,} times a sequence gave its blocks back and waited")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Writes the sequences' text as they come or leave, and the figures."""
    loop, decode = loop_of(options)
    rows, alone = list(loop.waiting), len(loop.waiting) == 1
    lengths = [len(row.tokens) for row in rows]
    streams = [Stream(decode) for _ in rows]

    def show(row: Row, got: list[int]) -> None:
        if alone or options.stream:
            text = streams[row.number].push(got, row.done)
            print(text if alone else f"[{row.number}] {text}\n" * bool(text), end="", flush=True)
        elif row.done:
            print(f"[{row.number}] {decode(row.tokens[lengths[row.number] :])}", flush=True)

    for row, got in loop.run():
        if not options.json:
            show(row, got)
    found = figures(loop)
    if options.record:
        about = {"model": options.model, "quantize": options.quantize, "draft": options.draft, "batch": options.batch}
        lab.record(options.record, [about | found], "generate")
    if options.json:
        made = [row.tokens[n:] for row, n in zip(rows, lengths)]
        print(json.dumps({"sequences": [{"tokens": t, "text": decode(t)} for t in made]} | found))
    else:
        print("\n" * alone + summary(found))
    return 0
