"""Batches on a cluster of Ray: ``Predictor`` for your own datasets, and the work behind ``ovspec batch --ray``."""
