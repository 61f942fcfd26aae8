"""The sources of the site: every op has an equation, every command parses, every link of a hand-written page exists."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath

import pytest

import pages
from ridgeline import cli
from ridgeline.lab.presentation.site import kernels, links, markdown, prose, verbs
from ridgeline.op import get, op_modules

ROOT = pages.ROOT
BLOCKS = pages.everything()


def test_every_op_has_an_equation() -> None:
    written = prose.equations(ROOT)
    missing = [name for name in op_modules() if "$$" not in written.get(name, "")]
    assert not missing, (
        f"docs/equations.md has no equation of {', '.join(missing)}: add a section `## NAME` with $$ ... $$"
    )


def test_differentiable_ops_state_their_gradient() -> None:
    written = prose.equations(ROOT)
    for name in op_modules():
        op = get(name)
        args, kwargs = op.cases[0].make(op.cases[0].dtypes[0], "meta")
        if op.cost(*args, **kwargs)[1] is not None:
            assert r"\mathrm{d}" in written[name], f"docs/equations.md gives no gradient of {name}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.commands], ids=lambda b: b.name)
def test_commands_exist(block: pages.Block) -> None:
    """Verbs and options of ridgeline, and targets of make."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in block.commands:
        words = shlex.split(re.sub(r"<op>|OP\b", "softmax", line))
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words[0] == "make":
            named = [w for w in words[1:] if "=" not in w]
            assert set(named) <= set(targets), line
        elif words[0] == "ridgeline" and words[1:] and words[1] not in ("--help", "VERB"):
            assert words[1] in cli.VERBS, line
            if words[2:3] != ["VERB"]:
                verbs.parser(words[1]).parse_args(words[2:])


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_hand_written_pages_exist(page) -> None:
    here = PurePosixPath(page.relative_to(ROOT))
    links.Links(ROOT).moved(page.read_text(), here, "elsewhere.md")


def test_every_verb_has_a_page_with_its_options() -> None:
    made = verbs.pages()
    inner = {f"cli/{verb}-{name}.md" for verb in cli.VERBS for name in verbs.below(verbs.parser(verb))}
    assert set(made) == {"cli/index.md", *(f"cli/{verb}.md" for verb in cli.VERBS), *inner}
    assert "cli/lm-train.md" in inner
    assert "`--peers`" in made["cli/bench.md"]
    assert "`--dtype DTYPE`" in made["cli/check.md"]


def test_a_docstring_is_markdown() -> None:
    text = markdown.docstring("Adds a * b.\n\nx: any. y, z: (N,), 2 of them.\n    a = b\nReturns x.", ("x", "y", "z"))
    assert text == "Adds a \\* b.\n\n- `x`: any.\n\n- `y`, `z`: (N,), 2 of them.\n\n```\na = b\n```\n\nReturns x."


def test_headings_are_lowered_but_not_code() -> None:
    assert markdown.lowered("# a\n```\n# b\n```\n## c\n", 1) == "## a\n```\n# b\n```\n### c\n"


def test_the_source_of_a_kernel_comes_with_what_it_calls() -> None:
    op = get("rms_norm")
    made = kernels.call(op, op.implementations["triton"], op.cases[0], "float32")
    names = {source.name for _, launch in made.launches for source in kernels.sources(launch.kernel)}
    assert len(names) > len(made.launches)


def test_the_source_of_a_cuda_kernel_is_its_function() -> None:
    op = get("gelu")
    made = kernels.call(op, op.implementations["cuda_packed"], op.cases[0], "float32")
    (own,) = kernels.sources(made.launches[0][1].kernel)
    assert own.text.count("__global__") == 1
    assert own.text.rstrip().endswith("}")


def test_a_digest_follows_the_constants() -> None:
    op = get("mul")
    one, other = (kernels.call(op, op.implementations["triton"], op.case("1001"), d) for d in ("float32", "float16"))
    first, second = one.launches[0][1], other.launches[0][1]
    assert kernels.digest(first) == kernels.digest(first)
    assert kernels.digest(first) != kernels.digest(second)


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells, and the head 3"):
        markdown.table(["a", "b", "c"], [["1", "2", "3"], ["1", "2"]])
