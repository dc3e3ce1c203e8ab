"""The environment that the `verifiers` package lives in: `nanodag env install verifiers`. No torch here.

verifiers 0.4.0 needs openai < 3, mcp, anthropic and more, so it is a guest. `verifiers.txt` beside this file is the
complete list, without what its cloud sandboxes ask for beyond that.
"""

from pathlib import Path

from nanodag.external_envs.package_environment import PackageEnvironment, Say, silent

VERIFIERS = PackageEnvironment(
    name="verifiers",
    package="verifiers",
    listed=Path(__file__).with_name("verifiers.txt"),
    variable="NANODAG_VERIFIERS_PYTHON",
    command="nanodag env install verifiers",
)


def find_python() -> Path:
    """The interpreter that has verifiers: the one that NANODAG_VERIFIERS_PYTHON names, else of the environment that
    `install` made. Raises MissingTool where there is none."""
    return VERIFIERS.find_python("auto", setting="", who="verifiers lives")


def install(folder: Path, say: Say, *, show: Say = silent) -> Path:
    """Make the environment, or finish it; returns its interpreter. Raises MissingTool when a step fails. say gets what
    is begun and done, show twice a second how far it is."""
    if VERIFIERS.begin(folder, say) is not None:
        pins = VERIFIERS.pins
        say(f"The {len(pins)} packages of {VERIFIERS.listed.name}, and nothing else")
        VERIFIERS.pip(folder, ["--no-deps", "--requirement", str(VERIFIERS.listed)], len(pins), show)
        return VERIFIERS.finish(folder, say)
    return folder / "bin" / "python"
