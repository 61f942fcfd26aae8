"""The page of an op: its equations, its use, who serves it, its ladder, its errors and memory, and its notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.lab.presentation.site import figures, ladder_part, prose, serving
from ridgeline.lab.presentation.site.links import Links
from ridgeline.op import Op

Row = dict[str, Any]


def page(op: Op, root: Path, links: Links, until: float, checked: list[Row]) -> str:
    """The Markdown of an op's page.

    until: the time after which kernels without recorded figures are not compiled. checked: errors
    computed without a GPU, for an op that none has timed on record.
    """
    here = f"ops/{op.name}.md"
    case, rules = serving.rules(op, root)
    cases = serving.cases(op)
    charts, errors = ladder_part.charts(op, root), figures.errors(op, root) or figures.computed(checked)
    text = [
        f"# {op.name}",
        prose.lead(op),
        figures.glance(op, root, checked),
        "## Equation",
        prose.equations(root).get(op.name, "docs/equations.md has no section of this name."),
        "## Use",
        prose.use(op, root, links, here),
        "## When it serves what",
        f"The last rung that may run by default and supports a call serves it. In the case {case}, "
        "and on a CPU in a small case:",
        rules,
        *(
            [f"Among the benchmarked cases on an H100, in bfloat16 where nothing else is said:\n\n{cases}"]
            if cases
            else []
        ),
        f"`ridgeline explain {op.name}` answers for your machine and other cases.",
        "## The ladder",
        "From the naive version to the best one. The gain is against the rung above. Grey: other libraries.",
        charts or "No GPU has timed this op on record yet.",
        ladder_part.rungs(op, root, until),
        "## Errors and memory",
        "Errors are against the float64 reference, divided by the error that [the law]"
        "(../design.md#the-tolerance-check) allows: 1 is the limit. Memory is the peak beyond the inputs.",
        errors or "No GPU has timed this op on record yet; `ridgeline check` prints its errors on your machine.",
        figures.links(op, root),
        "## Notes",
        prose.notes(op, root, links, here),
    ]
    return "\n\n".join(filter(None, text)) + "\n"
