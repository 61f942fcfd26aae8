"""The Chinese pages and messages: catalogues are complete and current, keep to the glossary, and change no code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import cli, translation
from ridgeline.lab import passages, translated
from ridgeline.lab.analysis.lesson.wording import MESSAGES, REASONS
from ridgeline.lab.measurement.law import Finding, Verdict
from ridgeline.lab.presentation import catalogues, spoken
from ridgeline.lab.presentation.report import chinese
from ridgeline.translation import PLACE, Catalogue, Entry, read, written

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/zh"
COMMANDS = ROOT / "src/ridgeline/locale/zh.po"
FILES = [*sorted(FOLDER.rglob("*.po")), COMMANDS]
PAGES = catalogues.sources(ROOT)


def terms() -> dict[str, list[str]]:
    """The glossary's terms, with what a translation may say."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]+) \| [^|]+ \|$", (FOLDER / "glossary.md").read_text(), re.MULTILINE)
    return {term: said.split("、") for term, said in rows}


def entries() -> list[tuple[str, Entry]]:
    return [(str(path.relative_to(ROOT)), entry) for path in FILES for entry in read(path)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_translated_as_declared(name: str) -> None:
    """A translated page has no message that is missing, stale or fuzzy; an open one lacks as many as the list says."""
    wanted = catalogues.messages(name, PAGES[name].read_text(), catalogues.shared_for(name, FOLDER))
    found = catalogues.state(wanted, read(FOLDER / f"{name}.po"))
    declared = catalogues.declared(FOLDER)
    assert name in declared, f"{name} is not in docs/zh/{catalogues.LIST}; run: make zh"
    assert len(found.missing) == declared[name], (
        f"run: make zh, then translate in docs/zh/{name}.po: {found.missing[:5]}"
    )
    assert not found.stale, f"run: make zh; docs/zh/{name}.po holds what the page no longer says: {found.stale[:5]}"
    assert not found.fuzzy, f"look at these in docs/zh/{name}.po, and delete their mark: {found.fuzzy[:5]}"


def test_the_generated_files_are_current() -> None:
    assert catalogues.stale(ROOT) == [], "run: make zh"


def test_everything_that_the_command_line_says_is_translated() -> None:
    found = catalogues.state(spoken.messages(ROOT / "src/ridgeline"), read(COMMANDS))
    assert found == catalogues.State([], [], []), "run: make zh, then translate in src/ridgeline/locale/zh.po"


def test_a_changed_page_is_noticed() -> None:
    text = "# Head\n\nOne sentence here.\n\nAnother one there, [linked](a.md).\n"
    old = [Entry(m, "译文{0}" if "{0}" in m else "译文") for m in catalogues.messages("x", text, Catalogue())]
    assert catalogues.state([e.source for e in old], old) == catalogues.State([], [], [])
    wanted = catalogues.messages("x", text.replace("sentence here", "sentence here and now"), Catalogue())
    found = catalogues.state(wanted, old)
    assert (found.missing, found.stale) == (["One sentence here and now."], ["One sentence here."])
    kept = catalogues.merged(wanted, old)
    assert [(e.fuzzy, e.was) for e in kept] == [(False, ""), (True, "One sentence here."), (False, "")]
    assert catalogues.state(wanted, kept).fuzzy == ["One sentence here and now."]


def test_translations_keep_to_the_glossary() -> None:
    known, wrong = terms(), []
    assert len(known) >= 80
    for path, entry in entries():
        bare = passages.CODE.sub(" ", entry.source)
        for term, said in known.items():
            found = re.search(rf"(?<![\w`.-]){re.escape(term)}s?(?![\w-])", bare)
            if found and entry.translation and not any(s in entry.translation for s in [*said, term]):
                wrong.append(f"{path}: {term}: {entry.source[:70]} => {entry.translation[:60]}")
    assert not wrong, "\n".join(wrong)


def test_translations_keep_places_and_code() -> None:
    wrong = []
    for path, entry in entries():
        if not entry.translation:
            continue
        here, there = entry.source, entry.translation
        if {*PLACE.findall(here)} != {*PLACE.findall(there)} or {*re.findall(r"\{[a-z]\w*\}", here)} != {
            *re.findall(r"\{[a-z]\w*\}", there)
        }:
            wrong.append(f"{path}: places differ: {here[:80]}")
        missing = set(re.findall(r"`[^`]+`", here)) - set(re.findall(r"`[^`]+`", there))
        wrong += [f"{path}: {piece} is missing: {there[:80]}" for piece in missing]
    assert not wrong, "\n".join(wrong)


def test_a_catalogue_is_read_as_written(tmp_path: Path) -> None:
    some = [Entry('a "b" \\ c\nd', "甲"), Entry("new", "旧", fuzzy=True, was="old"), Entry("none")]
    path = tmp_path / "a.po"
    path.write_text(written(some))
    assert read(path) == some
    assert Catalogue.of(some).texts == {some[0].source: "甲"}
    assert read(tmp_path / "missing.po") == []


def test_a_message_with_places_takes_what_stands_there() -> None:
    catalogue = Catalogue({"{0} has no case {1}; it has {2}": "{0} 没有用例 {1}；它有 {2}", "no {0}": "没有 {0}"})
    assert catalogue.get("gelu has no case 'x'; it has a, b") == "gelu 没有用例 'x'；它有 a, b"
    assert catalogue.get("no way") == "没有 way"
    assert catalogue.get("yes") is None


def test_markdown_is_cut_into_what_is_read() -> None:
    text = (
        "# A head\n\nA line\nand the next.\n\n    code here stays\n\n- an item\n  goes on\n\n```py\nx is code\n```\n\n"
        "<!-- a mark -->\n| some head | `x` |\n|---|---|\n| 12 | a cell |\n\n<p>Said in <b>HTML</b>.</p>\n\n$$\nx\n$$\n"
        "\n```{toctree}\n:caption: The list\n\npage\n```\n\n````{py:function} f(x)\n:module: m\n\nWhat it does.\n````"
    )
    wanted = ["A head", "A line and the next.", "an item goes on", "some head", "a cell", "Said in <b>HTML</b>."]
    assert list(passages.passages(text)) == [*wanted, "The list", "What it does."]
    assert passages.changed(text, lambda said: said).split() == text.split()
    upper = passages.changed(text, str.upper)
    assert all(kept in upper for kept in ("code here stays", "x is code", "<!-- a mark -->"))
    assert passages.headings(text) == ["A head"]


def test_figures_and_code_become_places() -> None:
    key, things = passages.placed("It takes 1.2 ms with `f`, [see](a.md) H100 and 16384x16384 in float32; 8.")
    assert key == "It takes {0} with {1}, [see]({2}) {3} and {4}."
    assert translated.filled(key, things) == "It takes 1.2 ms with `f`, [see](a.md) H100 and 16384x16384 in float32; 8."
    assert translated.filled("`{0}` in code, which is no place", []) == "`{0}` in code, which is no place"


@pytest.mark.parametrize(
    ("asked", "language"), [("zh_CN.UTF-8", "zh"), ("zh_TW", "zh"), ("de_DE.UTF-8", "en"), ("C", "en"), ("", "en")]
)
def test_the_locale_chooses_the_language(monkeypatch: pytest.MonkeyPatch, asked: str, language: str) -> None:
    for name in translation.LOCALES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", asked)
    assert translation.of_locale() == language
    monkeypatch.setenv("LC_ALL", "C" if language == "zh" else "zh_CN")
    assert translation.of_locale() != language


@pytest.fixture
def english_after() -> object:
    yield
    translation.choose("en")


@pytest.mark.usefixtures("english_after")
@pytest.mark.parametrize("arguments", [["--lang", "zh", "--help"], ["--help", "--lang=zh"]])
def test_help_in_chinese(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "列出算子及其实现" in printed
    assert "list the ops" not in printed


@pytest.mark.usefixtures("english_after")
def test_errors_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in [
        (["frob", "--lang", "zh"], "没有子命令 'frob'"),
        (["bench", "--frob", "--lang", "zh"], "无法识别的参数：--frob"),
        (["check", "nope", "--lang", "zh"], "没有算子 'nope'"),
        (["lesson", "99", "--lang", "zh"], "没有第 99 课"),
    ]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["list", "--lang", "xx"])
    assert "there is no language 'xx'" in capsys.readouterr().err


@pytest.mark.usefixtures("english_after")
@pytest.mark.parametrize(("number", "said"), [(3, "合并访问"), (8, "滑动最大值")])
def test_a_lesson_in_chinese(number: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lesson", str(number), "--lang", "zh"]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("english_after")
def test_the_report_in_chinese_wherever_its_sentences_are_wrapped() -> None:
    said = [message for message in chinese.messages() if not PLACE.search(message)]
    assert len(said) > 30
    translation.choose("zh")
    for message in said:
        wrapped = re.sub(" ", "\n    ", message)
        assert chinese.spoken(f"<dd>{wrapped}</dd>") == f"<dd>{translation.commands().texts[message]}</dd>"
    assert chinese.spoken("<dd>a word\n    that has none</dd>") == "<dd>a word\n    that has none</dd>"


def test_the_hints_of_a_wrong_kernel_in_chinese(tmp_path: Path) -> None:
    """The kernel that lesson 3 starts from passes one test and fails four, each with its hint."""
    lesson = (ROOT / "docs/lessons/03.md").read_text()
    path = tmp_path / "my_kernel.py"
    path.write_text(
        next(block for block in re.findall(r"```python\n(.*?)```", lesson, re.DOTALL) if "def gelu" in block)
    )
    command = [sys.executable, "-m", "ridgeline", "lesson", "3", "--check", str(path), "--lang", "zh"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert "5 项测试中有 4 项失败" in printed
    for hint in ("hint.tail", "hint.strides", "hint.large", "hint.half"):
        assert translation.commands().texts[MESSAGES[hint]] in printed


def test_what_the_law_says_is_in_the_catalogue() -> None:
    for where in ("form", "nonfinite", "unequal", "whole", "row", "column", "scale"):
        reason = Verdict({"out": Finding(3.0, 1.0, where)}, {}).reason()
        assert reason
        assert any(translation.pattern(text).fullmatch(reason) for text in REASONS), reason
