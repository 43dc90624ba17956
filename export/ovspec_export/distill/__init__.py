"""Train a head or a draft for a model, on the machine it will run on: ``ovspec distill``."""
