"""The report's frame in another language: the sentences of the page's template, by the command line's catalogue."""

from __future__ import annotations

import re
from pathlib import Path

from ridgeline.translation import language, told

HERE = Path(__file__).parent
# Elements whose content is one message; those of the frame hold no others of these.
ELEMENT = re.compile(
    r"(<(?P<tag>p|h1|h2|h3|dt|dd|th|a|b|summary|noscript)\b[^>]*>)(?P<text>(?:(?!</?(?P=tag)\b).)*?)(</(?P=tag)>)",
    re.DOTALL,
)
SCRIPT = re.compile(r"(<(?:script|style)\b.*?</(?:script|style)>)", re.DOTALL)
WORDS = re.compile(r"[A-Za-z]{3}")
# Parts of sentences that the page is built from.
PARTS = (
    "Time",
    "not timed",
    "All {0} results are within tolerance.",
    "{0} outside tolerance",
    "recorded",
    "measured",
    "Every implementation that runs on {0}",
    "Triton's kernels, in Triton's interpreter on this CPU",
    "Timed",
    "Correct",
    "Not timed",
    "{0} operations, {1} timings",
    "{0} results within tolerance",
    "{0} of {1} results outside tolerance",
    "{0}, {1} of memory, no GPU; PyTorch {2}, Triton {3}",
    "{0}, {1} of memory; PyTorch {2}, Triton {3}",
    "{0}Ridgeline report",
    "{0}: Ridgeline's kernels run at {1} of the hardware's limit, {2} as fast as the best alternative.",
    "{0} Medians over {1} benchmark cases, each with its fastest kernel. Limit: the fastest possible time at the "
    "bandwidth and FLOP/s measured on this GPU. Alternatives: PyTorch, torch.compile and other packages.",
    "memory bandwidth of a copy; {0} to read and {1} to write",
    "{0} matrix product, {1}",
    "ridge point: memory limits work below it, arithmetic above",
    "an empty kernel",
    "{0} of Ridgeline's, {1} of alternatives: their results were wrong, or they raised an error",
    "Limits measured on {0}",
    "Limits measured on this machine",
)


def messages() -> list[str]:
    """Returns the messages of the page's template, with places for what is filled in."""
    text = SCRIPT.sub("", (HERE / "page.html.j2").read_text())
    found = [flowing(match["text"]) for match in ELEMENT.finditer(text) if "{%" not in match["text"]]
    return [message for one in found if WORDS.search(re.sub(r"<[^>]*>|\{\{.*?\}\}", "", message := places(one)))]


def flowing(text: str) -> str:
    """Returns an element's text on one line, as a browser shows it, however its source is wrapped."""
    return re.sub(r"\s+", " ", text)


def places(text: str) -> str:
    """Returns a template's text with {0}, {1} for its expressions."""
    parts = re.split(r"\{\{.*?\}\}", text)
    return parts[0] + "".join(f"{{{n}}}{part}" for n, part in enumerate(parts[1:]))


def spoken(page: str) -> str:
    """Returns a page in the chosen language."""
    if language() == "en":
        return page
    parts = SCRIPT.split(page)
    parts[::2] = [ELEMENT.sub(_said, part) for part in parts[::2]]
    return "".join(parts).replace('<html lang="en">', '<html lang="zh-CN">', 1)


def _said(match: re.Match[str]) -> str:
    text = match["text"]
    if not WORDS.search(text):
        return match[0]
    found = told(message := flowing(text))
    if found == message:
        found = ELEMENT.sub(_said, text)
    return match[1] + found + match[4]
