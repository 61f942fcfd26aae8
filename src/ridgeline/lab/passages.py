"""A Markdown text as passages: those that a translator reads, and those between them that stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^(\s*)(`{3,}|:{3,})(.*)$")
ITEM = re.compile(r"^(\s*)([-*+]|\d+\.)(\s+)(?=\S)")
HEADING = re.compile(r"^(#+ +)(.*)$")
OPENED = ("{py:", "{note}", "{tip}", "{warning}")  # directives that hold Markdown
ELEMENT = re.compile(
    r"(<(?P<tag>p|h3|summary|figcaption|span|small)\b[^>]*>)(?P<text>(?:(?!</?(?P=tag)\b).)*)(</(?P=tag)>)"
)
LABEL = re.compile(r'((?:aria-label|title)=")([^"]*)(")')
CODE = re.compile(r"`+[^`]*`+|\$[^$]+\$|\]\([^)\s]*\)|<[^>]*>|&\w+;")
# Names that are the same in every language.
NAMES = re.compile(
    r"\b(?:PyTorch|[Tt]orch(?:\.\w+)*|Liger|quack|cuDNN|cuBLAS|FlashAttention|FlashInfer|FlashMLA|vLLM|SGLang|Triton|"
    r"triton|Gluon|gluon|cuda|causal|deterministic|Ridgeline|ridgeline(?:\.\w+)*|compile|eager|Hopper|Llama|tanh|bf16|"
    r"fp8|transformers|flash|fla|python|torchao|softmax|float|bfloat|window|softcap|sinks|sdpa|dropout|mem|max|nt|tn|nn)\b"
)
# A figure, or anything with one in it, with its unit; a list of such, and of code, is one place.
UNIT = r"(?: (?:us|ns|ms|s|B|KiB|MiB|GiB|TiB|KB|MB|GB|TB|TB/s|GB/s|TFLOP/s|PFLOP/s|GFLOP/s|columns|rows|bytes)\b)?"
THING = rf"(?:`[^`]+`|\$[^$]+\$|[^\s`(\[<>*|;,]*\d(?:[^\s`()\[\]<>*|;,]|,\d)*(?<![.:]){UNIT})"
WHERE = r"(?: in (?:b?float\d+|tf32|int8|int64|float8\w*)\b)?"
FIGURES = re.compile(rf"{THING}{WHERE}(?:(?:, |; | to | / ){THING}{WHERE})*")
SENTENCE = re.compile(r"(?<=[.;!?]) +(?=[A-Z`\[*({])|(?<=:) (?=[A-Z])")

PLACE = re.compile(r"\{\d+\}")
VERB = re.compile(r"ridgeline(?: \w+){1,2}")

Change = Callable[[str], str]


def worded(text: str) -> bool:
    """Whether a text holds words, beside code, figures, equations and addresses."""
    rest = NAMES.sub(" ", PLACE.sub(" ", CODE.sub(" ", text)))
    if VERB.fullmatch(text):
        return False
    return bool(re.search(r"(?<![\w.\\])[A-Za-z]?[a-z]{2,}(?![\w(=]|\.\w|\\)", rest)) and not re.fullmatch(
        r"[\w.]*(?:[\d_=]|\.\w)[\w.=*]*", rest.strip()
    )


def changed(text: str, change: Change) -> str:
    """Returns a Markdown text with each passage that a translator reads changed by a function."""
    lines, out, n = text.split("\n"), list[str](), 0
    width = 0  # columns of the list item around; 0 outside lists
    while n < len(lines):
        line = lines[n]
        indent = len(line) - len(line.lstrip())
        if line.strip() and not indent and not ITEM.match(line):
            width = 0
        end = _literal(lines, n, width)
        if end > n:
            out += _opened(lines[n:end], change)
            n = end
            continue
        if match := HEADING.match(line):
            out.append(match[1] + _passage(match[2], change))
            n += 1
            continue
        if line.lstrip().startswith("|"):
            out.append(_row(line, change))
            n += 1
            continue
        if line.startswith("<") and not re.match(r"<(?:https?:|code|a |kbd|em|strong)", line):
            out.append(_html(line, change))
            n += 1
            continue
        item = ITEM.match(line)
        head = item[0] if item else line[:indent]
        width = len(item[0]) if item else width
        end = _end(lines, n, width)
        body = " ".join([line[len(head) :], *(x.strip() for x in lines[n + 1 : end])])
        quote = re.match(r"> ", body)
        lead = quote[0] if quote else ""
        out.append(head + lead + _passage(body[len(lead) :].replace(" > ", " ") if lead else body, change))
        n = end
    return "\n".join(out)


def passages(text: str) -> Iterator[str]:
    """Yields the passages of a Markdown text that a translator reads, in order, repeated ones too."""
    found = list[str]()

    def seen(passage: str) -> str:
        found.append(passage)
        return passage

    changed(text, seen)
    yield from found


def headings(text: str) -> list[str]:
    """Returns the headings of a Markdown text in order."""
    parts = re.split(r"(^(?:`{3,})[^\n]*\n.*?^`{3,}$)", text, flags=re.MULTILINE | re.DOTALL)
    return [title for part in parts[::2] for title in re.findall(r"^#+ +(.*)$", part, flags=re.MULTILINE)]


def sentences(passage: str) -> list[str]:
    """Returns the sentences of a passage."""
    return SENTENCE.split(passage)


def placed(text: str) -> tuple[str, list[str]]:
    """Returns a text with {0}, {1} in place of code, figures and addresses, and what stood there."""
    things = list[str]()

    def place(match: re.Match[str]) -> str:
        things.append(match[0])
        return f"{{{len(things) - 1}}}"

    parts = re.split(r"(\]\([^)\s]*\))", text)
    for n, part in enumerate(parts):
        if n % 2:
            things.append(part[2:-1])
            parts[n] = f"]({{{len(things) - 1}}})"
        else:
            parts[n] = FIGURES.sub(place, part)
    return "".join(parts), things


def _literal(lines: list[str], n: int, width: int) -> int:
    """Returns the end of the lines from n on that stay as they are; n if there are none."""
    line = lines[n]
    if not line.strip() or re.match(r"\s*(?:\(\S+\)=|\[[^\]]+\]: |---+|\*\*\*+)\s*$", line):
        return n + 1 if not (n == 0 and line == "---") else lines.index("---", 1) + 1
    if match := FENCE.match(line):
        close = re.compile(rf"^\s*{match[2][0]}{{{len(match[2])},}}\s*$")
        return next((m + 1 for m in range(n + 1, len(lines)) if close.match(lines[m])), len(lines))
    for first, last in (("$$", "$$"), ("<!--", "-->")):
        if line.strip().startswith(first):
            return next((m + 1 for m in range(n, len(lines)) if last in lines[m][2 * (m == n) :]), len(lines))
    if re.match(r" {4}", line[width:] if line[:width].strip() == "" else "") and (n == 0 or not lines[n - 1].strip()):
        m = n
        while m < len(lines) and (lines[m].startswith(" " * (width + 4)) or not lines[m].strip()):
            m += 1
        return m
    return n


def _end(lines: list[str], n: int, width: int) -> int:
    """Returns the end of the paragraph that begins at line n."""
    m = n + 1
    while m < len(lines) and lines[m].strip():
        line = lines[m].lstrip()
        if ITEM.match(lines[m]) or FENCE.match(lines[m]) or HEADING.match(line) or line.startswith(("|", "<!--", "$$")):
            break
        m += 1
    return m


def _passage(text: str, change: Change) -> str:
    return change(text) if worded(text) else text


def _row(line: str, change: Change) -> str:
    """A row of a table: each cell is a passage."""
    cells = re.split(r"(?<!\\)(\|)", line)
    return "".join(
        cell if cell == "|" or not worded(cell) else cell[: len(cell) - len(cell.lstrip())] + change(cell.strip()) + " "
        for cell in cells
    )


def _html(line: str, change: Change) -> str:
    """A line of HTML: what stands in its elements, and its labels."""

    def element(match: re.Match[str]) -> str:
        text = match["text"]
        if 'class="name"' in match[1]:
            return match[0]
        if match["tag"] == "p" and "<br>" in text:
            return match[1] + "<br>".join(_passage(part, change) for part in text.split("<br>")) + match[4]
        inner = ELEMENT.sub(element, text) if ELEMENT.search(text) and match["tag"] != "p" else _passage(text, change)
        return match[1] + inner + match[4]

    labelled = LABEL.sub(lambda m: m[1] + _passage(m[2], change) + m[3], line)
    return ELEMENT.sub(element, labelled)


def _opened(lines: list[str], change: Change) -> list[str]:
    """Lines that stay, but for a directive that holds Markdown, and the caption of a list of pages."""
    match = FENCE.match(lines[0])
    if not match or len(lines) < 2:
        return lines
    if match[3].startswith("{toctree}"):
        return [re.sub(r"^(:caption: )(.*)", lambda m: m[1] + change(m[2]), line) for line in lines]
    if not match[3].startswith(OPENED):
        return lines
    start = next((n for n in range(1, len(lines)) if not re.match(r":\w+:", lines[n])), len(lines))
    return [*lines[:start], *changed("\n".join(lines[start:-1]), change).split("\n"), lines[-1]]
