"""Text as tokens: its bytes, or those of a tokenizer's file; and the order in which training reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.lm.folder import package
from ridgeline.op import RidgelineError


class Text(NamedTuple):
    """tokens: (count,), int64, on the CPU. vocabulary: one more than the largest token that there can be."""

    tokens: torch.Tensor
    vocabulary: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def contents(path: Path) -> bytes:
    """Returns a file's bytes. Raises RidgelineError if it cannot be read or is empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RidgelineError(f"lm: {path} cannot be read: {error.strerror or error}") from None
    if not data:
        raise RidgelineError(f"lm: {path} is empty, and training needs text")
    return data


def coder(tokenizer: Path | None, special: bool = False) -> Text:
    """Returns how text becomes tokens and back, with no tokens: bytes, or by a tokenizer.json of `tokenizers`.

    special: whether encoding adds the tokens that begin a text. Numbers that are no bytes are decoded as <number>.
    Raises RidgelineError if the file cannot be read or is none of the package's."""
    none = torch.empty(0, dtype=torch.int64)
    if tokenizer is None:
        return Text(none, 256, lambda s: list(s.encode()), _text_of_bytes)
    kind = package("tokenizers", "a tokenizer.json").Tokenizer
    described = contents(tokenizer)
    try:
        made = kind.from_buffer(described)
    except Exception as error:  # the package raises no class of its own
        raise RidgelineError(f"lm: {tokenizer} is no file of the package tokenizers: {error}") from None
    vocabulary = max(made.get_vocab(with_added_tokens=True).values()) + 1
    return Text(none, vocabulary, lambda s: made.encode(s, add_special_tokens=special).ids, lambda t: made.decode(t))


def _text_of_bytes(tokens: Sequence[int]) -> str:
    return b"".join([bytes([t]) if t < 256 else f"<{t}>".encode() for t in tokens]).decode(errors="replace")


def read(path: Path, tokenizer: Path | None = None) -> Text:
    """Reads a file as tokens: bytes, or by a tokenizer.json of the package `tokenizers`.

    Raises RidgelineError if a file cannot be read, is empty or, for a tokenizer, is not UTF-8."""
    data = contents(path)
    text = coder(tokenizer)
    if tokenizer is None:
        return text._replace(tokens=torch.frombuffer(bytearray(data), dtype=torch.uint8).long())
    try:
        found = text.encode(data.decode())
    except UnicodeDecodeError as error:
        raise RidgelineError(f"lm: {path} is not UTF-8 at byte {error.start}, and a tokenizer needs text") from None
    return text._replace(tokens=torch.tensor(found, dtype=torch.int64))


def split(text: Text, held_out: float, context: int, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens for training and, from the end, the share held out.

    Raises RidgelineError if either has fewer tokens than a sequence and its last target."""
    count = len(text.tokens)
    last = max(round(count * held_out), context + 1 if held_out else 0)
    if count - last <= context:
        least = (context + 1) * (2 if held_out else 1)
        raise RidgelineError(
            f"lm: {path} has {count:,} tokens, and a context of {context} needs at least {least:,} "
            "to train and to hold out; give a longer text or a smaller --context"
        )
    return text.tokens[: count - last], text.tokens[count - last :]


class Sequences:
    """The sequences of a text in a random order that depends on the seed alone, so that one number is the position.

    Each pass over the text cuts it into sequences at another offset, and visits all of them."""

    def __init__(self, tokens: torch.Tensor, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.passed = (len(tokens) - 1) // context  # sequences of a pass
        if len(tokens) - 1 > self.passed * context or self.passed == 1:
            self.slack = len(tokens) - 1 - self.passed * context
        else:
            self.passed, self.slack = self.passed - 1, context
        self.known: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def starts(self, number: int) -> torch.Tensor:
        """Returns where the sequences of a pass begin, in order."""
        if self.known[0] != number:
            dice = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            offset = torch.randint(self.slack + 1, (), generator=dice)
            self.known = number, torch.randperm(self.passed, generator=dice) * self.context + offset
        return self.known[1]

    def take(self, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and targets, (count, context), of the sequences from this position on."""
        places = [divmod(n, self.passed) for n in range(position, position + count)]
        found = [self.tokens[s : s + self.context + 1] for s in (int(self.starts(p)[at]) for p, at in places)]
        rows = torch.stack(found)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def in_order(tokens: torch.Tensor, context: int, batch: int, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields at most `most` batches of the text in its order, as `Sequences.take`."""
    count = min((len(tokens) - 1) // context, most * batch)
    rows = torch.stack([tokens[n * context : (n + 1) * context + 1] for n in range(count)])
    for some in rows.split(batch):
        yield some[:, :-1].contiguous(), some[:, 1:].contiguous()
