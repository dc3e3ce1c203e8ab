"""Draws docs/images/run.svg, the live table of a run, during it: .venv/bin/python .ci/picture.py STORE RUN"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from nanodag.cli.live_table import StageTable
from nanodag.run.progress import progress_of
from nanodag.store import Store

url, run = sys.argv[1:]
store = Store(url)
record = store.find_run(run)
if record is None:
    sys.exit(f"{url} has no run {run!r}")
console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True, highlight=False)
console.print(StageTable(progress_of(store, record)))
svg = console.export_svg(title="nanodag run")
# Without rich's fonts, which browsers would fetch from elsewhere: they show one of their own.
Path("docs/images/run.svg").write_text(re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")
