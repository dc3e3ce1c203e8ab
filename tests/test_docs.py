"""What the README and the pages of docs/ name is there: files, links, commands, options, settings, metrics, endpoints.
And their sentences are short.

How words are counted: code blocks, tables, headings, comments and link targets are left out. A code span counts as one
word, whatever it holds, and so does any run of characters without a blank that has a letter or digit. A sentence ends
at `.`, `!` or `?` before a blank, or with its paragraph or list item; a colon, semicolon or dash ends none.
"""

import ast
import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from nanodag.config import resolve
from nanodag.config.reference import setting
from nanodag.config.resolve import Resolved
from nanodag.errors import ConfigError
from nanodag.host.folders import PROJECT
from nanodag.rl.rollouts.metrics import critic_metrics, rollout_metrics, speeds, trainer_metrics
from nanodag.rl.rollouts.rollout import Rollout, prompt_span
from tests.doc_pages import DOCS, FENCED, MAKER, PAGES, SPAN, WRITTEN, code_of, named
from tests.rl.rollouts import sampled_span

FOLDERS = ("tutorial", "how-to", "reference", "explanation")
BESIDE = ("GPU.md", "LOG.md", "glossary.md")
MAX_WORDS = 25


def lacking(find: Callable[[str], Iterator[str]]) -> list[str]:
    """What `find` says is missing of what the code of a page names, with the page."""
    return [f"{named(page)}: {what}" for page in WRITTEN for text in code_of(page) for what in find(text)]


def test_every_page_lies_in_one_of_four_folders_and_is_linked_from_the_readme():
    lost = [named(page) for page in DOCS.rglob("*.md") if page.parent.name not in FOLDERS]
    assert sorted(lost) == sorted(f"docs/{name}" for name in BESIDE)
    text = (PROJECT / "README.md").read_text()
    assert [named(page) for page in PAGES if page.parent != PROJECT and f"({named(page)})" not in text] == []


@pytest.mark.parametrize(("file", "limit"), [("README.md", 100), ("speedrun.sh", 36)])
def test_a_file_that_is_read_at_a_glance_stays_short(file, limit):
    assert len((PROJECT / file).read_text().splitlines()) <= limit


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not link.startswith(("http://", "https://")) and not target.exists():
            yield named(target)
        elif anchor and target.exists() and anchor not in anchors(target):
            yield link


def test_links_lead_somewhere():
    assert [f"{named(page)}: {link}" for page in PAGES for link in broken_links(page)] == []


def missing_files(text: str) -> Iterator[str]:
    for found in re.findall(r"(?<![\w./-])(?:nanodag|flows|tasks|tests|benchmarks|docs|\.ci)/[\w./*-]*", text):
        path = found.rstrip("./")
        if not any(PROJECT.glob(path)):
            yield path


def missing_modules(text: str) -> Iterator[str]:
    run = re.findall(r"python -m ((?:nanodag|tests|benchmarks)[\w.]*)", text)
    for found in [*run, *re.findall(r"^from (nanodag[\w.]*) import", text, re.MULTILINE)]:
        path = PROJECT / found.replace(".", "/")
        folder = path / "__main__.py" if found in run else path / "__init__.py"
        if not folder.exists() and not path.with_suffix(".py").exists():
            yield named(path.with_suffix(".py"))


def test_folders_in_the_tree_of_the_readme_are_there():
    (block,) = [text for text in code_of(PROJECT / "README.md") if text.startswith("flows/ tasks/")]
    folders = re.findall(r"(?<!\S)([\w/]+)/(?=\s)", block)
    assert len(folders) > 20
    bases = (PROJECT, PROJECT / "nanodag")
    assert [name for name in folders if not any((root / name).is_dir() for root in bases)] == []


COMMANDS = {path: command for path, command in MAKER.commands()}


def misnamed(line: str) -> Iterator[str]:
    """What a command line of ours names that the command does not have."""
    words = line.partition(" #")[0].split()
    path: tuple[str, ...] = ()
    while words and (*path, words[0]) in COMMANDS:
        path = (*path, words.pop(0))
    if hasattr(COMMANDS[path], "commands"):  # a group alone, as in `nanodag server`
        yield from [f"nanodag {' '.join([*path, *words[:1]])}"] if words and words[0].islower() else []
        return
    known = {name for one in COMMANDS[path].params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    for word in words:
        if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known:
            yield f"nanodag {' '.join(path)} {word}"


def missing_commands(text: str) -> Iterator[str]:
    for line in re.findall(r"(?:^|(?<=bin/))nanodag ([a-z].*)|^\./speedrun\.sh (?!test)([a-z].*)", text, re.MULTILINE):
        yield from misnamed("".join(line))


@cache
def shipped() -> list[Resolved]:
    return [resolve(PROJECT / "pipeline.yaml", preset, []) for preset in ("pocket", "gsm8k-rl")]


@cache
def is_setting(name: str) -> bool:
    for resolved in shipped():
        with contextlib.suppress(ConfigError):
            return bool(setting(resolved, name))
    return False


def missing_settings(text: str) -> Iterator[str]:
    stages = {name for resolved in shipped() for name in resolved.pipeline.stages}
    known = "|".join(sorted({*stages, "store", "server", "cluster", "nightly"}, key=len, reverse=True))
    text = re.sub(r"--keep-best \S+", "", text)  # of these the second word is a metric
    for found in re.findall(rf"(?<![\w./:-])((?:{known})(?:\.[a-z_]+)+)(?![\w(.])", text):
        is_file = found.endswith((".md", ".html", ".py", ".svg", ".json", ".jsonl", ".log", ".yaml", ".sh"))
        if not is_file and not is_setting(found):
            yield found


WRONG = {  # by who finds it: a text, and what of it is not there
    missing_files: ("see `tests/test_docs.py`, nanodag/no.py, docs/*.md.", ["nanodag/no.py"]),
    missing_modules: ("python -m nanodag.rl x\nfrom nanodag.no import a\n", ["nanodag/no.py"]),
    missing_commands: (
        "nanodag chat RUN\nnanodag server begin\nnanodag gc --keep 3  # a comment --with=this",
        ["nanodag server begin", "nanodag gc --keep"],
    ),
    missing_settings: (
        "`rl.clip_high`, `rl.sampler.context`; `rl.clip_higher` and `rl.sampler.contexts`",
        ["rl.clip_higher", "rl.sampler.contexts"],
    ),
}


@pytest.mark.parametrize("find", WRONG, ids=lambda find: find.__name__)
def test_files_modules_commands_and_settings_that_a_page_names_are_there(find):
    assert lacking(find) == []
    text, wrong = WRONG[find]
    assert list(find(text)) == wrong


@pytest.mark.parametrize("name", MAKER.PAGES)
def test_a_page_that_is_made_from_the_code_is_what_the_code_says(name):
    found = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert found == MAKER.PAGES[name](), f"stale: {MAKER.COMMAND}"


def test_every_metric_of_rl_stands_in_the_reference():
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    spans = (prompt_span([1]), sampled_span([2, 3], [-0.5, -0.1], 0))
    whole = {"group_id": "0:0", "prompt_id": "0", "reward": 1.0, "finish_reason": "stop", "spans": spans}
    rollouts = [Rollout(sample_index=number, **whole) for number in range(2)]
    sums = (
        "tokens loss entropy ratio clipped mismatch mismatch_absolute mismatch_kl correction left_out kl teacher_kl",
        "tokens value_loss clipped value return return_squared error error_squared",
        "sampled_tokens seconds_generate computed_tokens scored_tokens peak_flops",
    )
    trained, judged, sides = (dict.fromkeys(names.split(), 1.0) for names in sums)
    largest = {"mismatch_largest": 1.0, "ratio_largest": 1.0}
    found = {
        **rollout_metrics(rollouts),
        **trainer_metrics([{"summed": trained, "largest": largest}], num_updates=1),
        **critic_metrics([{"summed": {**judged, "return_squared": 2.0}, "largest": {}}], num_updates=1),
        **speeds(sides, {"train": 1.0}, num_parameters=1, num_head_parameters=1),
    }
    assert [name for name in found if f"`{name}`" not in page] == []


def test_every_endpoint_of_the_sampler_stands_in_the_reference():
    page = (DOCS / "how-to" / "samplers.md").read_text(encoding="utf-8")
    text = "".join(path.read_text() for path in (PROJECT / "nanodag" / "sampler").glob("*server.py"))
    text += (PROJECT / "nanodag" / "sampler" / "weight_endpoints.py").read_text()
    endpoints = re.findall(r'Route\("(/\w+)"', text)
    endpoints += [f"/{name}" for name in re.findall(r"async def ([a-z]\w*)\(self, http", text)]
    assert len(endpoints) > 15
    own = {"/server_info"}  # also under the name that SGLang gives it
    assert [name for name in endpoints if f"`{name}`" not in page and name not in own] == []


PIPELINES = [(page, block) for page in WRITTEN for block in code_of(page, "yaml") if "default:" in block]


@pytest.mark.parametrize("block", [block for _, block in PIPELINES], ids=[named(page) for page, _ in PIPELINES])
def test_a_whole_pipeline_in_a_page_resolves(block, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(block)
    assert resolve(path, "auto", []).pipeline.stages


def test_python_in_a_page_can_be_parsed():
    blocks = [block for page in WRITTEN for block in code_of(page, "python")]
    assert [type(ast.parse(block)) for block in blocks] == [ast.Module] * len(blocks)


def sentences(text: str) -> Iterator[str]:
    text = FENCED.sub("\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    text = re.sub(r"^(\s{4,}\S.*|\|.*|#.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", SPAN.sub("code", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text):
        yield from re.split(r"(?<=[.!?])[)\"*_\]]*\s+", " ".join(paragraph.split()))


def num_words(sentence: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def test_no_sentence_has_more_than_25_words():
    found = {f"{named(page)}: {s}": s for page in WRITTEN for s in sentences(page.read_text(encoding="utf-8"))}
    assert [where for where, sentence in found.items() if num_words(sentence) > MAX_WORDS] == []
    text = "# A heading\n\nOne two `three is code`: four; five. Six!\n\n| a | b |\n\n- [seven](x.md) eight\n  nine\n"
    assert [num_words(s) for s in sentences(text) if s] == [5, 1, 3]
