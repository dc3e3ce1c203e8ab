"""Hooks of mkdocs.yml: README.md is the site's first page, and files of the checkout that pages link to come along."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
BEFORE_LIST = re.compile(r"^(?!\s|- |\d+\. )(.+)\n(?=- |1\. )", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for file in list(files.documentation_pages()):
        for link in LINK.findall(file.content_string):
            path = _in_checkout(file.src_uri, link)
            if (
                not path.startswith(("docs/", *PAGES))
                and (ROOT / path).is_file()
                and f"source/{path}" not in files.src_uris
            ):
                files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they have to be in the site: a page's in the checkout lead out of docs/, README's into it. A list as it
    has to be: unlike others, Python's Markdown wants a blank line before it."""

    def moved(match: re.Match[str]) -> str:
        path = _in_checkout(page.file.src_uri, match[1])
        target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}")
        return relpath(target, PurePosixPath(page.file.src_uri).parent)

    parts = FENCED.split(LINK.sub(moved, markdown))
    return "".join(part if number % 2 else BEFORE_LIST.sub(r"\1\n\n", part) for number, part in enumerate(parts))


def _in_checkout(page: str, link: str) -> str:
    """Path in the checkout to which a page's link leads. page: its path in the site."""
    own = {site: path for path, site in PAGES.items()}.get(page, f"docs/{page}")
    return normpath(PurePosixPath(own).parent / link)
