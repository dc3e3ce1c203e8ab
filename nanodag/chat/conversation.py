"""A conversation in the terminal, token by token, through the sampler.

The sampler runs as its own process and streams over HTTP, exactly as for RL, so answers here are made as rollouts are.
On a terminal lines are edited and coloured; otherwise every line of standard input is one message, and standard output
has the answers alone.

Not covered: tools (their calls are shown as text), several conversations at once.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from nanodag.errors import BadRequest, SamplerError
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Request, SamplingParams
from nanodag.inference.sampler_process import SamplerProcess
from nanodag.tokenizer.chat import ChatRenderer, load_renderer

HELP = """\
/reset            forget the conversation
/system TEXT      begin again with this system message; without TEXT, with none
/temperature X    0 takes the likeliest token every time
/tokens N         the longest answer
/quit             leave; so does the end of input"""


@dataclass
class Conversation:
    """Messages so far, and how they are put to the model. context: tokens that prompt and answer may have together."""

    renderer: ChatRenderer
    context: int
    temperature: float
    max_new_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> list[int]:
        """Add a message and return the prompt's ids, the oldest exchanges left out until an answer has room.

        Raises BadRequest, with the message taken back, when it does not fit even alone.
        """
        self.messages.append({"role": "user", "content": text})
        while len(ids := self.renderer.prompt(self.messages)) + self.max_new_tokens > self.context:
            first = 1 if self.messages[0]["role"] == "system" else 0
            if len(self.messages) - first < 3:
                self.messages.pop()
                raise BadRequest(
                    f"This message and {self.max_new_tokens} tokens of answer exceed the model's {self.context}: "
                    "shorten it, or lower /tokens."
                )
            del self.messages[first : first + 2]
        return ids

    def answer(self, text: str) -> None:
        """Add what the model said."""
        self.messages.append({"role": "assistant", "content": text})

    def begin_again(self, system: str | None = None) -> None:
        """Forget the exchanges. system: a new system message, empty for none; None keeps the one there is."""
        if system is None:
            self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        else:
            self.messages = [{"role": "system", "content": system}] if system else []

    def command(self, line: str) -> str | None:
        """Run a `/command`; returns what to say of it, None for leaving."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return None
            case "/reset":
                self.begin_again()
                return "The conversation begins again."
            case "/system":
                self.begin_again(rest)
                return "The conversation begins again" + (" with this system message." if rest else ", without one.")
            case "/temperature" | "/tokens":
                return self._set(name, rest)
            case _:
                return HELP

    def _set(self, name: str, text: str) -> str:
        try:
            number = float(text) if name == "/temperature" else int(text)
        except ValueError:
            return f"{name} takes a number; found {text!r}."
        if name == "/temperature" and 0 <= number < float("inf"):
            self.temperature = float(number)
        elif name == "/tokens" and 1 <= number < self.context:
            self.max_new_tokens = int(number)
        else:
            return f"{number:g} is out of range for {name}."
        return f"{name.removeprefix('/')}: {number:g}"


def chat(model_folder: Path, *, temperature: float = 0.8, max_new_tokens: int = 256, device: str = "cpu") -> int:
    """Talk to a model until /quit or the end of input; returns the exit code. Ctrl-C ends an answer.

    Raises SourceError for a folder without tokenizer or chat template, SamplerLost when the sampler cannot start.
    """
    console = Console(highlight=False)
    renderer = load_renderer(model_folder)
    is_terminal = sys.stdin.isatty()
    with tempfile.TemporaryDirectory(prefix="nanodag-chat-") as folder:
        if is_terminal:
            console.print(f"[dim]Loading {model_folder} ... (/help for commands)[/dim]")
        with _interrupts_kept_away():
            token = secrets.token_hex(16)
            log_path = Path(folder) / "log"
            sampler = SamplerProcess.start(model_folder, log_path=log_path, device=device, max_batch=1, token=token)
        with sampler, asyncio.Runner() as runner:
            client = SamplerClient(sampler.url, token=token)
            try:
                context = int(runner.run(client.model_info())["context_length"])
                longest = min(max_new_tokens, max(1, context // 2))
                conversation = Conversation(renderer, context, temperature, longest)
                lines = _typed(console) if is_terminal else (line.rstrip("\n") for line in sys.stdin)
                return _converse(conversation, lines, client, runner, console, is_terminal=is_terminal)
            except SamplerError as error:
                console.print(f"{error}\n{sampler.last_log_lines()}", style="red", markup=False)
                return 1
            finally:
                runner.run(client.close())


def _converse(
    conversation: Conversation,
    lines: Iterator[str],
    client: SamplerClient,
    runner: asyncio.Runner,
    console: Console,
    *,
    is_terminal: bool,
) -> int:
    def say(text: str) -> None:
        console.out(text, end="", highlight=False)

    for line in lines:
        if not line.strip():
            continue
        if line.startswith("/"):
            reply = conversation.command(line)
            if reply is None:
                break
            if is_terminal:
                console.print(reply, style="dim", markup=False)
            else:
                print(reply, file=sys.stderr)
            continue
        try:
            ids = conversation.ask(line)
        except BadRequest as error:
            print(error, file=sys.stderr)
            continue
        if is_terminal:
            console.print("[bold green]model[/bold green]  ", end="")
        pieces: list[str] = []
        with contextlib.suppress(KeyboardInterrupt):  # the answer so far stays part of the conversation
            runner.run(_stream(client, conversation, ids, pieces, say))
        say("\n\n" if is_terminal else "\n")
        conversation.answer("".join(pieces))
    return 0


async def _stream(
    client: SamplerClient, conversation: Conversation, ids: list[int], said: list[str], say: Callable[[str], None]
) -> None:
    """Say an answer as it comes, and collect its pieces."""
    params = SamplingParams(
        max_new_tokens=conversation.max_new_tokens,
        temperature=conversation.temperature,
        stop_token_ids=conversation.renderer.stop_ids,
    )
    num_said = 0
    async for completion in client.stream(Request(input_ids=ids, params=params, return_logprob=False)):
        text = completion.text or ""
        if completion.finish_reason is None:
            # A token may end inside a character: what is not whole yet decodes to U+FFFD and waits for the next.
            text = text.rstrip("\ufffd")
        if len(text) > num_said:
            piece, num_said = text[num_said:], len(text)
            said.append(piece)
            say(piece)


def _typed(console: Console) -> Iterator[str]:
    """Lines typed at the terminal, with the editing that readline gives where it is there."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it is what makes input() edit lines
    while True:
        try:
            yield console.input("[bold blue]you[/bold blue]    ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


@contextlib.contextmanager
def _interrupts_kept_away() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: it is meant for the answer under way, not for the sampler."""
    # A child inherits the mask of blocked signals, and the handlers that a server installs do not unblock them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
