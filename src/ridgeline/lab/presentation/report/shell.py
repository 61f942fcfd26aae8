"""The look that all reports share: their style, their frame and how a page's parts are filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def rendered(template: str, folder: Path = HERE, **parts: Any) -> str:
    """Returns a page. template: a file of the folder that extends "shell.html.j2"; every name in it is escaped.

    parts["scripts"]: the hashes of the scripts that may run; without it none may."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(css=(HERE / "page.css").read_text(), **parts)
