"""NCCL's version on both sides of a group of weights: it refuses ranks of two, and says so only by a number.

SGLang's environment loads this file too: standard library only.
"""

VERSION_KEY = "nanodag/nccl"  # in the store of a group: the version of its rank 0
TWO_VERSIONS = "NCCL refuses ranks of two versions"


def fault(of_trainer: str, of_sampler: str) -> str:
    """Fault of these two versions, with the way out; "" where they are one."""
    if of_trainer == of_sampler:
        return ""
    return (
        f"{TWO_VERSIONS}: the trainer's torch has {of_trainer}, the sampler's {of_sampler or 'none'}. Install the same "
        "torch in both environments, or use weights.sync: disk"
    )
