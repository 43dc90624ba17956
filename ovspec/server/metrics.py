"""Metrics in Prometheus' format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ovspec.drafting.proposal import Proposal
from ovspec.engine.engine_thread import EngineThread
from ovspec.engine.results import Piece

HISTOGRAM_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """The counts and times of the server and its engine."""

    def __init__(self, engine: EngineThread) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._make_counter("requests", "Requests, by endpoint and status.", "endpoint", "status")
        self.prompt_tokens = self._make_counter("prompt_tokens", "Prompt tokens.")
        self.cached_tokens = self._make_counter("cached_tokens", "Prompt tokens found in the KV cache.")
        self.new_prompts = self._make_counter("new_prompts", "Prompts without a cached prefix.")
        self.rounds = self._make_counter("rounds", "Rounds.")
        self.generated_tokens = self._make_counter("generated_tokens", "Tokens generated.")
        self.proposed_tokens = self._make_counter("proposed_tokens", "Tokens proposed, by drafter.", "drafter")
        self.accepted_tokens = self._make_counter("accepted_tokens", "Tokens accepted, by drafter.", "drafter")
        self.lookahead = self._make_gauge("lookahead", "Proposed tokens per text in the last round.")
        self.running_texts = self._make_gauge("texts_running", "Running texts.")
        self.waiting_texts = self._make_gauge("texts_waiting", "Texts in the queue.")
        self.blocks_used = self._make_gauge("cache_blocks_used", "KV cache blocks of running texts.")
        self.blocks_kept = self._make_gauge("cache_blocks_kept", "Idle KV cache blocks, kept as prefix cache.")
        self.blocks_evicted = self._make_gauge("cache_blocks_evicted", "Idle KV cache blocks evicted so far.")
        self.blocks_free = self._make_gauge("cache_blocks_free", "Free KV cache blocks.")
        self._make_cache_gauge(engine, "limit", "Memory limit of all KV caches, in bytes.")
        self._make_cache_gauge(engine, "reserved", "Bytes reserved by running texts, with room to grow.")
        self._make_cache_gauge(engine, "used", "Bytes of running texts' KV caches.")
        self._make_cache_gauge(engine, "kept", "Bytes of the prefix cache.")
        self.texts_set_back = self._make_gauge(
            "texts_set_back", "Texts set back so far: their KV caches were freed for others, and read again later."
        )
        self.texts_set_back.set_function(lambda: engine.measure_cache_usage().set_back_count)
        self.time_to_first_token = self._make_histogram(
            "time_to_first_token", "from a request to the first token of each of its texts"
        )
        self.time_between_tokens = self._make_histogram(
            "time_between_tokens", "between pieces of a text; a piece has the tokens of a round"
        )
        self.request_seconds = self._make_histogram("request_duration", "from a request to its last token")
        self.running_texts.set_function(lambda: engine.running_row_count)
        self.waiting_texts.set_function(lambda: engine.waiting_row_count)
        self.blocks_used.set_function(lambda: engine.count_cache_blocks()[0])
        self.blocks_kept.set_function(lambda: sum(cache.idle_count for cache in engine.runtime.models.prefix_caches))
        self.blocks_evicted.set_function(
            lambda: sum(cache.evicted_count for cache in engine.runtime.models.prefix_caches)
        )
        self.blocks_free.set_function(lambda: engine.count_cache_blocks()[1])

    def record_round(self, pieces: list[tuple[int, Piece]], judged_proposals: list[tuple[Proposal, int]]) -> None:
        """Count the pieces of a round, and its verified proposals, each with its number of accepted tokens."""
        self.rounds.inc()
        self.generated_tokens.inc(sum(len(piece.token_ids) for _, piece in pieces))
        self.lookahead.set(
            sum(len(proposal.tokens) for proposal, _ in judged_proposals) / max(len(judged_proposals), 1)
        )
        for proposal, accepted_count in judged_proposals:
            if proposal.source:
                self.proposed_tokens.labels(proposal.source).inc(len(proposal.tokens))
                self.accepted_tokens.labels(proposal.source).inc(accepted_count)

    def _make_counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"ovspec_{name}", help, labels, registry=self.registry)

    def _make_gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"ovspec_{name}", help, registry=self.registry)

    def _make_cache_gauge(self, engine: EngineThread, name: str, help: str) -> None:
        gauge = self._make_gauge(f"cache_{name}_bytes", help)
        gauge.set_function(lambda: getattr(engine.measure_cache_usage(), f"{name}_bytes"))

    def _make_histogram(self, name: str, interval_description: str) -> Histogram:
        return Histogram(
            f"ovspec_{name}_seconds",
            f"Seconds {interval_description}.",
            buckets=HISTOGRAM_BUCKETS,
            registry=self.registry,
        )
