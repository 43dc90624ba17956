"""Export a Hugging Face pair to OpenVINO IR: the only part of ovspec that needs torch and transformers."""

from __future__ import annotations

import importlib.util

import ovspec as ovspec  # before anything that imports openvino, which would then report its use

for _name in ("torch", "transformers", "optimum", "nncf"):
    if importlib.util.find_spec(_name) is None:
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)

from ovspec_export.compression import Compression as Compression  # noqa: E402
from ovspec_export.distill.plan import DistillOptions as DistillOptions  # noqa: E402
from ovspec_export.distill.run import distill_model as distill_model  # noqa: E402
from ovspec_export.environments import prepare_all as prepare_all  # noqa: E402
from ovspec_export.export import export_pair as export_pair  # noqa: E402
from ovspec_export.families import environments_of as environments_of  # noqa: E402
from ovspec_export.families import family_list as family_list  # noqa: E402
