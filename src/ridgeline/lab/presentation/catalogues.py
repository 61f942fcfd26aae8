"""The catalogues of the Chinese pages: what they must hold, and how much of it they hold.

python -m ridgeline.lab.presentation.catalogues            brings docs/zh/ and README.zh.md up to date
python -m ridgeline.lab.presentation.catalogues --check    names what is not; exit code 1 if there is anything
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.lab import passages, translated
from ridgeline.lab.measurement import store
from ridgeline.lab.presentation import spoken
from ridgeline.translation import Catalogue, Entry, read, written

ALIKE = 0.75  # how alike an old message must be for its translation to be offered for a new one
SENTENCES = ("README", "CHANGELOG", "equations")  # pages written or changed by machine: sentence by sentence
LIST = "pages.txt"
GENERATED = ("ops/*", "api/*", "cli/*", "measured/*")  # an op's page without its notes, which are pages of their own
HEAD = "# 每页的翻译状态：translated 为译完，open 后为尚缺的条数。由 make zh 更新。\n"


@dataclass(frozen=True)
class State:
    """What a catalogue lacks of a page, what it holds in vain, and what nobody has looked at since it changed."""

    missing: list[str]
    stale: list[str]
    fuzzy: list[str]


def sources(root: Path) -> dict[str, Path]:
    """Returns the hand-written pages of a source tree by the names of their catalogues."""
    named = {name: root / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")}
    docs = root / "docs"
    for path in sorted(docs.rglob("*.md")):
        name = str(path.relative_to(docs).with_suffix(""))
        if name != "ops" and path.relative_to(docs).parts[0] not in ("zh", "measured"):
            named[name] = path
    return named


def messages(name: str, text: str, shared: Catalogue) -> list[str]:
    """Returns the messages that the catalogue of a page must hold, in order: those that the shared ones lack."""
    found = dict[str, None]()
    for passage in passages.passages(text):
        if name in SENTENCES:
            found |= dict.fromkeys(translated.unknown(passage, shared))
        elif translated.unknown(passage, shared):
            found[translated.linked(passage)[0]] = None
    return list(found)


def shared_for(name: str, folder: Path) -> Catalogue:
    """Returns the catalogues of sentences that a page may use beside its own."""
    if name == "equations":
        return Catalogue.of(read(folder / "common.po"))
    return translated.shared(folder)


def state(wanted: list[str], entries: list[Entry]) -> State:
    """Returns how a catalogue stands to what it must hold."""
    there = {e.source for e in entries if e.translation and not e.fuzzy}
    return State(
        [text for text in wanted if text not in there],
        [e.source for e in entries if e.source not in wanted],
        [e.source for e in entries if e.fuzzy],
    )


def merged(wanted: list[str], entries: list[Entry]) -> list[Entry]:
    """Returns the entries of a catalogue that holds what it must.

    A new message that is like one that has gone takes its translation, marked fuzzy.
    """
    known = {e.source: e for e in entries}
    gone = [e.source for e in entries if e.source not in wanted and e.translation]
    made = list[Entry]()
    for text in wanted:
        entry = known.get(text) or Entry(text)
        if not entry.translation and (alike := difflib.get_close_matches(text, gone, 1, ALIKE)):
            entry = replace(entry, translation=known[alike[0]].translation, fuzzy=True, was=alike[0])
        made.append(entry)
    return made


def declared(folder: Path) -> dict[str, int]:
    """Returns how many messages of each page are said to be open: 0 for a translated one."""
    found = {}
    for line in (folder / LIST).read_text().splitlines() if (folder / LIST).exists() else ():
        if line and not line.startswith("#"):
            name, _, said = line.partition(": ")
            found[name] = 0 if said == "translated" else int(said.split()[1])
    return found


def listed(counts: dict[str, int]) -> str:
    """Returns the text of the list of pages."""
    lines = [f"{name}: {f'open {n}' if n else 'translated'}" for name, n in counts.items()]
    return HEAD + "\n".join(lines) + "\n"


def readme(root: Path) -> str:
    """Returns the text of README.zh.md."""
    folder, text = root / "docs/zh", (root / "README.md").read_text()
    own = Catalogue.of(read(folder / "README.po"))
    change = translated.translator(Catalogue(), own | translated.shared(folder))
    return passages.changed(text, change).replace(spoken.TO_CHINESE, spoken.TO_ENGLISH)


def texts(root: Path) -> dict[Path, str]:
    """Returns the files of the Chinese pages as they should be, but for the catalogues of sentences.

    A page that is declared translated stays so, whatever it lacks: the tests then name what it lacks. To declare it
    open, delete its line from the list.
    """
    folder, made, counts = root / "docs/zh", dict[Path, str](), dict[str, int]()
    known = declared(folder)
    for name, path in sources(root).items():
        at = folder / f"{name}.po"
        entries = read(at)
        wanted = messages(name, path.read_text(), shared_for(name, folder))
        if any(e.translation for e in entries):
            entries = merged(wanted, entries)
            made[at] = written(entries)
        counts[name] = 0 if known.get(name) == 0 else len(state(wanted, entries).missing)
    own = root / "src/ridgeline/locale/zh.po"
    made[own] = written(merged(spoken.messages(root / "src/ridgeline"), read(own)))
    made[root / "README.zh.md"] = readme(root)
    made[folder / LIST] = listed(counts | {k: n for k, n in known.items() if k in GENERATED})
    return made


def stale(root: Path) -> list[str]:
    """Returns the files of the Chinese pages that are not as they should be."""
    made = texts(root)
    return [str(p.relative_to(root)) for p, text in made.items() if not p.exists() or p.read_text() != text]


def main() -> int:
    """Writes the files, or with --check names those that are not current."""
    root = store.HOUSE
    if "--check" in sys.argv:
        wrong = stale(root)
        print(f"not current: {', '.join(wrong)}; run: make zh" if wrong else "all catalogues are current")
        return bool(wrong)
    for path, text in texts(root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    open_ones = {name: n for name, n in declared(root / "docs/zh").items() if n}
    print(f"{len(open_ones)} pages are open, {sum(open_ones.values())} messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
