"""The workers of ``ovspec batch --ray``: all with the same model, and with the same arithmetic to the bit."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any

from ovspec.api.loading import load, make_device_options
from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.batch.ray.deaths import record_signals
from ovspec.batch.ray.predictor import pin_actor
from ovspec.batch.ray.shipment import Shipment
from ovspec.batch.requests import BatchRequest
from ovspec.batch.resumable_run import list_text_deciding_models, make_run_identity
from ovspec.batch.run import BatchThread
from ovspec.drafting.choice import parse_draft
from ovspec.params import Params
from ovspec.params.loading import make_load_params
from ovspec.setup.identity import describe_and_hash_arithmetic
from ovspec.setup.model_folders import list_model_folders
from ovspec.setup.profile import add_profiles_to_options, read_profile_json


@dataclass(frozen=True)
class WorkerSetup:
    """The model of each worker, perhaps with a draft, and the params of its requests."""

    shipments: list[Shipment]  # of the model, and of its draft unless the draft is inside it
    draft: Any  # as for ovspec.load
    load_options: JsonObject
    params: Params  # for requests without their own
    allows_mixed_arithmetic: bool  # whether workers with other bits are allowed

    def describe_worker(self, cpus: int, reference: ReferenceArithmetic | None = None) -> str:
        """Return the model, the options and the processors of a worker, in words for an error."""
        description_words = [str(self.shipments[0].folder)]
        description_words += [f"`{name}={value!r}`" for name, value in self.load_options.items() if value is not None]
        description_words.append(f"on {cpus} processor{'s' * (cpus > 1)}")
        if reference:
            description_words.append(f"as {reference.computing_conditions}")
        return " ".join(description_words)


@dataclass(frozen=True)
class ReferenceArithmetic:
    """The first worker's arithmetic, as a reference for the others."""

    run_identity: str  # identifies the model and all options that change results
    computing_conditions: str  # engine, properties, instruction set, OpenVINO's version, and the kind of arithmetic
    logits_checksum: str  # a checksum of logits
    profiles: list[str | None]  # of the models, in JSON


class Worker:
    """Runs requests, as an actor of Ray, with the arithmetic of ``reference``; the first worker makes the reference."""

    def __init__(self, worker_setup: WorkerSetup, reference: ReferenceArithmetic | None, number: int) -> None:
        record_signals(number)
        pin_actor()
        self._worker_setup = worker_setup
        self._reference = reference

    def load_worker_model(self) -> ReferenceArithmetic:
        """Load the model, before any request."""
        worker_setup = self._worker_setup
        reference = self._reference
        model, *outside_drafts = [shipment.receive_folder() for shipment in worker_setup.shipments]
        draft = worker_setup.draft
        if outside_drafts:
            draft = replace(parse_draft(worker_setup.draft), model=outside_drafts[0])  # type: ignore[type-var]
        folders = list_model_folders(model, draft)
        device_options = make_device_options(make_load_params(worker_setup.load_options))
        if reference:
            device_options = add_profiles_to_options(
                dict(zip(folders, reference.profiles, strict=True)), device_options
            )
        load_options: Any = worker_setup.load_options | {"cache_dir": device_options.cache_dir}
        lm = load(model, draft, **load_options)
        lm.runtime.identity = lm.runtime.identity | {"folder": str(worker_setup.shipments[0].folder)}
        self._thread = BatchThread(lm, worker_setup.params)
        params = lm.runtime.row_maker.complete_params(worker_setup.params)
        arithmetics, checksums = zip(
            *map(describe_and_hash_arithmetic, list_text_deciding_models(lm, params)), strict=True
        )
        arithmetic = ", draft: ".join(arithmetics)
        logits_checksums = ", draft: ".join(checksums)
        if reference and logits_checksums != reference.logits_checksum and not worker_setup.allows_mixed_arithmetic:
            raise OvspecError(
                f"The worker on {platform.node()} computes different logits ({arithmetic}) from the first worker's "
                f"({reference.computing_conditions}). Remove this machine from the cluster, or set "
                "`mixed=True` to accept small differences between texts."
            )
        profiles = [read_profile_json(folder, device_options) for folder in folders]
        return ReferenceArithmetic(make_run_identity(lm, params), arithmetic, logits_checksums, profiles)

    def run_requests(self, requests: list[BatchRequest]) -> list[JsonObject]:
        """Return the output line of each request."""
        return self._thread.run_requests(requests)
