"""Markdown that a model wrote, as HTML that cannot do anything: no HTML of its own, no image, no link but to the web.

A block nested deeper than markdown-it's 20 levels is left out.
"""

import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

LONGEST = 32 << 10  # characters; a fifth of a second of CPU for the worst that was tried
_ALLOWED = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)


class _Renderer(RendererHTML):
    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        tokens[idx].attrSet("target", "_blank")
        tokens[idx].attrSet("rel", "noopener noreferrer nofollow")
        return self.renderToken(tokens, idx, options, env)


class _Reader(MarkdownIt):
    def __init__(self) -> None:
        # Line ends stay line ends: models write verses and lists without Markdown's two spaces.
        super().__init__("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
        self.enable(["table", "strikethrough"])
        self.disable("image")  # what is left of one is a link to it

    def validateLink(self, url: str) -> bool:
        return _ALLOWED.match(url) is not None


_READER = _Reader()


def to_html(text: str) -> str:
    """Raises ValueError for a text of more than LONGEST characters."""
    if len(text) > LONGEST:
        raise ValueError(f"the text has {len(text)} characters, and {LONGEST} are rendered at most")
    return _READER.render(text)
