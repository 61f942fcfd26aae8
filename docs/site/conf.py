"""Sphinx's settings for the site. `make docs` writes the pages into build/site and runs Sphinx over them."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from itertools import pairwise
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

from ridgeline.lab.presentation.site import anchors

project = "Ridgeline"
author = "The Ridgeline authors"
copyright = "The Ridgeline authors, BSD-3-Clause"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["_site"]
myst_enable_extensions = ["dollarmath", "fieldlist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
python_maximum_signature_line_length = 60
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
toc_object_entries = False

html_theme = "furo"
html_title = "Ridgeline"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
templates_path = ["_site/templates"]
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would fetch pages, which browsers forbid to pages from the file system
html_permalinks = True
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_math_renderer = "mathml"
copybutton_prompt_text = "$ "

# The sources in Chinese come with the English headings of their pages: anchors are the same in both languages.
HEADINGS = Path(__file__).parent / "_headings.json"
CHINESE = HEADINGS.exists()
headings: dict[str, list[list[str]]] = json.loads(HEADINGS.read_text()) if CHINESE else {}
language = "zh_CN" if CHINESE else "en"
html_search_language = "en"  # Sphinx 9.0's search in Chinese names a stemmer that it does not ship

BARS = ("\u00af", "\u2015")
TORCH = "https://docs.pytorch.org/docs/stable/"
ElementTree.register_namespace("", "http://www.w3.org/1998/Math/MathML")
PLACES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.device": "tensor_attributes.html#torch.device",
}


def mathml(text: str, display: str) -> str:
    """MathML of LaTeX. Upright differentials, and bars as borders: few fonts have bars that stretch."""
    made = ElementTree.fromstring(convert(text.replace(r"\mathrm{d}", r"\text{d}"), display=display))
    for node in made.iter():
        if node.tag.endswith("mover") and len(node) == 2 and (node[1].text or "").strip() in BARS:
            node.remove(node[1])
            node.tag = node.tag.replace("mover", "mrow")
            node.set("style", "border-top: .06em solid; padding-top: .12em")
        for name, after in pairwise(node):  # a function before its argument is no operator, which has spaces
            if (
                name.tag.endswith("}mo")
                and len(name.text or "") > 1
                and (name.text or "").isalnum()
                and after.text == "("
            ):
                name.tag = name.tag.replace("}mo", "}mi")
    return ElementTree.tostring(made, encoding="unicode")


def inline_math(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block_math(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def to_torch(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A link to PyTorch's reference for its types in our signatures."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("torch."):
        return None
    address = TORCH + PLACES.get(target, f"generated/{target}.html")
    return nodes.reference("", "", content, internal=False, refuri=address, reftitle=target)


def begin_page(app: Any, name: str, source: list[str]) -> None:
    anchors.begin(headings.get(name, []))


myst_heading_slug_func = "ridgeline.lab.presentation.site.anchors.slug"


def keep_anchors(app: Any, doctree: nodes.document) -> None:
    """Gives the sections of a Chinese page the names that the English page's have."""
    for section in doctree.findall(nodes.section) if CHINESE else ():
        name = section.get("slug")
        if name and name not in section["ids"]:
            section["ids"].append(name)


def switch_language(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """A link to the same page in the other language: in the side bar, and on top of the page."""
    there = f"{name}.html" if not name.startswith("source/") else "index.html"
    place = PurePosixPath("zh", name).parent if CHINESE else PurePosixPath(name).parent
    context["other_page"] = address = relpath(there if CHINESE else f"zh/{there}", place)
    context["other_lang"], context["other_name"] = ("en", "English") if CHINESE else ("zh-CN", "中文")
    if "body" in context:
        link = f'<a href="{address}" lang="{context["other_lang"]}">{context["other_name"]}</a>'
        context["body"] = f'<p class="language">{link}</p>\n{context["body"]}'


def math_font(app: Any, error: Exception | None) -> None:
    """Puts the font of equations beside the pages: MathML needs one that knows mathematics."""
    package = find_spec("ziamath")
    if error is None and package is not None and package.submodule_search_locations:
        font = Path(package.submodule_search_locations[0]) / "fonts/STIXTwoMath-Regular.ttf"
        shutil.copy(font, Path(app.outdir) / "_static" / font.name)


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    app.connect("missing-reference", to_torch)
    app.connect("build-finished", math_font)
    app.connect("source-read", begin_page)
    app.connect("doctree-read", keep_anchors)
    app.connect("html-page-context", switch_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
