"""Print values that hypothesis-jsonschema draws from the schema on stdin, a line each; run by ``schemas.py``."""

from __future__ import annotations

import json
import sys
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis_jsonschema import from_schema

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def draws(count: int) -> None:
    schema = {key: value for key, value in json.load(sys.stdin).items() if key not in ("$id", "id")}

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=QUIET,
        derandomize=True,
    )
    @given(from_schema(schema))
    def draw(value: Any) -> None:
        print(json.dumps(value), flush=True)

    draw()


if __name__ == "__main__":
    draws(int(sys.argv[1]))
