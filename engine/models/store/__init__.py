"""From what a user calls a model to a directory that can be served: `resolve_model`, `model_name`. No torch."""

from engine.models.store.directory import check_model_dir, model_name
from engine.models.store.resolve import BUILT_IN_NAMES, resolve_model

__all__ = ["BUILT_IN_NAMES", "check_model_dir", "model_name", "resolve_model"]
