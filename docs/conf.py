"""The documentation site: `make docs` builds it into build/site."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tfdpclip import __version__  # noqa: E402
from tools import site  # noqa: E402

site.write_pages(ROOT / "docs")

project = "tfdpclip"
copyright = "the authors of tfdpclip; Apache License 2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "tools.site",
]
exclude_patterns = ["conf.py"]
# What cannot be resolved is an error: `make docs` turns warnings into errors.
nitpicky = True
# Types of other packages, whose own documentation is not linked to.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(tf|tensorflow|tff|tensorflow_federated|keras|np|numpy|pd|pandas|attr|dp_accounting"
        r"|collections|typing|pathlib|os|abc|matplotlib|plt)(\..*|$)",
    ),
    (r"py:.*", r"Figure|UnsupportedEventError|.*InvalidArgumentError"),
    # Types that have no public name.
    (
        r"py:class",
        r"tfdpclip\..*\.(Schedule|PublicVariables|CohortIterator|StateHistory|RoundNoise)",
    ),
]
default_role = "name"
suppress_warnings = ["myst.xref_ambiguous"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"tfdpclip {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
