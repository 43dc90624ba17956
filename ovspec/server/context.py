"""The parts of the server that its endpoints share."""

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
    """The parts of the server that its endpoints share.

    model_names: the names of the model; replies have the first one.
    recommended_sampling: the sampling in the model's generation config.
    sampling: of requests that set none.
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
        # Without a schema, for which the mode is, no check would let it pass; see ``Overrides.apply_to``.
        defaults = lm.runtime.row_maker.with_long_texts(defaults)
        self.defaults = replace(defaults, json_schema_mode=options.json_schema_mode)
        self.admission = Admission(lm, engine, model_names, options)
        self.threads = WorkerThreads(lm)
        self.preparer = RequestPreparer(lm, engine, model_names[0], self.defaults, options)
