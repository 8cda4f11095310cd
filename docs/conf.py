"""The documentation as a site, by Sphinx: `scripts/docs` builds it, and takes any warning for an error.

Pages are the Markdown files beside this one; the reference comes from the docstrings. What is built needs no network.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this checkout's own packages

import dualpipe_jax  # noqa: E402

project = "dualpipe-jax"
author = copyright = "The dualpipe-jax authors"
version = release = dualpipe_jax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "extension"]
myst_heading_anchors = 3
smartquotes = False  # two dashes begin an option
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# A class may have them in a field's docstring, too.
napoleon_custom_sections = [("Attributes", "params_style")]
toc_object_entries = False

html_theme = "furo"
html_title = "dualpipe-jax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "text"
pygments_style, pygments_dark_style = "friendly", "github-dark"
