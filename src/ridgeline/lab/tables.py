"""The style of the lab's tables and progress bars in a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CACHED = "* the working set is under four times the cache, which helps"
LONG = ("work", "idea", "why", "name")


def console() -> Console:
    """Returns the console that verbs print to: as wide as the terminal, or 120 columns for a file or a pipe."""
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=120)


def table(title: str | None, words: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """Returns an empty table: columns of words, then columns of figures. Only long columns of words may wrap."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=SIMPLE_HEAD, padding=(0, 1), title=Text(title, style="bold") if title else None, title_justify="left"
    )
    made.min_width = len(title or "")
    for header in words:
        made.add_column(header, overflow="fold", no_wrap=header not in LONG)
    for header in figures:
        made.add_column(header, justify="right", no_wrap=True)
    return made


def _filled(title: str | None, words: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    from rich.text import Text

    made = table(title, words, figures)
    for row in rows:
        made.add_row(*[Text(cell) if isinstance(cell, str) else cell for cell in row])
    return made


def print_table(
    title: str | None,
    words: Sequence[str],
    figures: Sequence[str],
    rows: Iterable[Sequence[Any]],
    out: Console | None = None,
) -> None:
    """Prints a table: columns of words, then columns of figures. Strings are printed as they are, without markup.

    A file or a pipe gets lines as long as the figures need."""
    out, made = out or console(), _filled(title, words, figures, rows)
    if not (out.is_terminal or set(words) & set(LONG)):
        out.width = max(out.width, out.measure(made, options=out.options.update(width=10_000)).maximum)
    out.print(made, soft_wrap=True)


def table_text(title: str | None, words: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns what `print_table` prints to a file, without spaces at the ends of lines."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=120)
    print_table(title, words, figures, rows, out)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]


def figure(value: float | None, text: Any) -> str:
    """Returns text(value), or a dash if there is no value."""
    from ridgeline.lab import units

    return units.DASH if value is None else text(value)


def timing(seconds: dict[str, float]) -> str:
    """Returns a time with its interval: "12.3 us ±0.4%"."""
    from ridgeline.lab import units

    return f"{units.seconds(seconds['median'])} {units.spread(seconds)}"


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, to be passed to `record` as `report`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)
