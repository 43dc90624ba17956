"""The public entry to ``batch/ray``: ``from ovspec.ray import Predictor``."""

from ovspec.batch.ray.predictor import Predictor

__all__ = ["Predictor"]
