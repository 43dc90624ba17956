"""The workers of ``ovspec batch --ray``: all with the same model, and with the same arithmetic to the bit."""

from __future__ import annotations

import pickle
import platform
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ovspec.api.loading import device_options, folders_of, load
from ovspec.base.errors import OvspecError
from ovspec.drafting.choice import parse_draft
from ovspec.integrations.ray.nodes import Shipment
from ovspec.integrations.ray.predictor import loaded_once
from ovspec.openai.batch_file import deciding, what_matters
from ovspec.openai.batch_groups import Group
from ovspec.openai.batch_run import BatchThread
from ovspec.params.loading import load_params
from ovspec.setup.identity import arithmetic_of
from ovspec.setup.profile import adopt_profiles, profile_text


@dataclass(frozen=True)
class Job:
    """What each worker does: load a model, perhaps with a draft, and answer requests with these options."""

    folders: list[Shipment]  # of the model, and of its draft unless that is inside of it
    draft: Any  # as for ovspec.load
    loading: Any
    generating: Any
    mixed: bool  # whether workers with other bits take part


@dataclass(frozen=True)
class Reference:
    """What the first worker found, and the others have to find, too."""

    depends_on: str  # identifies the model and all options that change results
    kind: str  # engine, properties, instruction set, OpenVINO's version, and what is promised
    bits: str  # their checksum
    profiles: list[str | None]  # of the models, in JSON


class Worker:
    """Answers groups of requests; keeps to ``reference``, or finds it if there is none."""

    def __init__(self, job: Job, reference: Reference | None = None) -> None:
        self._job = job
        self.loaded = loaded_once(lambda: self._load(reference))

    def _load(self, reference: Reference | None) -> tuple[BatchThread, Reference]:
        job = self._job
        model, *outside = [each.arrive() for each in job.folders]
        draft = replace(parse_draft(job.draft), model=outside[0]) if outside else job.draft  # type: ignore[type-var]
        folders, options = folders_of(model, draft), device_options(load_params(job.loading))
        if reference:
            options = adopt_profiles(dict(zip(folders, reference.profiles, strict=True)), options)
        loading: Any = job.loading | {"cache_dir": options.cache_dir}
        lm = load(model, draft, **loading)
        lm.runtime.identity = lm.runtime.identity | {"folder": str(job.folders[0].folder)}
        thread, params = BatchThread(lm, job.generating), lm.runtime.params(job.generating)
        kind, bits = (", draft: ".join(each) for each in zip(*map(arithmetic_of, deciding(lm, params)), strict=True))
        if reference and bits != reference.bits and not job.mixed:
            raise OvspecError(
                f"The worker on {platform.node()} computes other bits ({kind}) than the first one "
                f"({reference.kind}). Leave it out, or let it take part with `mixed=True`."
            )
        profiles = [profile_text(folder, options) for folder in folders]
        return thread, Reference(what_matters(lm, params), kind, bits, profiles)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the group in the column ``group``, answered."""
        group: Group = pickle.loads(batch["group"].item())
        thread, reference = self.loaded()
        lines = thread.answer(list(group.requests.values()))
        if self._job.mixed:
            lines = [line | {"worker": reference.kind} for line in lines]
        group.lines, group.requests = dict(zip(group.requests, lines, strict=True)), {}
        return {"group": [pickle.dumps(group)]}
