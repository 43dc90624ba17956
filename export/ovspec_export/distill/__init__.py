"""Make a head or a draft for a model, on the machine that will use it: ``ovspec distill``."""
