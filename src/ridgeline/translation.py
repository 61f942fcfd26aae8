"""Message catalogues in gettext's .po format, and the language that the command line speaks.

English is the source and the default. A message may hold places such as {0}: what stands there in an English text is
put into the translation. Nothing here imports more than the standard library. A catalogue is read at its first use.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "zh")
LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first of them that is set counts, as for every program
PLACE = re.compile(r"\{(\d+)\}")
_chosen = ["en"]


@dataclass
class Entry:
    """A message of a catalogue. was: the older text of a fuzzy one, whose translation may no longer be right."""

    source: str
    translation: str = ""
    fuzzy: bool = False
    was: str = ""


@dataclass
class Catalogue:
    """Translations by their English texts."""

    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Catalogue:
        """Returns a catalogue of the entries that are translated and not fuzzy."""
        return cls({e.source: e.translation for e in entries if e.translation and not e.fuzzy})

    def __or__(self, other: Catalogue) -> Catalogue:
        """Returns a catalogue of both; the first one's entries count."""
        return Catalogue(other.texts | self.texts)

    def get(self, text: str) -> str | None:
        """Returns the translation of a text, by itself or by a message with places; None if there is none."""
        if (found := self.texts.get(text)) is not None:
            return found
        for pattern, translation in self._patterns.get(text[:1], []) + self._patterns.get("", []):
            if match := pattern.fullmatch(text):
                return PLACE.sub(lambda place: match[f"p{place[1]}"], translation)
        return None

    @property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], str]]]:
        """The messages with places by their first letter, "" if that is a place; those with the most words first."""
        made = self.__dict__.get("patterns")
        if made is None:
            made = {}
            for source in sorted(filter(PLACE.search, self.texts), key=lambda s: -len(PLACE.sub("", s))):
                first = "" if PLACE.match(source) else source[:1]
                made.setdefault(first, []).append((pattern(source), self.texts[source]))
            self.__dict__["patterns"] = made
        return made


def pattern(message: str) -> re.Pattern[str]:
    """Returns what the texts of a message with places look like."""
    parts, seen = PLACE.split(message), set[str]()
    text = re.escape(parts[0])
    for number, after in zip(parts[1::2], parts[2::2]):
        text += f"(?P=p{number})" if number in seen else f"(?P<p{number}>.*?)"
        seen.add(number)
        text += re.escape(after)
    return re.compile(text, re.DOTALL)


def read(path: Path) -> list[Entry]:
    """Returns the entries of a .po file, without its head and its obsolete ones."""
    entries, at = list[Entry](), ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fuzzy = line.startswith("#,") and "fuzzy" in line
        word, _, rest = line.removeprefix("#| ").partition(" ")
        if fuzzy:
            entries.append(Entry("", fuzzy=True))
        elif line.startswith("#| msgid ") and entries:
            entries[-1].was = ast.literal_eval(rest)
        elif word == "msgid":
            at = "source"
            if not entries or entries[-1].source or entries[-1].translation or not entries[-1].fuzzy:
                entries.append(Entry(""))
            entries[-1].source = ast.literal_eval(rest)
        elif word == "msgstr":
            at = "translation"
            entries[-1].translation = ast.literal_eval(rest)
        elif line.startswith('"') and entries:
            setattr(entries[-1], at, getattr(entries[-1], at) + ast.literal_eval(line))
    return [entry for entry in entries if entry.source]


def written(entries: Iterable[Entry]) -> str:
    """Returns the text of a .po file: a message a line, no places in sources, so that differences are small."""
    parts = ['msgid ""\nmsgstr "Language: zh_CN\\nContent-Type: text/plain; charset=UTF-8\\n"\n']
    for entry in entries:
        mark = "#, fuzzy\n" if entry.fuzzy else ""
        was = f"#| msgid {_quoted(entry.was)}\n" if entry.was else ""
        parts.append(f"{mark}{was}msgid {_quoted(entry.source)}\nmsgstr {_quoted(entry.translation)}\n")
    return "\n".join(parts)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


@cache
def commands() -> Catalogue:
    """Returns the catalogue of what the command line says."""
    return Catalogue.of(read(Path(__file__).parent / "locale" / "zh.po"))


def language() -> str:
    """Returns the language that was chosen for this process: "en" or "zh"."""
    return _chosen[0]


def choose(name: str) -> None:
    """Sets the language of this process. Raises ValueError for one that there is not."""
    if name not in LANGUAGES:
        raise ValueError(f"there is no language {name!r}; the languages are {', '.join(LANGUAGES)}")
    _chosen[0] = name


def of_locale() -> str:
    """Returns the language that the locale of this process asks for; English if it is none of ours."""
    asked = next((value for name in LOCALES if (value := os.environ.get(name))), "")
    return "zh" if asked.lower().startswith("zh") else "en"


def told(text: str) -> str:
    """Returns a text of the command line in the chosen language; in English if it has no translation."""
    if language() == "en" or not text:
        return text
    return commands().get(text) or text
