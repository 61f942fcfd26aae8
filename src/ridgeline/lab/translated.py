"""The Chinese text of a Markdown page, by the catalogues in docs/zh."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ridgeline.lab import passages
from ridgeline.translation import PLACE, Catalogue, read

SHARED = ("common", "ops", "api", "equations")  # catalogues of sentences that many pages hold
ITEM = re.compile(r"(?=\[(?:\w|\{0\})+\]\(\{([01])\}\))\[\S+\]\(\{[01]\}\): (.+)")  # a link, and what it leads to
IDEA = re.compile(r"(<code>.*?</code>): (.*?)")
FOLDER = Path(__file__).resolve().parents[3] / "docs/zh"  # of the source tree
PATTERNS = Catalogue.of(read(FOLDER / "patterns.po"))
OPEN = "本页尚未译完，未译部分保留英文原文。"


def filled(message: str, things: list[str]) -> str:
    """Returns a message with things put into its places; a number that has none stays as it stands, as code may."""
    return PLACE.sub(lambda place: things[int(place[1])] if int(place[1]) < len(things) else place[0], message)


def figure(thing: str) -> str:
    """Returns a figure, or a list of them, as a Chinese sentence has it; code and addresses stay."""
    if thing.startswith("`") or "/" in thing:
        return thing
    return re.sub(r" in (\w+)", r"（\1）", thing.replace(" to ", " 到 ").removesuffix("'s"))


def linked(passage: str) -> tuple[str, list[str]]:
    """Returns a passage with {0}, {1} in place of the addresses that it links to, and these addresses."""
    things = list[str]()

    def place(match: re.Match[str]) -> str:
        things.append(match[1])
        return f"]({{{len(things) - 1}}})"

    return re.sub(r"\]\(([^)\s]*)\)", place, passage), things


def in_chinese(passage: str, own: Catalogue, shared: Catalogue) -> str | None:
    """Returns the Chinese text of a passage: by the page's own catalogue, else sentence by sentence; None without."""
    key, things = linked(passage)
    if (whole := own.texts.get(key)) is not None:
        return filled(whole, things)
    return by_sentence(passage, shared)


def by_sentence(passage: str, shared: Catalogue) -> str | None:
    """Returns the Chinese text of a passage whose sentences are all in a catalogue of sentences with places."""
    said = list[str]()
    for sentence in passages.sentences(passage):
        key, things = passages.placed(sentence)
        if not passages.worded(key):
            said.append(sentence)
        elif (found := of_sentence(key, shared)) is not None:
            said.append(filled(found, [figure(thing) for thing in things]))
        else:
            return None
    text = said[0]
    for more in said[1:]:
        text += more if text[-1:] in "，。；：？！" else f" {more}"
    return text


def of_sentence(key: str, shared: Catalogue) -> str | None:
    """Returns the Chinese text of a sentence: by itself, as an implementation with its idea, or by a pattern."""
    if (found := shared.texts.get(key)) is not None:
        return found
    if (item := ITEM.fullmatch(key)) and (
        found := of_sentence(shifted(item[2], -int(item[1]) - 1), shared)
    ) is not None:
        return f"{key[: item.start(2) - 2]}：{shifted(found, int(item[1]) + 1)}"
    if (idea := IDEA.fullmatch(key)) and (found := shared.texts.get(f"{idea[2][:1].upper()}{idea[2][1:]}.")):
        return f"{idea[1]}：{found.removesuffix('。')}"
    return PATTERNS.get(key)


def shifted(message: str, by: int) -> str:
    """Returns a message with the numbers of its places moved."""
    return PLACE.sub(lambda place: f"{{{int(place[1]) + by}}}", message)


def unknown(passage: str, shared: Catalogue) -> list[str]:
    """Returns the messages of a passage's sentences that a catalogue of sentences lacks."""
    keys = [passages.placed(sentence)[0] for sentence in passages.sentences(passage)]
    return [key for key in keys if passages.worded(key) and of_sentence(key, shared) is None]


def translator(own: Catalogue, shared: Catalogue, missing: list[str] | None = None) -> Callable[[str], str]:
    """Returns a function that gives a passage's Chinese text, or the passage. missing: takes the passages without."""

    def change(passage: str) -> str:
        found = in_chinese(passage, own, shared)
        if found is None and missing is not None:
            missing.append(passage)
        return passage if found is None else found

    return change


@cache
def shared(folder: Path) -> Catalogue:
    """Returns the catalogues of sentences of a folder as one."""
    made = Catalogue()
    for name in SHARED:
        made |= Catalogue.of(read(folder / f"{name}.po"))
    return made


def page(text: str, name: str, folder: Path, missing: list[str] | None = None) -> str:
    """Returns a page in Chinese. name: of its catalogue in a folder, as "lessons/03"; missing: takes what has none."""
    own = Catalogue.of(read(folder / f"{name}.po"))
    return passages.changed(text, translator(own, shared(folder), missing))
