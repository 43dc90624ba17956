"""Batches on a cluster of Ray: ``Predictor`` for your own datasets, and the parts of ``ovspec batch --ray``."""
