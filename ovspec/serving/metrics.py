"""Metrics in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ovspec.serving.engine import Engine

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class Metrics:
    """What the server counts, and what it reads from the engine when it is asked."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ovspec_requests", "Requests, by endpoint and status.", ["endpoint", "status"], registry=self.registry
        )
        self.first = self._seconds("time_to_first_token", "from a request to the first token of each of its texts")
        self.between = self._seconds(
            "time_between_tokens", "between two pieces of a text; a piece has the tokens of one round"
        )
        self.whole = self._seconds("request_duration", "from a request to its last token")
        self.prompt_tokens = Counter("ovspec_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.registry.register(OfEngine(engine))

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(f"ovspec_{name}_seconds", f"Seconds {what}.", buckets=SECONDS, registry=self.registry)


class OfEngine(Collector):
    """The metrics of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, counts = self._engine, self._engine.counts
        used, free = engine.cache_use()
        gauges = {
            "ovspec_texts_running": ("Texts that are being generated.", engine.running),
            "ovspec_texts_waiting": ("Texts that wait for their turn.", engine.waiting),
            "ovspec_cache_blocks_used": ("Blocks of the KV cache that hold texts.", used),
            "ovspec_cache_blocks_free": ("Blocks of the KV cache that are free.", free),
            "ovspec_lookahead": ("Tokens proposed for each text in the last round.", counts.lookahead),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(name, help, value=value)
        yield CounterMetricFamily("ovspec_rounds", "Rounds.", value=counts.rounds)
        yield CounterMetricFamily("ovspec_generated_tokens", "Tokens generated.", value=counts.generated_tokens)
        for what, found in (("proposed", counts.proposed), ("accepted", counts.accepted)):
            family = CounterMetricFamily(f"ovspec_{what}_tokens", f"Tokens {what}, by drafter.", labels=["drafter"])
            for drafter, tokens in dict(found).items():
                family.add_metric([drafter], tokens)
            yield family
