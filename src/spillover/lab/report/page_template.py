"""Rendering of self-contained pages: templates that extend page/page.html, with style, script and icon inside."""

from __future__ import annotations

import base64
import json
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

PACKAGE = "spillover.lab.report"


def render_page(template: str, package: str = PACKAGE, script: str | None = None, **values: Any) -> str:
    """Render a template of `package`; templates and the files they include with `file(...)` are in its folder "page" or
    in the lab's. `script`: a file that runs on the page and finds the value `data` there as JSON."""
    files = ChoiceLoader([PackageLoader(each, "page") for each in (package, PACKAGE)])
    environment = Environment(loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)

    def file(name: str) -> Markup:
        return Markup(files.get_source(environment, name)[0])

    icon = base64.b64encode(file("icon.svg").encode()).decode()
    return environment.get_template(template).render(file=file, icon=icon, script=script, **values)


def embedded(value: Any) -> Markup:
    """Return JSON that cannot end the script element around it, whatever names it contains."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
