"""Declares each option once, for Python's keywords, the command line, batch files and the server.

To add an option, add one field ``name: type = option(help, default=..., ...)`` to ``SamplingParams`` (sampling.py)
or ``Params`` (generation.py).
"""

from ovspec.params.checks import make_params, refuse_retries_in_stream
from ovspec.params.generation import Params
from ovspec.params.sampling import SamplingParams

__all__ = ["Params", "SamplingParams", "make_params", "refuse_retries_in_stream"]
