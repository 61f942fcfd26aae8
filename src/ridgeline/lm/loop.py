"""The loop of generation: sequences join and leave a batch, in blocks of a paged cache, plainly or with a draft model.

    while sequences wait or run:
        who waits joins, while there are rows and blocks for its tokens
        prompts are cached, a chunk of one at a time, until a chunk's tokens are
        all whose prompts are cached take a step; who finds no block makes the newest give its own back and wait
        who is at its end leaves, and its blocks are free

A step feeds each sequence's last token. With a draft, the draft proposes `ahead` tokens, one step each, and one step of
the target decides on all of them (`speculation.accept`). A GPU replays a step as a CUDA graph, one for each number of
rows. Not a server: a loop to read, to measure the kernels in and to take them from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import ridgeline
from ridgeline.lm import lab
from ridgeline.lm.blocks import Blocks
from ridgeline.lm.decoder import MOST, Decoder, Graphed
from ridgeline.lm.speculation import Sampling, accept, distribution
from ridgeline.op import RidgelineError


@dataclass(eq=False)
class Row:
    """A sequence. tokens: the prompt's, then those made. held: how many of them are cached; a step feeds the last."""

    number: int
    tokens: list[int]
    end: int  # how many tokens it may have
    dice: torch.Generator
    held: int = 0
    blocks: list[int] = field(default_factory=list)
    joined: int = -1  # rises with each join
    done: bool = False

    @property
    def ready(self) -> bool:
        return self.held == len(self.tokens) - 1


@dataclass
class Tally:
    """What the steps did, without the first of each number of rows, which compiles. read: bytes that they must read."""

    steps: int = 0
    tokens: int = 0
    read: int = 0
    seconds: float = 0.0
    accepted: int = 0
    drafted: int = 0
    waits: int = 0  # sequences that gave their blocks back
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0


class Limits(NamedTuple):
    """batch: rows at most. chunk: of a prompt, tokens at once. ahead: tokens that the draft proposes. invariant: what a
    sequence gets does not depend on the others; for that all its blocks are taken as it joins, and steps are padded."""

    batch: int
    chunk: int = 512
    ahead: int = 4
    invariant: bool = False
    seed: int = 0


def _after(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """Lengths when so many tokens more are cached; -1, of padding, stays."""
    return torch.where(lengths < 0, lengths, lengths + tokens)


class Loop:
    """draft: a decoder of the same vocabulary and as many blocks, or None. stops: tokens that end a sequence.

    Raises RidgelineError if the vocabularies differ, or if the draft proposes too many tokens."""

    def __init__(
        self, target: Decoder, draft: Decoder | None, blocks: Blocks, how: Sampling, limits: Limits,
        stops: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        if draft is not None and draft.size.vocabulary != target.size.vocabulary:
            raise RidgelineError(
                f"lm: the draft has a vocabulary of {draft.size.vocabulary}, and the model one of "
                f"{target.size.vocabulary}; speculation needs one and the same"
            )
        if draft is not None and not 1 <= limits.ahead < MOST:
            raise RidgelineError(f"lm: a draft proposes 1 to {MOST - 1} tokens ahead, but is asked for {limits.ahead}")
        self.target, self.draft, self.blocks, self.how, self.limits, self.stops = (
            target, draft, blocks, how, limits, stops
        )  # fmt: skip
        self.ahead = limits.ahead if draft is not None else 0
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.added = self.joins = self.steps = 0
        self.tally = Tally()
        self.graphs: dict[int, Graphed] = {}
        self.most = 1  # blocks of the longest sequence

    def add(self, prompt: Sequence[int], count: int) -> Row:
        """Lets a sequence wait. Raises RidgelineError if all blocks together do not hold it."""
        number = self.added
        if not prompt or count < 1:
            raise RidgelineError(f"lm: sequence {number} must have at least one token, and make at least one")
        if wrong := [t for t in prompt if not 0 <= t < self.target.size.vocabulary]:
            raise RidgelineError(f"lm: sequence {number} has the token {wrong[0]}, which the model does not know")
        end = len(prompt) + count
        need = self.blocks.of(end + self.ahead)
        if need > self.blocks.count:
            raise RidgelineError(
                f"lm: sequence {number} of up to {end} tokens needs {need} blocks of {self.blocks.size}, "
                f"and there are {self.blocks.count}"
            )
        if end + self.ahead > min(len(d.cos) for d in (self.target, self.draft) if d is not None):
            raise RidgelineError(f"lm: sequence {number} of up to {end} tokens is longer than the decoder's longest")
        dice = torch.Generator().manual_seed(self.limits.seed * 1_000_003 + number)
        self.waiting.append(Row(number, list(prompt), end, dice))
        if need > self.most:
            self.most = need
            self.graphs.clear()  # their tables are too narrow
        self.added += 1
        return self.waiting[-1]

    def run(self) -> Iterator[tuple[Row, list[int]]]:
        """Yields each sequence with the tokens that it got, as they come, until all are done."""
        while self.waiting or self.running:
            self._join()
            self._prefill()
            ready = self._grown([row for row in self.running if row.ready])
            yield from self._step(ready) if ready else ()

    def _join(self) -> None:
        while self.waiting and len(self.running) < self.limits.batch:
            row = self.waiting[0]
            tokens = row.end if self.limits.invariant else len(row.tokens)
            if not self.blocks.extend(row.blocks, tokens + self.ahead):
                return  # it waits until others have left
            self.running.append(self.waiting.popleft())
            row.joined, self.joins = self.joins, self.joins + 1

    def _prefill(self) -> None:
        """Caches chunks of prompts. A chunk begins at a multiple of its size, whatever else is in the batch."""
        start, before = time.perf_counter(), self.tally.prompt_tokens
        for row in self.running:
            while not row.ready and self.tally.prompt_tokens - before < self.limits.chunk:
                self._chunk(row)
        if self.tally.prompt_tokens > before:
            lab.synchronize(self.target.device)
            self.tally.prompt_seconds += time.perf_counter() - start

    def _chunk(self, row: Row) -> None:
        some = row.tokens[row.held : min(row.held + self.limits.chunk, len(row.tokens) - 1)]
        device = self.target.device
        tokens = torch.tensor([some], device=device)
        table = torch.tensor([self._line(row)], dtype=torch.int32, device=device)
        for decoder in filter(None, (self.target, self.draft)):
            decoder.prefill(tokens, row.held, table)
        row.held += len(some)
        self.tally.prompt_tokens += len(some)

    def _line(self, row: Row) -> list[int]:
        return row.blocks + [0] * (self.most - len(row.blocks))

    def _grown(self, ready: list[Row]) -> list[Row]:
        """Gives each sequence the blocks of its next step, the oldest first. If there is none, the newest waits."""
        for row in sorted(ready, key=lambda r: r.joined):
            while row in self.running and not self.blocks.extend(row.blocks, row.held + 1 + self.ahead):
                newest = max(self.running, key=lambda r: r.joined)
                self.blocks.release(newest.blocks)
                newest.held = 0  # its tokens are cached anew when it joins again
                self.running.remove(newest)
                self.waiting.appendleft(newest)
                self.tally.waits += 1
        return [row for row in ready if row in self.running]

    def _step(self, ready: list[Row]) -> list[tuple[Row, list[int]]]:
        rows = (
            self.limits.batch if self.limits.invariant else min(self.limits.batch, 1 << (len(ready) - 1).bit_length())
        )
        fresh = rows not in self.graphs
        graph = self.graphs[rows] if not fresh else self.graphs.setdefault(rows, self._graph(rows))
        start = time.perf_counter()
        made, counts = (t.tolist() for t in graph(self._given(rows, ready)))
        seconds = time.perf_counter() - start
        cached = sum(row.held for row in ready)
        found = [(row, self._take(row, tokens[:count])) for row, tokens, count in zip(ready, made, counts)]
        if not fresh:
            tally = self.tally
            tally.steps, tally.seconds = tally.steps + 1, tally.seconds + seconds
            tally.tokens += sum(len(got) for _, got in found)
            tally.drafted += len(ready) * self.ahead
            tally.accepted += sum(counts[: len(ready)]) - len(ready)
            tally.read += self.target.weight_bytes + cached * self.target.token_bytes
            if self.draft is not None:
                tally.read += (self.ahead + 1) * (self.draft.weight_bytes + cached * self.draft.token_bytes)
        return found

    def _take(self, row: Row, tokens: list[int]) -> list[int]:
        """Adds a step's tokens to a sequence, up to its end, where it leaves. Returns those that it took."""
        got = tokens[: row.end - len(row.tokens)]
        stop = next((n for n, token in enumerate(got) if token in self.stops), None)
        got = got if stop is None else got[: stop + 1]
        if -1 in got:
            raise RidgelineError(f"lm: the logits of sequence {row.number} are NaN")
        row.tokens += got
        row.held += len(tokens)
        row.done = stop is not None or len(row.tokens) >= row.end
        if row.done:
            self.blocks.release(row.blocks)
            self.running.remove(row)
        return got

    def _graph(self, rows: int) -> Graphed:
        """A step of so many rows, over tensors of its own."""
        shapes = {
            "places": (torch.int64, (rows, 2)), "tokens": (torch.int64, (rows, 1)), "lengths": (torch.int32, (rows,)),
            "table": (torch.int32, (rows, self.most)), "u": (torch.float32, (rows, self.ahead)),
        }  # fmt: skip
        return Graphed(self._plain if self.draft is None else self._speculate, shapes, self.target.device)

    def _given(self, rows: int, ready: list[Row]) -> dict[str, list[Any]]:
        """What the host knows of a step. Rows of padding have a length of -1."""
        draws, lacking = self.ahead + 2, rows - len(ready)
        places = [[self.limits.seed, self.steps * draws]] * len(ready)  # of one draw for all rows
        if self.limits.invariant:
            places = [[self.limits.seed + (row.number + 1 << 32), len(row.tokens) * draws] for row in ready]
        self.steps += 1
        return {
            "tokens": [[row.tokens[-1]] for row in ready] + [[0]] * lacking,
            "lengths": [row.held for row in ready] + [-1] * lacking,
            "table": [self._line(row) for row in ready] + [[0] * self.most] * lacking,
            "places": places + [[0, 0]] * lacking,
            "u": [torch.rand(self.ahead, generator=row.dice).tolist() for row in ready]
            + [[0.0] * self.ahead] * lacking,
        }

    def _draw(self, logits: torch.Tensor, places: torch.Tensor, n: int, how: Sampling) -> torch.Tensor:
        """A token for each row: the n-th draw of this step. places: (rows, 2): seed and offset."""
        if not self.limits.invariant or not how.temperature:
            return ridgeline.sample(logits, seed=places[0, 0], offset=places[0, 1] + n, **how._asdict())  # type: ignore
        drawn = [
            ridgeline.sample(logits[r : r + 1], seed=places[r, 0], offset=places[r, 1] + n, **how._asdict())
            for r in range(len(logits))
        ]
        return torch.cat(drawn)  # type: ignore[arg-type]

    def _plain(self, tokens: Any, lengths: Any, table: Any, places: Any, u: Any) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = self._draw(self.target.step(tokens, lengths, table)[:, -1], places, 0, self.how)
        return drawn[:, None], torch.ones_like(drawn)

    def _speculate(
        self, tokens: Any, lengths: Any, table: Any, places: Any, u: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's steps, the last of which only caches what it proposed, and the target's."""
        assert self.draft is not None
        how = Sampling(1.0 if self.how.temperature else 0.0)  # what is drawn from has been cut and scaled already
        fed, theirs = [tokens], []
        for n in range(self.ahead):
            q = distribution(self.draft.step(fed[-1], _after(lengths, n), table)[:, -1], self.how)
            fed.append(self._draw(q.log(), places, n, how).clamp(min=0)[:, None])
            theirs.append(q)
        self.draft.step(fed[-1], _after(lengths, self.ahead), table, logits=False)
        proposed = torch.cat(fed, 1)
        p = distribution(self.target.step(proposed, lengths, table), self.how)
        last = self.ahead
        return accept(p, torch.stack(theirs, 1), proposed[:, 1:], u, lambda x: self._draw(x, places, last, how))
