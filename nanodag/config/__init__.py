"""The one input, pipeline.yaml: its schema, presets, overrides and derived values. No torch below here."""

from nanodag.config.pipeline import AnyStage, Pipeline, order_of
from nanodag.config.resolve import Resolved, resolve, result_config

__all__ = ["AnyStage", "Pipeline", "Resolved", "order_of", "resolve", "result_config"]
