"""Description of a kind of stage, in one place: everything that asks "which kinds" asks this."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanodag.config.stage_base import StageBase

MODEL, TOKENIZER, SCORES, PAGE, NOTHING = "model", "tokenizer", "scores", "page", "nothing"
CONVERSATIONS, REWARD_MODEL = "conversations", "reward_model"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of stage. A user's own is another object of this class (nanodag.config.kinds says where it stands).

    name: what it is called; of a shipped or installed kind also what a pipeline says as `kind`.
    config: the class of its stages' config.
    module: its worker, which `python -m` runs with the path of job.json (nanodag.worker.job).
    code_version: raised by hand when the kind's code changes what it makes, so that older artifacts no longer count.
    makes: what its artifacts are. `model` and `tokenizer`: a Hugging Face directory. `scores`: results.json and
        samples/ about the input `model`, as nanodag.evaluation writes them. `conversations`: rows.jsonl, which training
        reads as a source. `reward_model`: a Hugging Face directory that scores answers. `page`: report.md, over the
        stages before it. `nothing`, or a word of the user's own: what no shipped kind takes.
    needs: inputs that a stage must name -> what each must be, in the words of `makes`. may_take: others that it may.
    takes_what_exists: it takes any stages under any names, and is run although some of them failed, on the others.
    trains: it puts tokens through a model forward and backward, on as many machines as resources.nodes says.
    has_ranks: the launcher starts resources.num_ranks processes of it; otherwise the worker starts what it needs.
    is_beside: it runs beside the next stage, at low priority; on GPUs before it.
    is_on_cpu: it multiplies no matrices, so that it never holds a GPU unless it is told to.
    label: of its models in tables of scores; the stage's name where it is empty or several stages are of this kind.
    order: among kinds, and in the report among stages that are equally far from the start.
    less_memory, lower_rate: the setting that is advised where memory is too small, and where training diverges.
    """

    name: str
    config: type[StageBase]
    module: str
    code_version: int = 1
    makes: str = NOTHING
    needs: Mapping[str, str] = field(default_factory=dict)
    may_take: Mapping[str, str] = field(default_factory=dict)
    takes_what_exists: bool = False
    trains: bool = False
    has_ranks: bool = False
    is_beside: bool = False
    is_on_cpu: bool = False
    label: str = ""
    order: int = 70
    less_memory: str = "NAME=VALUE"
    lower_rate: str = "NAME=VALUE"

    @property
    def inputs(self) -> Mapping[str, str]:
        """Every input that a stage may name -> what it must be."""
        return {**self.needs, **self.may_take}

    def product_of(self, label: str) -> str | None:
        """The word of `makes` that an input must be; None where there is no such input. Settings name conversations and
        reward models by their label, so there may be several: `conversations`, `conversations_2`, `conversations_new`.
        """
        several = (name for name in (CONVERSATIONS, REWARD_MODEL) if label.startswith(f"{name}_"))
        return self.inputs.get(label) or self.inputs.get(next(several, ""))

    @property
    def is_about_others(self) -> bool:
        """True for a kind that scores or shows what other stages made."""
        return self.makes in (SCORES, PAGE)
