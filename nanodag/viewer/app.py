"""The page itself: one address, whose query says what is shown. It works without JavaScript."""

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanodag.errors import NanodagError
from nanodag.inference.access_checks import bound_socket
from nanodag.report.page import TEMPLATES
from nanodag.report.words import legible, shortened
from nanodag.rl.rollouts.rollout_files import Shelf
from nanodag.viewer.sample_view import COLOURS, Colour, Painter
from nanodag.viewer.view import LONGEST_SAID, fate_choices, timeline_svg, together, wanted_of

HOST = "127.0.0.1"
ON_A_PAGE = 24
# Only the page's own script runs, whatever stands in a rollout; nothing is loaded.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
# What a query may have, and how its values look. A step has as many digits as its file's name.
PARAMETERS = {
    "set": "eval",
    "step": "[0-9]{1,9}",
    **dict.fromkeys(("lowest", "highest", "fate", "finish", "role", "prompt"), "(?s:.*)"),
    "sample": "[0-9]{1,9}",
    "colour": "|".join(COLOURS),
    "page": "[1-9][0-9]{0,8}",
}
WHAT = {"step": "number of a step", "sample": "number of a sample", "page": "number of a page"}
COLUMNS = (
    ("reward", "reward"),
    ("pass_rate", "pass rate"),
    ("response_tokens", "tokens"),
    ("staleness", "staleness"),
    ("mismatch_absolute", "|mismatch|"),
    ("seconds_step", "seconds"),
)


def make_app(shelf: Shelf) -> FastAPI:
    """The application that shows a stage's rollouts, with what is new each time the page is asked for."""
    app = FastAPI(title=f"Rollouts of {shelf.run}", docs_url=None, redoc_url=None, openapi_url=None)
    # a page elsewhere must not read this one through a name of its own for this address
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    painter = Painter(shelf.model)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent / "templates", TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: legible(value) if type(value) is str else value,  # what is markup already stays
    )
    template = environment.get_template("rollouts.html.jinja")

    @app.get("/")
    def page(request: Request) -> HTMLResponse:
        query, status = dict(request.query_params), 200
        try:
            shown = _page(shelf, painter, query)
        except (ValueError, NanodagError) as error:
            shown, status = {**_frame(shelf, shelf.steps(), query), "error": str(error)}, 400
        nonce = secrets.token_urlsafe(16)
        policy = {"Content-Security-Policy": POLICY.format(nonce=nonce)}
        return HTMLResponse(template.render(**shown, nonce=nonce), status_code=status, headers=policy)

    return app


def serve(shelf: Shelf, *, port: int, query: Mapping[str, str]) -> None:
    """Serve until Ctrl-C, and print the page's address with the query that says what is shown first. Raises ConfigError
    when the port is taken; port 0 takes a free one."""
    import uvicorn

    with bound_socket(HOST, port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}" + (f"/?{urlencode(query)}" if query else "")
        print(f"Rollouts of {shelf.run}, stage {shelf.stage}: {address}", flush=True)
        print("Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(make_app(shelf), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


def _page(shelf: Shelf, painter: Painter, query: Mapping[str, str]) -> dict[str, Any]:
    refuse_odd(query)
    steps = shelf.steps()
    frame = _frame(shelf, steps, query)
    if not steps and not frame["evaluations"]:
        return {**frame, "error": "No step has been trained yet; load the page again in a while."}
    reads = shelf.read(frame["step"], held_out=frame["is_held_out"])
    fates, criteria = dict(Counter(read.fate for read in reads).most_common()), wanted_of(query)
    chosen = [read for read in reads if criteria.is_met_by(read)]
    unasked: Colour = "advantage" if any(r.advantages for r in reads) else "logprob"
    colour = next((colour for colour in COLOURS if colour == query.get("colour")), unasked)
    number, pages = int(query.get("page") or 1), together(chosen, ON_A_PAGE)
    if number > max(1, len(pages)):
        raise ValueError(f"page is {query['page']!r}, and the last one is {max(1, len(pages))}")
    shown = pages[number - 1] if pages else []
    return {
        **frame,
        "colour": colour,
        "groups": painter.groups(shown, colour),
        "num_chosen": len(chosen),
        "num_all": len(reads),
        "fates": fates,
        "fate_options": fate_choices(fates),
        "finish_options": [(finish, finish) for finish in sorted({r.rollout.finish_reason for r in reads})],
        "role_options": [(r, shortened(r, LONGEST_SAID)) for r in sorted({read.rollout.role for read in reads} - {""})],
        "number": number,
        "num_pages": len(pages),
        "timeline": "" if frame["is_held_out"] else timeline_svg(shelf.timeline(frame["step"])),
    }


def refuse_odd(query: Mapping[str, str]) -> None:
    """Raise ValueError for what is no parameter of the page, or no value that one may have; what is empty may stay."""
    for name, text in query.items():
        if name not in PARAMETERS:
            raise ValueError(
                f"there is no {shortened(name, LONGEST_SAID)!r} to ask for; there are {', '.join(PARAMETERS)}"
            )
        if text and not re.fullmatch(PARAMETERS[name], text):
            raise ValueError(f"{name} is {shortened(text, LONGEST_SAID)!r}, which is no {WHAT.get(name, name)}")


def _frame(shelf: Shelf, steps: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Variables that the page has whether or not there are rollouts to show."""
    is_held_out = query.get("set") == "eval"
    evaluations = shelf.evaluations()
    there = evaluations if is_held_out else [int(line["step"]) for line in steps]
    step_text = query.get("step", "")
    step = int(step_text) if re.fullmatch(PARAMETERS["step"], step_text) else (there[-1] if there else 0)
    return {
        "shelf": shelf,
        "step": step,
        "there": there,
        "before": max((number for number in there if number < step), default=None),
        "after": min((number for number in there if number > step), default=None),
        "line": next((line for line in steps if line["step"] == step), {}),
        "is_held_out": is_held_out,
        "evaluations": evaluations,
        "columns": [(name, title) for name, title in COLUMNS if any(name in line for line in steps)],
        "query": query,
        "colours": COLOURS,
    }
