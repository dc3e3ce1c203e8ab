"""The site that mkdocs makes of README and docs/."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from nanodag.host.folders import PROJECT

OUTSIDE = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)="?(?:https?:)?//|url\(["']?https?:""")


@pytest.fixture
def build(tmp_path):
    """A function: build the site with a text at the end of a tutorial; returns its folder, exit code and output."""
    for name in ("docs", ".ci", "mkdocs.yml", "README.md", "CHANGELOG.md", "pipeline.yaml", "tests/rewards/hostile.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (PROJECT / name).is_dir() else shutil.copyfile)(PROJECT / name, tmp_path / name)

    def built(text):
        with open(tmp_path / "docs/tutorial/first-run.md", "a") as page:
            page.write(text)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return tmp_path / "site", done.returncode, done.stdout + done.stderr

    return built


def test_the_site_is_whole_and_asks_nobody_else(build):
    site, code, output = build("")
    assert code == 0, output
    shown = [file for kind in ("html", "css", "svg") for file in site.rglob(f"*.{kind}")]
    assert [file.name for file in shown if OUTSIDE.search(file.read_text())] == []
    first = (site / "index.html").read_text()
    assert 'href="how-to/resume.html#what-exact-resume-promises"' in first and 'src="docs' not in first
    assert (site / "source/tests/rewards/hostile.py").exists() and '"../source/tests' in (
        site / "explanation/trust.html"
    ).read_text()


@pytest.mark.slow
def test_broken_links_and_anchors_fail(build):
    _, code, output = build("\n[a](../how-to/none.md) [b](../../none.py) [c](../how-to/resume.md#none)\n")
    assert code == 1 and [name in output for name in ("how-to/none.md", "none.py", "#none")] == [True] * 3, output
