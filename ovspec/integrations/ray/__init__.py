"""Batches on a cluster of Ray: ``Predictor`` for your own datasets, and the work behind ``ovspec batch --ray``."""

from ovspec.integrations.ray.predictor import Predictor

__all__ = ["Predictor"]
