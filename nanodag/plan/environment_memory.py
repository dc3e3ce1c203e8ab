"""Processes beside the controller that answer the policy: environments, agents, verifiers' process.

Measured on a CPU, pages that processes share counted once. The process of an environment 16 MB, 57 with numpy and BM25;
an episode, which is its fork, 1.8 and 3.7 of its own. That of an agent's function 51 with the package `openai`, 16
without. That of a function with turns of its own 36, and 4 for each of its forks. An agent's program in the sandbox 17.
The process of a taskset of verifiers 198, as much again for its server of tools, 1.1
for each rollout. Not counted: programs of the tool `python`, 4 each and as many as cores; what a user's own code loads,
such as a corpus.
"""

from nanodag.config.kinds.rl import RLStage
from nanodag.config.rl_entries import MAX_CALLS, GenerateConfig
from nanodag.plan.host_memory import MB
from nanodag.plan.stage_plan import Process

ENVIRONMENT = 60 * MB
EPISODE = 4 * MB
AGENT = 55 * MB
FUNCTION = 40 * MB
PROGRAM = 20 * MB
VERIFIERS = 200 * MB
VERIFIERS_ROLLOUT = 1.1 * MB


def programs_of(stage: RLStage, samples: int) -> tuple[Process, ...]:
    """The processes, as many as may run at once. samples: that are asked for together, unless the pool is kept full."""
    generate = stage.rollout.generate
    calls = min(MAX_CALLS, 2 * int(stage.sampler.max_batch))
    if stage.rollout.order != "arrival":
        calls = min(calls, samples)
    count = min(calls, _at_once(generate, calls))
    if not count:
        return ()
    prefix = generate.name.partition(":")[0]
    if prefix == "verifiers":
        return verifiers_processes(count)
    if generate.name == "agent":
        return (Process(name="agent", count=count, host={"process": PROGRAM}),)
    servers = {"environment": ENVIRONMENT, "openenv": ENVIRONMENT, "agent": AGENT}  # openenv's talks to its server
    if generate.is_one_turn or (generate.traits is not None and prefix not in servers):
        return ()
    name = "environment" if prefix == "openenv" else prefix if prefix in servers else "function"
    server = Process(name=name, host={"process": servers.get(prefix, FUNCTION)})
    return server, Process(name="episode", count=count, host={"process": EPISODE})


def verifiers_processes(rollouts: int) -> tuple[Process, ...]:
    """The process of a taskset with so many rollouts at once, and its server of tools."""
    held = {"process": VERIFIERS, "rollouts": int(rollouts * VERIFIERS_ROLLOUT)}
    return Process(name="verifiers", host=held), Process(name="verifiers' tools", host={"process": VERIFIERS})


def _at_once(generate: GenerateConfig, unbounded: int) -> int:
    """How many calls an entry lets run at a time: by its option, or what it has without one."""
    option = generate.traits.options.get("at_once") if generate.traits is not None else None
    return unbounded if option is None else int(generate.options.get("at_once", option.default))  # type: ignore[arg-type]
