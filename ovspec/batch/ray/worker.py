"""The workers of ``ovspec batch --ray``: all with the same model, and with the same arithmetic to the bit."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any

from ovspec.api.loading import load, make_device_options
from ovspec.base.errors import OvspecError
from ovspec.batch.file import deciding, what_matters
from ovspec.batch.ray.deaths import note_signals
from ovspec.batch.ray.nodes import Shipment
from ovspec.batch.ray.predictor import claim_share
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import BatchThread
from ovspec.drafting.choice import parse_draft
from ovspec.params import Params
from ovspec.params.loading import make_load_params
from ovspec.setup.identity import describe_arithmetic
from ovspec.setup.model_folders import list_model_folders
from ovspec.setup.profile import adopt_profiles, read_profile_text


@dataclass(frozen=True)
class Job:
    """What each worker does: load a model, perhaps with a draft, and answer requests."""

    folders: list[Shipment]  # of the model, and of its draft unless that is inside of it
    draft: Any  # as for ovspec.load
    loading: Any
    params: Params  # of requests that don't set their own
    mixed: bool  # whether workers with other bits take part

    def in_words(self, cpus: int, reference: Reference | None = None) -> str:
        """Return what a worker with ``cpus`` processors loads, and how, for a sentence that says that it fails."""
        options = [f"`{name}={value!r}`" for name, value in self.loading.items() if value is not None]
        found = [f"as {reference.kind}"] if reference else []
        return " ".join([str(self.folders[0].folder), *options, f"on {cpus} processor{'s' * (cpus > 1)}", *found])


@dataclass(frozen=True)
class Reference:
    """What the first worker found, and the others have to find, too."""

    depends_on: str  # identifies the model and all options that change results
    kind: str  # engine, properties, instruction set, OpenVINO's version, and what is promised
    bits: str  # their checksum
    profiles: list[str | None]  # of the models, in JSON


class Worker:
    """Answers requests, as an actor of Ray; keeps to ``reference``, or finds it if there is none."""

    def __init__(self, job: Job, reference: Reference | None, number: int) -> None:
        note_signals(number)
        claim_share()
        self._job, self._reference = job, reference

    def load(self) -> Reference:
        """Load the model, before anything is answered."""
        job, reference = self._job, self._reference
        model, *outside = [each.arrive() for each in job.folders]
        draft = replace(parse_draft(job.draft), model=outside[0]) if outside else job.draft  # type: ignore[type-var]
        folders, options = list_model_folders(model, draft), make_device_options(make_load_params(job.loading))
        if reference:
            options = adopt_profiles(dict(zip(folders, reference.profiles, strict=True)), options)
        loading: Any = job.loading | {"cache_dir": options.cache_dir}
        lm = load(model, draft, **loading)
        lm.runtime.identity = lm.runtime.identity | {"folder": str(job.folders[0].folder)}
        self._thread, params = BatchThread(lm, job.params), lm.runtime.row_maker.complete_params(job.params)
        kind, bits = (
            ", draft: ".join(each) for each in zip(*map(describe_arithmetic, deciding(lm, params)), strict=True)
        )
        if reference and bits != reference.bits and not job.mixed:
            raise OvspecError(
                f"The worker on {platform.node()} computes other bits ({kind}) than the first one "
                f"({reference.kind}). Leave it out, or let it take part with `mixed=True`."
            )
        profiles = [read_profile_text(folder, options) for folder in folders]
        return Reference(what_matters(lm, params), kind, bits, profiles)

    def answer(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
        """Return the output line of each request."""
        return self._thread.answer(requests)
