"""Refusals of requests, in OpenAI's form: {"error": {message, type, param, code}}."""

import logging
from typing import Any

from starlette.responses import JSONResponse

from nanodag.errors import BadRequest, SamplerError, SamplerLost

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable"


class Refused(Exception):
    """A request that is answered with an error. status: of HTTP; param: the field that is wrong; code: for programs."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def content(self) -> dict[str, Any]:
        """As it is sent."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.content(), status_code=self.status, headers=headers)


def refusal_of(error: BaseException) -> Refused:
    """Refusal for an error in the midst of a request."""
    match error:
        case Refused():
            return error
        case TimeoutError():
            return Refused(
                "The answer took longer than this server allows: ask for fewer tokens, or raise --request-timeout-s.",
                status=504, kind="timeout", code="timeout",
            )  # fmt: skip
        case SamplerLost():
            message = "The engine was lost in the midst of this request and is started again: send it again."
            return Refused(message, status=503, kind=UNAVAILABLE, code="engine_lost")
        case BadRequest():
            return Refused(str(error))
        case SamplerError():
            return Refused(f"The engine failed: {error}", status=500, kind="server_error")
        case _:
            log.error("A request failed", exc_info=error)
            return Refused("The server failed at this request; its log says why.", status=500, kind="server_error")
