"""Settings of the documentation site: `make docs` builds it."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import commands  # noqa: E402
import configuration  # noqa: E402
import docstrings  # noqa: E402

import personax as px  # noqa: E402

project, author, copyright = "personax", "The personax authors", "The personax authors"
release = version = px.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_generated", "extensions", "results", "benchmarks"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!personax\.).*")]  # types of other libraries

nb_execution_mode = os.environ.get("PERSONAX_NOTEBOOKS", "cache")  # "off" builds the site without running notebooks
suppress_warnings = ["myst.header", *(["myst-nb.lexer"] if nb_execution_mode == "off" else [])]
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_merge_streams = True

REPOSITORY_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "personax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def _generate(app) -> None:
    """Write the parts of pages that come from the code."""
    made = HERE / "_generated"
    made.mkdir(exist_ok=True)
    for name, text in (("configuration", configuration.page()), ("commands", commands.page())):
        place = made / f"{name}.md"
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            place.write_text(text, encoding="utf-8")


def _link_within(app, docname: str, source: list[str]) -> None:
    """Point links to the repository's own pages to those of the site, and show other files by their path alone."""
    here = (HERE / docname).parent

    def rewritten(match: re.Match) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        place = (here / target).resolve()
        if place.name in REPOSITORY_PAGES and place.parent == HERE.parent:
            return f"[{text}]({os.path.relpath(HERE / REPOSITORY_PAGES[place.name], here)}{anchor})"
        if place.is_dir() or (place.exists() and not place.is_relative_to(HERE)):
            name = f"`{place.relative_to(HERE.parent)}`"
            return name if text.strip("`") in name else f"{text} ({name})"
        return match[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", rewritten, source[0])


def setup(app) -> None:
    """Connect what is generated."""
    app.connect("builder-inited", _generate)
    app.connect("source-read", _link_within)
    app.connect("autodoc-process-docstring", docstrings.process, priority=100)
    app.connect("autodoc-skip-member", docstrings.skip)
