"""`python -m nanodag.chat FOLDER [--message TEXT]`: talk to a checkpoint in the terminal, token by token.

The engine runs as its own process, exactly as for `nanodag serve` and RL, so answers here are made as everywhere. On a
terminal lines are edited, kept in a history and coloured; otherwise every line of standard input is one message, and
standard output has the answers alone.

Not covered: several conversations at once, and changing an earlier message; the web chat has both.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from nanodag.api.bodies import ChatBody
from nanodag.api.choice import ParsedAnswer
from nanodag.api.command import parse_arguments
from nanodag.api.launching import served_model, with_its_context
from nanodag.api.prompt_rendering import ChatPrompt, chat_prompt
from nanodag.api.refusals import Refused
from nanodag.api.served_model import ServedModel
from nanodag.api.tool_format import Call
from nanodag.chat.tools import DEFAULT_TOOLS, DEFINITIONS, MAX_ROUNDS, TOOLS, call, why_not
from nanodag.engines.fleet import Fleet
from nanodag.errors import BadRequest, NanodagError, SamplerError, SourceError
from nanodag.host.folders import Scratch, state_folder
from nanodag.inference.protocol import Request, SamplingParams

HELP = """\
/reset            forget the conversation
/history          send earlier messages too, or each message alone
/system TEXT      begin again with this system message; without TEXT, with none
/tools NAME ...   what the model may call: calculator, python; without NAME, nothing
/temperature X    0 takes the likeliest token every time
/tokens N         the longest answer
/quit             leave; so does the end of input"""
ALONE = "It was trained on single questions: each message is sent alone. /history changes that."
NO_TOOLS = "It never saw a tool called, and is offered none; /tools offers some."
TEMPERATURE = 0.8  # until another one is set
MAX_LINES = 1000  # of the history
# An editor must know which characters have no width.
BLUE, PLAIN = "\x01\x1b[1;34m\x02", "\x01\x1b[0m\x02"


@dataclass
class Dialogue:
    """Messages so far, as the OpenAI API has them, and how they are put to the model.

    render: makes a prompt of a request; raises Refused. context: tokens that prompt and answer may have together.
    is_alone: each message is sent without those before it. tools: names of those that the model may call. toolless: why
    it may call none though it was asked to.
    """

    render: Callable[[ChatBody], ChatPrompt]
    context: int
    temperature: float
    max_new_tokens: int
    is_alone: bool = False
    tools: tuple[str, ...] = DEFAULT_TOOLS
    toolless: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add a message of the user, or begin again with it where it is sent alone."""
        if self.is_alone:
            self.begin_again()
        self.messages.append({"role": "user", "content": text})

    def prompt(self) -> ChatPrompt:
        """The next request's messages, the oldest exchanges left out until an answer has room. Raises BadRequest, with
        the last question taken back, when it does not fit even alone or cannot be rendered."""
        while True:
            tools = [DEFINITIONS[name] for name in self.tools]
            try:
                prompt = self.render(ChatBody.model_validate({"messages": self.messages, "tools": tools}))
            except Refused as refused:
                if tools and refused.param == "tools":  # the model cannot be offered them
                    self.tools, self.toolless = (), str(refused)
                    continue
                del self.messages[self._questions()[-1] :]
                raise BadRequest(str(refused)) from refused
            if len(prompt.ids) + self.max_new_tokens <= self.context:
                return prompt
            first, *later = self._questions()
            if not later:
                del self.messages[first:]
                raise BadRequest(
                    f"This message and {self.max_new_tokens} tokens of answer exceed the model's {self.context}: "
                    "shorten it, or lower /tokens."
                )
            del self.messages[first : later[0]]

    def _questions(self) -> list[int]:
        return [place for place, message in enumerate(self.messages) if message["role"] == "user"]

    def answer(self, text: str, calls: Sequence[Call] = (), results: Sequence[str] = ()) -> None:
        """Add what the model said, the calls that it made then, and what came of them."""
        made = [
            {"id": f"call-{len(self.messages)}-{number}", "function": asdict(tool_call)}
            for number, tool_call in enumerate(calls)
        ]
        self.messages.append({"role": "assistant", "content": text} | ({"tool_calls": made} if made else {}))
        for tool_call, result in zip(made, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})

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
            case "/history":
                self.is_alone = not self.is_alone
                return "Each message is sent alone." if self.is_alone else "Earlier messages are sent too."
            case "/system":
                self.begin_again(rest)
                return "The conversation begins again" + (" with this system message." if rest else ", without one.")
            case "/tools":
                return self.offer(rest.split())
            case "/temperature" | "/tokens":
                return self._set(name, rest)
            case _:
                return HELP

    def offer(self, names: Sequence[str]) -> str:
        """Let the model call these tools; returns what to say of it."""
        for name in names:
            if name not in TOOLS:
                return f"There is no tool {name!r}; there are {', '.join(TOOLS)}."
            if why := why_not(name):
                return why
        self.tools, self.toolless = tuple(names), ""
        return f"The model may call: {', '.join(names)}." if names else "The model may call nothing."

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


def _shown(arguments: str) -> str:
    """The text of a call with one text, else the arguments as they came."""
    try:
        values = list(json.loads(arguments).values())
    except (ValueError, AttributeError):
        return arguments
    return str(values[0]) if len(values) == 1 else arguments


def chat(options: argparse.Namespace) -> int:
    """Talk to a model until /quit or the end of input; returns the exit code. Ctrl-C ends an answer.

    options: as of `main`.
    Raises SourceError for a folder without tokenizer or chat template, SamplerLost when the engine cannot start.
    """
    console, folder, message = Console(highlight=False), options.folder, options.message
    is_terminal = message is None and sys.stdin.isatty()
    with Scratch("chat") as logs, asyncio.Runner() as runner:
        args = parse_arguments([f"--model=model={folder}", "--max-batch=1", f"--device={options.device}"])
        model = served_model(args, folder.name, folder, folder.name, logs, first=0, num_models=1)
        if model.renderer is None:
            raise SourceError(f"The tokenizer in {folder} has no chat template, so it cannot be talked to.")
        if is_terminal:
            told = f"{ALONE if options.alone else ''} {NO_TOOLS if options.no_tools else ''}".strip()
            told = "\n".join([told, *(f"Its pipeline asks: {example}" for example in options.example)]).strip()
            console.print(f"Loading {folder} ... (/help for commands) {told}", style="dim", markup=False)
        engines = model.backend
        assert isinstance(engines, Fleet)
        try:
            # The engine never sees Ctrl-C, which is meant for the answer under way: a child inherits the mask of
            # blocked signals, and the handlers that a server installs do not unblock them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                runner.run(engines.start(1))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            model = runner.run(with_its_context(model))
            longest = min(options.max_new_tokens, max(1, model.context_length // 2))
            tools = () if options.no_tools else DEFAULT_TOOLS
            render, context = partial(chat_prompt, model), model.context_length
            conversation = Dialogue(render, context, TEMPERATURE, longest, is_alone=options.alone, tools=tools)
            talk = Talk(conversation, model, runner, console, is_terminal)
            if message is not None:
                return 0 if talk.hears(sys.stdin.read() if message == "-" else message) else 1
            lines = typed_lines("you") if is_terminal else (line.rstrip("\n") for line in sys.stdin)
            return talk.goes_on(lines)
        except SamplerError as error:
            console.print(str(error), style="red", markup=False)
            return 1
        finally:
            runner.run(engines.end())


@dataclass(frozen=True)
class Talk:
    """A conversation with a model, and where it is shown: on a terminal, or with nothing but the answers on standard
    output."""

    conversation: Dialogue
    model: ServedModel
    runner: asyncio.Runner
    console: Console
    is_terminal: bool

    async def answer(self) -> None:
        """Say the answer to the last question as it comes, carrying out the tools that it calls. What was said stays
        said when this is cancelled. Raises BadRequest for a question that cannot be put, SamplerError."""
        conversation = self.conversation
        for number in range(MAX_ROUNDS + 1):
            was_offered = bool(conversation.tools)
            prompt = conversation.prompt()
            if was_offered and conversation.toolless:
                self._tell(f"Asked without tools: {conversation.toolless}")
            answer, text = ParsedAnswer(self.model.tokens, prompt.reader(), stops=()), ""
            params = SamplingParams(
                max_new_tokens=conversation.max_new_tokens,
                temperature=conversation.temperature,
                stop_token_ids=prompt.stop_ids,
            )
            request = Request(input_ids=prompt.ids, params=params, return_logprob=False)
            results: list[str] = []
            try:
                async with aclosing(self.model.backend.answer(request, stream=True)) as completions:
                    async for completion in completions:
                        answer.take(completion)
                        piece = answer.new().content
                        text += piece
                        self._say(piece)
                if number < MAX_ROUNDS:
                    results = [await self._carried_out(tool_call) for tool_call in answer.calls]
            finally:
                conversation.answer(text, answer.calls if results else (), results)
            if not answer.calls:
                return
        self._tell(f"Ended: it called tools in more than {MAX_ROUNDS} rounds.")

    async def _carried_out(self, tool_call: Call) -> str:
        result = await asyncio.to_thread(call, tool_call.name, tool_call.arguments)
        self._tell(f"{tool_call.name}: {_shown(tool_call.arguments)} = {result}")
        return result

    def _say(self, text: str) -> None:
        self.console.out(text, end="", highlight=False)

    def _tell(self, text: str) -> None:
        if self.is_terminal:
            self.console.print(f"\n{text}", style="dim", markup=False)
        else:
            print(text, file=sys.stderr)

    def goes_on(self, lines: Iterator[str]) -> int:
        """Hear these lines, commands among them, to their end; returns the exit code."""
        all_heard = True
        for line in lines:
            if line.startswith("/"):
                reply = self.conversation.command(line)
                if reply is None:
                    break
                self._tell(reply)
            elif line.strip():
                all_heard = self.hears(line) and all_heard
        return 0 if all_heard or self.is_terminal else 1

    def hears(self, text: str) -> bool:
        """Answer one message; False where it could not be put to the model."""
        self.conversation.ask(text)
        if self.is_terminal:
            self.console.print("[bold green]model[/bold green]  ", end="")
        try:
            with contextlib.suppress(KeyboardInterrupt):  # the answer so far stays part of the conversation
                self.runner.run(self.answer())
        except BadRequest as error:
            print(error, file=sys.stderr)
            return False
        self._say("\n\n" if self.is_terminal else "\n")
        return True


def typed_lines(who: str) -> Iterator[str]:
    """Lines as they are typed, each asked for with a name, until the end of input or Ctrl-C. As far as Python has
    readline they are edited, and kept for later chats; a folder that cannot be written to keeps none."""
    editor: ModuleType | None = None
    with contextlib.suppress(ImportError):
        import readline as editor
    path = state_folder() / "chat-history"
    prompt = f"{who}    " if editor is None or "NO_COLOR" in os.environ else f"{BLUE}{who}{PLAIN}    "
    if editor is not None:
        with contextlib.suppress(OSError):
            editor.read_history_file(path)
        editor.set_history_length(MAX_LINES)
    try:
        while True:
            yield input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        if editor is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                editor.write_history_file(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nanodag.chat", description="Talk to a checkpoint in the terminal.")
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--message", metavar="TEXT", help="the only one; - for the whole of standard input")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="the longest answer")
    parser.add_argument("--alone", action="store_true", help="each message without those before it")
    parser.add_argument("--no-tools", action="store_true", help="offer none at first")
    parser.add_argument("--example", action="append", default=[], metavar="TEXT", help="a question to begin with")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    try:
        return chat(parser.parse_args())
    except NanodagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
