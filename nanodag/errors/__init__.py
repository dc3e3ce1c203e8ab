"""Every error that nanodag raises on purpose.

Each carries one message that says what, the value found, where, and what to do. They take one positional argument, so
they survive pickling between processes.
"""


class NanodagError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(NanodagError, ValueError):
    """pipeline.yaml, a preset or an override is wrong."""


class SourceError(NanodagError, ValueError):
    """A data source cannot be read, or a row of it is malformed."""


class StoreError(NanodagError, OSError):
    """The store cannot do what was asked."""


class ArtifactNotFound(StoreError, LookupError):
    """No valid artifact lies under that key."""


class CorruptArtifact(StoreError):
    """The bytes of an artifact or checkpoint differ from its manifest."""


class NewerFormat(StoreError):
    """An artifact has a format that only a newer nanodag reads."""


class StoreBusy(StoreError):
    """Another process is building the same key."""


class StageFailed(NanodagError, RuntimeError):
    """A worker ended without publishing a result."""


class StageInterrupted(StageFailed):
    """An end that may pass (a signal, the network, its sampler): started again, the worker may get through."""


class StageKilled(StageInterrupted):
    """A signal that nobody here sent ended the worker; the same stage may get through when started again."""


class StageStopped(StageFailed):
    """The worker was asked to stop; started again, it goes on from its newest checkpoint."""


class NodeLost(NanodagError, ConnectionError):
    """Another machine of a stage went away, or cannot be reached; the same stage may get through when started again."""


class TrainingDiverged(NanodagError, ArithmeticError):
    """NaN or infinity in a loss, a gradient or a weight."""


class MissingTool(NanodagError, RuntimeError):
    """A program or package that is needed is not installed."""


class ServerError(NanodagError, RuntimeError):
    """Prefect's server does not come up, or refuses what it is asked."""


class ServerBusy(ServerError, ConnectionError):
    """A server did not answer, or said that it cannot now; asked again, it may do it."""


class SamplerError(NanodagError, RuntimeError):
    """The sampler could not do what was asked."""


class BadRequest(SamplerError, ValueError):
    """The sampler refuses this request; the same request will be refused again."""


class SamplerLost(SamplerError, ConnectionError):
    """The sampler died or stopped answering; the same request may succeed after a restart."""
