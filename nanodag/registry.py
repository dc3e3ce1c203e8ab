"""Named entries: what a config may choose for each part of the algorithm.

An entry is a function, or a class whose objects are called like one. `@entry(kind, name, ...)` above it gives it its
name and its traits; its options are the keyword-only parameters of its signature. Both are read from the source, so
that a config is checked without importing torch: a new entry is one function in one file of ROOMS.

A config names one of ours (`grpo`), a user's own by import path (`my_package.module:function`), or one made from an
argument (`remote:http://...`). The same contract holds for all; tests/rl/test_contracts.py runs over ours.
"""

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from nanodag.errors import ConfigError
from nanodag.errors.words import listed, nearest
from nanodag.host.beside import table_beside
from nanodag.own_code.functions import function_at
from nanodag.own_code.user_frame import with_place

# Files of this package that hold entries.
ROOMS = (
    *("rewards/**/*.py", "rl/advantages.py", "rl/losses.py", "rl/rollouts/**/*.py", "rl/environments/**/*.py"),
    *("train/optimizers/**/*.py", "train/preference.py"),
)
REQUIRED = "required"
FROM_INPUT = "input:"  # before the input of a stage that a folder is
EXAMPLES = "nanodag.rl.environments.examples."  # what is named from there is ours
NAMED = "named"  # the keyword by which a `generate` that takes an argument gets it; it is no option
# What a function of each kind is called with, positionally; one after a prefix has a line of its own.
CALLED_WITH: Mapping[str, Sequence[str]] = table_beside(__file__, "called_with.yaml")
KINDS = tuple(kind for kind in CALLED_WITH if kind not in ("group", "process", "environment"))
_TYPES: dict[str, Any] = {"float": (int, float), "int": int, "bool": bool, "str": str, "Sequence[str]": (list, tuple)}
_IN_WORDS = {"Sequence[str]": "a list of texts"}
_EXAMPLES = {"int": "4", "bool": "true", "str": "TEXT", "Sequence[str]": "[python, agent.py]"}  # others: 0.5

F = TypeVar("F", bound=Callable[..., Any])
Argument = Literal["", "url", "function", "module", "folder", "file"]
MODULE_NAME = re.compile(r"[A-Za-z_]\w*(-\w+)*")  # of a guest's module, as its package may write it


@dataclass(frozen=True, kw_only=True)
class Option:
    """A keyword-only parameter; of a user's own function also one after those that it is called with. type: as it is
    written. default: likewise, REQUIRED where there is none."""

    type: str
    default: str

    def fits(self, value: Any) -> bool:
        """Whether a config may give this value."""
        if self.type.startswith("Literal["):
            return value in ast.literal_eval(self.type.removeprefix("Literal"))
        allowed = _TYPES.get(self.type)
        return allowed is None or (isinstance(value, allowed) and isinstance(value, bool) == (self.type == "bool"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Traits of an entry, as its source says them.

    path: `module:function`. words: the first line of its docstring.
    compares_groups: an advantage that compares the samples of one prompt. takes_steps: an advantage that is defined
    where a reward scores single steps; scores_steps: such a reward. needs_critic: an advantage that asks PPO's critic.
    needs_reference: a preference loss that asks what the stage began with. judges_alone: a preference loss of
    single answers; a row may have one, and its reference is raised by the reference point. needs_sandbox: it runs
    programs. is_of_generate: a reward that `generate` reports. least_timeout_s: what a reward needs to find a program
    that hangs wrong. reads_metadata: of a prompt, for a reward. argument: what the name resumes after a colon, as in
    `remote:http://...`. passes_on: options that it does not know go to what its argument names.
    """

    path: str
    words: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    compares_groups: bool = False
    takes_steps: bool = False
    scores_steps: bool = False
    needs_critic: bool = False
    needs_reference: bool = False
    judges_alone: bool = False
    needs_sandbox: bool = False
    is_of_generate: bool = False
    least_timeout_s: float = 0.0
    reads_metadata: tuple[str, ...] = ()
    argument: Argument = ""
    passes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Entry):
    """Traits of an optimizer, as its source says them.

    takes_all: it updates all weights; else matrices in the layers, at a rate of their own, and AdamW the rest.
    states: float32 numbers that it keeps of each weight that it updates. offloads: it may update in host memory.
    work_copies: of at most work_elements elements, in the training precision, that an update works in.
    dial_divisor: its rate is the dial's for matrices, which is Muon's, divided by this.
    """

    takes_all: bool = False
    states: int
    offloads: bool = False
    work_copies: int = 0
    work_elements: int = 0
    dial_divisor: float = 1.0


def entry(kind: str, name: str, **traits: bool | int | float | str | tuple[str, ...]) -> Callable[[F], F]:
    """Name a function, and say what the config's checks must know of it (see Entry and OptimizerEntry). Arguments are
    literals, because they are read from the source."""
    return lambda function: function


def entries_of(kind: str) -> dict[str, Entry]:
    """Entries of a kind by name that nanodag ships."""
    return _shipped()[kind]


def check_reward_of_data(name: str, mend: str) -> None:
    """Raise ConfigError for a reward that a prompt may not ask for: data name neither code nor an address."""
    if name not in names("reward"):
        ours = ", ".join(names("reward"))
        raise ConfigError(
            f"A prompt asks for the reward {name}, and data may only ask for those that come with nanodag ({ours}): "
            f"{mend}."
        )


def optimizer_named(name: str) -> OptimizerEntry:
    """The optimizer of a name, without importing it."""
    spec = entries_of("optimizer")[name]
    assert isinstance(spec, OptimizerEntry)
    return spec


@cache
def _shipped() -> dict[str, dict[str, Entry]]:
    package = Path(__file__).parent
    entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
    for file in sorted(path for room in ROOMS for path in package.glob(room)):
        text = file.read_text(encoding="utf-8")
        if "\n@entry(" not in text:
            continue
        module = ".".join((package.name, *file.relative_to(package).with_suffix("").parts))
        for node in ast.parse(text).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "entry":
                    kind, name = map(ast.literal_eval, call.args)
                    of_kind = OptimizerEntry if kind == "optimizer" else Entry
                    spec = _read(node, f"{module}:{node.name}", call, of_kind)  # type: ignore[attr-defined]
                    name += ":" if spec.argument else ""  # the same name may stand without an argument, too
                    assert name not in entries[kind], f"two entries of kind {kind} are called {name}"
                    entries[kind][name] = spec
    return entries


def _read(node: ast.stmt, path: str, call: ast.Call, of_kind: type[Entry]) -> Entry:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    options = {}
    inside = node.body if isinstance(node, ast.ClassDef) else [node]
    for made_by in (n for n in inside if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        if isinstance(node, ast.ClassDef) and made_by.name != "__init__":
            continue
        for parameter, default in zip(made_by.args.kwonlyargs, made_by.args.kw_defaults, strict=True):
            if parameter.arg == NAMED:
                continue
            kind = ast.unparse(parameter.annotation) if parameter.annotation else "any"
            options[parameter.arg] = Option(type=kind, default=ast.unparse(default) if default else REQUIRED)
    passes_on = not isinstance(node, ast.ClassDef) and node.args.kwarg is not None
    traits = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    words = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return of_kind(path=path, words=words, options=options, passes_on=passes_on, **traits)


def names(kind: str) -> tuple[str, ...]:
    """The names of one kind that nanodag ships."""
    return tuple(name for name, spec in entries_of(kind).items() if not spec.argument)


def is_shipped(path: str) -> bool:
    """Whether `module:function` is an entry of ours; one that takes an argument is named with it, never by its path."""
    return any(spec.path == path and not spec.argument for kind in KINDS for spec in entries_of(kind).values())


def find(kind: str, name: str) -> Entry | None:
    """The entry of ours that a name means, with an argument or without; None for a user's own function.

    Raises ConfigError for a name that is neither.
    """
    shipped = entries_of(kind)
    prefix, _, argument = name.partition(":")
    spec = shipped.get(f"{prefix}:" if argument else name)
    if spec is not None:
        _check_argument(kind, prefix, spec.argument, argument)
        return spec
    if _is_path(name):
        return None
    choices = ", ".join(names(kind))
    raise ConfigError(
        f"there is no {_said(kind)} {name!r:.80}; choose one of {choices}, or name a function of your own as "
        f"package.module:function.{nearest(name, names(kind))}"
    )


def own_function(kind: str, name: str) -> str:
    """`module:function` of the user's own function that a name means, alone or after a prefix; empty for ours."""
    spec = find(kind, name)
    if spec is None:
        return name
    path = name.partition(":")[2] if spec.argument == "function" else ""
    return "" if path.startswith(EXAMPLES) else path


def own_argument(kind: str, name: str, form: Argument) -> str:
    """Argument behind a name's colon where it is of that form, as the user's `file` of `judge:` or a guest's `module`
    of `verifiers:`; empty otherwise."""
    spec = find(kind, name)
    return name.partition(":")[2] if spec is not None and spec.argument == form else ""


def load(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function of an entry; with its options set, where a mapping of them is given. Raises ConfigError for one that
    cannot be imported, options that it does not take or lacks, and a `generate` that is not `async def`."""
    spec = find(kind, name)
    function = _imported(kind, name)
    argument = name.partition(":")[2] if spec is not None and spec.argument else ""
    if kind == "generate" and argument:
        return partial(function, **{NAMED: argument}, **(options or {}))
    if kind == "generate" and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"generate {name!r} must be an `async def` function; found {function!r:.100}.")
    of_class = spec is not None and argument and spec.options
    if options is not None:
        _check_options(kind, name, options, spec.options if spec and of_class else _options_of(kind, function))
    own = options if options and of_class else {}
    made: Any = function if spec is None or not argument else function_at(spec.path)(argument, **own)
    if not options or of_class:
        return made
    if made is not function:  # an object that holds the user's function
        made.function = partial(made.function, **options)
        return made
    return partial(function, **options)


def options_taken(kind: str, name: str) -> set[str] | None:
    """The names of the options of an entry; of a user's own function, which is imported for it, None for any."""
    spec = find(kind, name)
    takes = spec.options if spec is not None else _options_of(kind, _imported(kind, name))
    return None if takes is None else set(takes)


def _imported(kind: str, name: str) -> Callable[..., Any]:
    """The function of ours or of the user's that a name means, alone or after a prefix; of another prefix, the
    class."""
    spec = find(kind, name)
    path = own_function(kind, name) or (spec.path if spec else name)
    if kind == "generate" and spec is not None:  # what it names is run elsewhere
        path = spec.path
    try:
        return function_at(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {_said(kind)} {path!r} cannot be imported: {with_place(error)}. Check the spelling, and that the "
            "module lies beside the pipeline file, is installed, or is on PYTHONPATH."
        ) from error


def check_options(kind: str, name: str, options: Mapping[str, Any], settings: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a name that does not exist, and for options that an entry of ours does not take, or needs
    and is not given. settings: options that have a field of their own, and its name. Imports nothing."""
    spec, settings = find(kind, name), settings or {}
    for option in options:
        if option in settings:
            raise ConfigError(f"{option} of {_said(kind)} {name} is the setting {settings[option]}; set it there.")
    if spec is None or (spec.argument == "function" and kind != "generate"):
        return  # the function's own signature is asked when it is loaded
    takes = {key: parameter for key, parameter in spec.options.items() if key not in settings}
    _check_options(kind, name, {k: v for k, v in options.items() if k in takes or not spec.passes_on}, takes)
    if kind == "filter" and takes and not options:
        raise ConfigError(_wrong_options(kind, name, "needs an option, or it would drop nothing", takes))


def _options_of(kind: str, function: Callable[..., Any]) -> dict[str, Option] | None:
    """Options of a function that is imported; None where any are taken, or where it does not say."""
    if inspect.isclass(function):  # made with the argument alone
        return {}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C
        return None
    if any(arg.kind is arg.VAR_KEYWORD for arg in parameters):
        return None
    called_with = parameters[: len(CALLED_WITH[kind])]
    return {
        arg.name: Option(type="any", default=REQUIRED if arg.default is arg.empty else repr(arg.default))
        for arg in parameters
        if arg.kind is arg.KEYWORD_ONLY
        or (arg.kind is arg.POSITIONAL_OR_KEYWORD and (arg.default is not arg.empty or arg not in called_with))
    }


def _check_options(kind: str, name: str, options: Mapping[str, Any], takes: Mapping[str, Option] | None) -> None:
    if takes is None:
        return
    if unknown := sorted(options.keys() - takes.keys()):
        raise ConfigError(_wrong_options(kind, name, f"has no option {unknown[0]!r}", takes))
    if missing := sorted(key for key, option in takes.items() if option.default == REQUIRED and key not in options):
        raise ConfigError(_wrong_options(kind, name, f"needs the option {missing[0]!r}", takes, missing[0]))
    for key, value in options.items():
        if not takes[key].fits(value):
            words = _IN_WORDS.get(takes[key].type, takes[key].type)
            raise ConfigError(_wrong_options(kind, name, f"takes {key} as {words}, not {value!r:.80}", takes, key))


def _wrong_options(kind: str, name: str, what: str, takes: Mapping[str, Option], option: str = "") -> str:
    """option: that the example is of; the first one unless given."""
    option = option or min(takes, default="")
    value = _EXAMPLES.get(takes[option].type, "0.5") if option else ""
    example = f", as in {{name: {name}, options: {{{option}: {value}}}}}" if option else ""
    return f"The {_said(kind)} {name!r} {what}; it takes {listed(sorted(takes)) if takes else 'no options'}{example}."


def _said(kind: str) -> str:
    return kind.replace("_", " ")


def _is_path(name: str) -> bool:
    module, _, function = name.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _check_argument(kind: str, prefix: str, form: Argument, argument: str) -> None:
    is_right, words = {
        "": (True, ""),
        "url": (argument.startswith(("http://", "https://")), "a URL that begins with http:// or https://"),
        "function": (_is_path(argument), f"a function as {prefix}:package.module:function"),
        "module": (MODULE_NAME.fullmatch(argument), f"a module as {prefix}:my_module"),
        "folder": (
            argument.startswith(("/", FROM_INPUT)) and argument != FROM_INPUT,
            f"the absolute path of a Hugging Face directory, or {FROM_INPUT}NAME, an input of the stage",
        ),
        "file": (argument.startswith("/"), "the absolute path of a file"),
    }[form]
    if not is_right:
        raise ConfigError(f"The {kind} {prefix}:{argument} needs {words}.")
