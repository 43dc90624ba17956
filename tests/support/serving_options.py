"""A case for each option of ``ovspec serve``: arguments, and the value that the option gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ovspec.drafting.choice import parse_draft

SERVING: dict[str, tuple[list[str], Any]] = {
    "host": (["--host", "127.0.0.2"], "127.0.0.2"),
    "port": (["--port", "0"], 0),
    "model_name": (["--model-name", "its", "--model-name", "alias"], ["its", "alias"]),
    "strict_model": (["--strict-model"], True),
    "strict_fields": (["--strict-fields"], True),
    "api_key_file": (["--api-key-file", "keys"], Path("keys")),
    "insecure": (["--insecure", "--host", "0.0.0.0"], True),
    "deterministic": (["--deterministic"], True),
    "batch_size": (["--batch-size", "3"], 3),
    "queue_size": (["--queue-size", "0"], 0),
    "queue_timeout": (["--queue-timeout", "1.5"], 1.5),
    "request_timeout": (["--request-timeout", "2"], 2.0),
    "share_prefixes": (["--share-prefixes"], True),
    "prefill_chunk": (["--prefill-chunk", "256"], 256),
    "lookahead": (["--lookahead", "3"], 3),
    "lookup_memory": (["--lookup-memory", "100"], 100),
    "max_tokens": (["-n", "-1"], -1),
    "json_schema_mode": (["--json-schema-mode", "checked"], "checked"),
    "temperature": (["-t", "0.5"], 0.5),
}
LOADING: dict[str, tuple[list[str], Any]] = {
    "draft": (["--draft", "lookup,draft"], parse_draft("lookup,draft")),
    "device": (["--device", "AUTO"], "AUTO"),
    "draft_device": (["--draft", "--draft-device", "CPU"], "CPU"),
    "precision": (["--precision", "f32"], "f32"),
    "kv_precision": (["--kv-precision", "u8"], "u8"),
    "engine": (["--engine", "stateful"], "stateful"),
    "arithmetic": (["--arithmetic", "fast"], "fast"),
    "threads": (["--threads", "1"], 1),
    "properties": (["--property", "NUM_STREAMS=1"], {"NUM_STREAMS": "1"}),
    "tune": (["--no-tune"], False),
    "tool_format": (["--tool-format", "hermes"], "hermes"),
    "chat_template": (["--chat-template", "chatml"], "chatml"),
    "cache_dir": (["--cache-dir", "cache"], Path("cache")),
    "lookup_corpus": (["--lookup-corpus", "corpus"], ["corpus"]),
    "cache_size": (["--cache-size", "0.5"], 0.5),
    "cache_memory": (["--cache-memory", "0.25"], 0.25),
    "verify": (["--verify"], True),
    "weight_format": (["--weight-format", "int4"], "int4"),
}
