"""Templates to self-contained pages: the environment, the themes, pictures inside a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from normjax.reporting import palette, tables
from normjax.reporting.drawing import Figure

TEMPLATES = Path(__file__).parent / "templates"


def render(template: Path, **values: Any) -> str:
    """Return a page without scripts or external resources; all text in it is escaped.

    Args:
        template: the file; it extends ``base.html.j2`` and may include what lies beside it.
        **values: what the template names; a missing one is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, TEMPLATES]), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"number": tables.number, "span": tables.span}
    return environment.get_template(template.name).render(
        light={palette.variable(c)[4:-1]: c for c in palette.DARK},
        dark={palette.variable(c)[4:-1]: d for c, d in palette.DARK.items()},
        **values,
    )


def picture(figure: Figure, svg: str) -> dict[str, Any]:
    """Return a figure as the template's ``picture`` macro takes it."""
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        "svg": Markup(inline(svg, figure.name, figure.title)),
    }


def inline(svg: str, name: str, title: str) -> str:
    """Return an SVG file's text as an element of a page.

    Its ids get a prefix, since several pictures share the page; its colours become variables, so
    that it follows the theme; metadata and fixed size go.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<title>.*?</title>", "", body, count=1, flags=re.DOTALL)
    prefix = f"{name}-"
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    label = str(escape(title))
    return palette.use_variables(f'{head} role="img" aria-label="{label}">{rest}').strip()
