"""The page itself: one address, whose query says what is shown. It works without JavaScript."""

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanodag.errors import NanodagError
from nanodag.host.images import IMAGES, picture_url
from nanodag.inference.access_checks import bound_socket
from nanodag.report.page import environment_of
from nanodag.report.words import legible, shortened
from nanodag.rl.rollouts.rollout_files import FAILURES, Read, Shelf, Wanted
from nanodag.tokenizer.encoding import Encoding
from nanodag.viewer.sample_view import COLOURS, TEMPLATES, Colour, grouped, groups_of

HOST = "127.0.0.1"
ON_A_PAGE = 24
LONGEST_SAID = 40  # letters
# Only the page's own script runs, whatever stands in a rollout; nothing is loaded.
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
Number = Annotated[int, Field(ge=0, lt=10**9)]  # a step has as many digits as its file's name


@dataclass(frozen=True, kw_only=True, config={"extra": "forbid", "allow_inf_nan": False})
class PageQuery(Wanted):
    """Query of the page: the rollouts to show, of which step, and how. set: `eval` for held-out prompts. text: part of
    a prompt or a response, in upper or lower case."""

    set: Literal["", "eval"] = ""
    step: Number | None = None
    prompt: Annotated[str, StringConstraints(strip_whitespace=True)] = ""
    text: str = ""
    sample: Number | None = None
    colour: Colour | None = None
    page: Annotated[Number, Field(ge=1)] = 1


def asked_of(query: Mapping[str, str]) -> PageQuery:
    """The checked query; what is empty counts as left out. Raises ValueError naming the first field that is wrong."""
    names = [field.name for field in fields(PageQuery)]
    try:
        given = {name: text for name, text in query.items() if text or name not in names}
        return TypeAdapter(PageQuery).validate_python(given)
    except ValidationError as error:
        problem = error.errors()[0]
        name, text = (shortened(str(part), LONGEST_SAID) for part in (problem["loc"][0], problem["input"]))
        if name not in names:
            raise ValueError(f"there is no {name!r} to ask for; there are {', '.join(names)}") from error
        raise ValueError(f"{name} is {text!r}: {problem['msg']}") from error


def make_app(shelf: Shelf) -> FastAPI:
    """The application that shows a stage's rollouts, with what is new each time the page is asked for."""
    app = local_app(f"Rollouts of {shelf.run}, stage {shelf.stage}")
    encoding = Encoding(shelf.model)
    environment = environment_of(TEMPLATES)
    environment.finalize = lambda value: legible(value) if type(value) is str else value  # what is markup already stays
    environment.globals["picture"] = lambda digest: picture_url(shelf.records / IMAGES, digest)
    template = environment.get_template("rollouts.html.jinja")

    @app.get("/")
    def page(request: Request) -> HTMLResponse:
        query, asked, status = dict(request.query_params), PageQuery(), 200
        try:
            asked = asked_of(query)
            shown = _page(shelf, encoding, asked)
        except (ValueError, NanodagError) as error:
            shown, status = {**_frame(shelf, shelf.steps(), asked), "error": str(error)}, 400
        nonce = secrets.token_urlsafe(16)
        policy = {"Content-Security-Policy": POLICY.format(nonce=nonce)}
        return HTMLResponse(template.render(**shown, query=query, nonce=nonce), status_code=status, headers=policy)

    return app


def local_app(title: str) -> FastAPI:
    """An application for this machine alone: a page elsewhere must not read it through a name of its own for this
    address."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


def serve(app: FastAPI, *, port: int, query: Mapping[str, str]) -> None:
    """Serve until Ctrl-C, and print the page's address with the query that says what is shown first. Raises ConfigError
    when the port is taken; port 0 takes a free one."""
    import uvicorn

    with bound_socket(HOST, port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}" + (f"/?{urlencode(query)}" if query else "")
        print(f"{app.title}: {address}", flush=True)
        print("Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(app, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


def _page(shelf: Shelf, encoding: Encoding, asked: PageQuery) -> dict[str, Any]:
    steps = shelf.steps()
    frame = _frame(shelf, steps, asked)
    if not steps and not frame["evaluations"]:
        return {**frame, "error": "No step has been trained yet; load the page again in a while."}
    reads = shelf.read(frame["step"], held_out=frame["is_held_out"])
    fates = dict(Counter(read.fate for read in reads).most_common())
    chosen = [read for read in reads if asked.is_met_by(read)]
    # A link to one sample names the whole of its prompt's id, which may be a part of others'.
    chosen = [read for read in chosen if read.rollout.prompt_id == asked.prompt] or chosen
    if asked.text:
        said = [encoding.decode([*r.rollout.prompt_token_ids, *r.rollout.response_token_ids]).lower() for r in chosen]
        chosen = [read for read, text in zip(chosen, said, strict=True) if asked.text.lower() in text]
    colour = asked.colour or ("advantage" if any(r.advantages for r in reads) else "logprob")
    number, pages = asked.page, together(chosen, ON_A_PAGE)
    if number > len(pages):
        raise ValueError(f"page is {str(number)!r}, and the last one is {len(pages)}")
    shown = pages[number - 1]
    return {
        **frame,
        "colour": colour,
        "groups": groups_of(encoding, shown, colour),
        "num_chosen": len(chosen),
        "num_all": len(reads),
        "fates": fates,
        "num_failed": sum(fates.get(fate, 0) for fate in FAILURES),
        "finish_options": [(finish, finish) for finish in sorted({r.rollout.finish_reason for r in reads})],
        "role_options": [(r, shortened(r, LONGEST_SAID)) for r in sorted({read.rollout.role for read in reads} - {""})],
        "number": number,
        "num_pages": len(pages),
        "spans": [] if frame["is_held_out"] else shelf.timeline(frame["step"]),
    }


def _frame(shelf: Shelf, steps: Sequence[Mapping[str, Any]], asked: PageQuery) -> dict[str, Any]:
    """Variables that the page has whether or not there are rollouts to show."""
    is_held_out = asked.set == "eval"
    evaluations = shelf.evaluations()
    there = evaluations if is_held_out else [int(line["step"]) for line in steps]
    step = asked.step if asked.step is not None else (there[-1] if there else 0)
    return {
        "shelf": shelf,
        "step": step,
        "there": there,
        "before": max((number for number in there if number < step), default=None),
        "after": min((number for number in there if number > step), default=None),
        "line": next((line for line in steps if line["step"] == step), {}),
        "is_held_out": is_held_out,
        "evaluations": evaluations,
        "colours": COLOURS,
        "curve": [(line["step"], line["reward"]) for line in steps if math.isfinite(line.get("reward", math.nan))],
    }


def together(reads: Sequence[Read], most: int) -> list[list[Read]]:
    """Pages of whole groups: the samples of a prompt stand together, in the order of the first of them. A page holds
    up to `most` rollouts, or one group that is larger."""
    pages: list[list[Read]] = [[]]
    for group in grouped(reads, "group_id"):
        if pages[-1] and len(pages[-1]) + len(group) > most:
            pages.append([])
        pages[-1] += group
    return pages
