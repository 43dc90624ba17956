"""Export a Hugging Face pair to OpenVINO IR: the only part of ovspec with a need for torch and transformers."""

from __future__ import annotations

import importlib.util

import ovspec as ovspec  # before any import of openvino, to switch off its reports over the network

for _name in ("torch", "transformers", "optimum", "nncf"):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)

from ovspec_export.compression import Compression as Compression  # noqa: E402
from ovspec_export.distill.plan import DistillOptions as DistillOptions  # noqa: E402
from ovspec_export.distill.run import distill_model as distill_model  # noqa: E402
from ovspec_export.environments import prepare_environments as prepare_environments  # noqa: E402
from ovspec_export.export import export_pair as export_pair  # noqa: E402
from ovspec_export.families import describe_families as describe_families  # noqa: E402
from ovspec_export.families import find_environments as find_environments  # noqa: E402
from ovspec_export.named_export import export_named_model as export_named_model  # noqa: E402
