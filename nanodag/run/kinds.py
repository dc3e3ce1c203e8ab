"""The kinds of stages: which worker runs one, and what its result depends on beside config and inputs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of stage.

    module: what `python -m` runs. code_version: raised by hand when the kind's code changes what it makes, so that
    older artifacts no longer count. is_beside: runs beside the next stage, at low priority, and nothing but the report
    waits for it. has_ranks: the launcher starts resources.num_ranks processes of it; otherwise the worker starts what
    it needs. takes_what_exists: is run although some of its inputs failed, on the others.
    """

    module: str
    code_version: int = 1
    is_beside: bool = False
    has_ranks: bool = False
    takes_what_exists: bool = False

    @property
    def niceness(self) -> int:
        return 10 if self.is_beside else 0


KINDS: dict[str, Kind] = {
    "import": Kind(module="nanodag.model.import_model"),
    "tokenizer": Kind(module="nanodag.tokenizer.train"),
    "pretrain": Kind(module="nanodag.train", code_version=2, has_ranks=True),
    "midtrain": Kind(module="nanodag.train", code_version=2, has_ranks=True),
    "sft": Kind(module="nanodag.train", code_version=2, has_ranks=True),
    "rl": Kind(module="nanodag.rl"),
    "eval": Kind(module="nanodag.evaluation", code_version=2, is_beside=True),
    "report": Kind(module="nanodag.report", code_version=2, takes_what_exists=True),
}
