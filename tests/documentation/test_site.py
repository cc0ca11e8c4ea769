"""`make docs` makes a site without a warning: every page is in the navigation, and links and anchors lead somewhere."""

import subprocess
import sys
from pathlib import Path

from tests.documentation.tables import DOCS


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in DOCS.glob("*.md"):
        html = (tmp_path / page.with_suffix(".html").name).read_text()
        assert 'src="http' not in html and 'rel="stylesheet" href="http' not in html, f"{page.name} needs another host"
