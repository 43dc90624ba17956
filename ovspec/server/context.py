"""The shared parts of the server's endpoints."""

import time
from dataclasses import replace

from ovspec.api.model import LanguageModel
from ovspec.engine.engine_thread import EngineThread
from ovspec.params import make_params
from ovspec.params.serving import ServeParams
from ovspec.server.admission import Admission, WorkerThreads
from ovspec.server.metrics import Metrics
from ovspec.server.preparation import RequestPreparer
from ovspec.text.generation_config import read_recommended_sampling


class ServerContext:
    """The shared parts of the server's endpoints.

    model_names: the names of the model; replies have the first name.
    recommended_sampling: the sampling in the model's generation config.
    sampling: the default sampling of requests.
    """

    def __init__(self, lm: LanguageModel, engine: EngineThread, model_names: list[str], options: ServeParams) -> None:
        self.lm = lm
        self.engine = engine
        self.model_names = model_names
        self.options = options
        self.started_at = int(time.time())
        self.metrics = Metrics(engine)
        engine.on_round = self.metrics.record_round
        own_sampling = {} if options.temperature is None else {"temperature": options.temperature}
        self.recommended_sampling = read_recommended_sampling(lm.folder, own_sampling)
        self.sampling = self.recommended_sampling
        if options.temperature:
            self.sampling = own_sampling | self.recommended_sampling
        defaults = make_params({"max_tokens": options.max_tokens, **self.sampling})
        # Set without checks: the mode alone, without a schema, is invalid; see ``Overrides.apply_to``.
        defaults = lm.runtime.row_maker.with_long_texts(defaults)
        self.defaults = replace(defaults, json_schema_mode=options.json_schema_mode)
        self.admission = Admission(lm, engine, model_names, options)
        self.threads = WorkerThreads(lm)
        self.preparer = RequestPreparer(lm, engine, model_names[0], self.defaults, options)
