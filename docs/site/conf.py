"""Sphinx's settings for the site. `make docs` writes the pages into build/site and runs Sphinx over them."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

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
    return {"parallel_read_safe": True, "parallel_write_safe": True}
