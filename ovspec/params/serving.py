"""The options of ``ovspec serve``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ovspec.params.limits import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE, POSITIVE, TEMPERATURE, NumberLimits
from ovspec.params.option import collect_options, option, options_dataclass
from ovspec.params.sampling import LONG_DEFAULT_TEXT, RECOMMENDED_DEFAULT_TEXTS, SAMPLING_OPTIONS
from ovspec.params.values import parse_lookahead


@options_dataclass
class ServeParams:
    """The options of the server: access, limits, and defaults for requests."""

    host: str = option(
        "Address to listen on. Any address other than localhost needs an API key or --insecure.", default="127.0.0.1"
    )
    port: int = option(
        "Port to listen on; 0 for any free port.", default=8000, limits=NumberLimits(0, 65535, "from 0 to 65535")
    )
    model_name: Sequence[str] = option(
        "Name of the model in the API. Responses carry the first name.",
        default_factory=tuple,
        default_meaning="the folder's name",
        metavar="NAME",
    )
    strict_model: bool = option(
        "Refuse requests for other model names. By default any name is accepted.", default=False
    )
    strict_fields: bool = option(
        "Refuse requests with unknown fields. By default, unknown fields are ignored and listed in the response header "
        "X-Ovspec-Ignored.",
        default=False,
    )
    api_key_file: Path | None = option(
        "File with API keys for clients, one per line.",
        default=None,
        default_meaning="the key in the environment variable OVSPEC_API_KEY, if set",
        metavar="FILE",
        parse=Path,
    )
    insecure: bool = option("Serve all clients without an API key, on any address.", default=False)
    deterministic: bool = option(
        "Refuse to start unless arithmetic is exact with this model on this machine, so texts don't depend on the "
        "server's load.",
        default=False,
    )
    batch_size: int = option(
        "Maximum number of texts generated at the same time; others wait in the queue.",
        default=16,
        limits=AT_LEAST_1,
    )
    queue_size: int = option(
        "Maximum number of texts in the queue; beyond it, requests get status 429.", default=256, limits=NOT_NEGATIVE
    )
    queue_timeout: float = option("Time limit (s) in the queue.", default=300.0, limits=POSITIVE)
    request_timeout: float = option("Time limit (s) for the whole request.", default=3600.0, limits=POSITIVE)
    share_prefixes: bool = option(
        "Share the prefix cache between API keys. Latency can then reveal other clients' prompts.",
        default=False,
    )
    prefill_chunk: int | None = option(
        "Number of prompt tokens per forward pass in chunked prefill. A large chunk, such as 256, can increase the "
        "speed-up from drafters, but running texts pause meanwhile.",
        default=None,
        limits=AT_LEAST_1,
        default_meaning="small enough to hardly delay running texts",
        metavar="N",
    )
    lookahead: int | Literal["auto"] | None = option(
        "Maximum number of tokens proposed per text and forward pass of the target; requests can lower it. auto adapts "
        "it for the best speed under the current load.",
        default=None,
        limits=LOOKAHEAD,
        default_meaning="auto",
        metavar="auto|K",
        parse=parse_lookahead,
    )
    lookup_memory: int = option(
        "Number of tokens of earlier requests to keep for prompt lookup; 0 for none. Refused with several API keys, "
        "because speed could reveal other clients' texts.",
        default=0,
        limits=NOT_NEGATIVE,
    )
    max_tokens: int | None = option(
        "Default for a request's max_tokens; -1 to fill the context.",
        default=None,
        limits=NumberLimits(1, description="at least 1, or -1", special_value=-1),
        default_meaning=LONG_DEFAULT_TEXT,
        flags=SAMPLING_OPTIONS["max_tokens"].flags,
        metavar="N",
    )
    json_schema_mode: Literal["strict", "checked"] = option(
        "Default mode for JSON schemas, including those of tools. strict: refuse a schema if any part of it can't be "
        "enforced during generation. checked: enforce as much as possible, then validate the finished text and report "
        "violations.",
        default="strict",
    )
    temperature: float | None = option(
        "Default sampling temperature; 0 for greedy decoding.",
        default=None,
        limits=TEMPERATURE,
        default_meaning=RECOMMENDED_DEFAULT_TEXTS["temperature"],
        flags=SAMPLING_OPTIONS["temperature"].flags,
    )


SERVE_OPTIONS = collect_options(ServeParams)
