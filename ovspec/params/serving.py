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
    """The options that decide who is served, and how much at a time."""

    host: str = option(
        "Address to listen on. Another one than this machine's own needs a key or --insecure.", default="127.0.0.1"
    )
    port: int = option(
        "Port to listen on; 0 for any free one.", default=8000, limits=NumberLimits(0, 65535, "from 0 to 65535")
    )
    model_name: Sequence[str] = option(
        "A name of the model. Answers have the first.",
        default_factory=tuple,
        default_meaning="the folder's name",
        metavar="NAME",
    )
    strict_model: bool = option("Refuse requests that name another model. Otherwise any name will do.", default=False)
    strict_fields: bool = option(
        "Refuse requests with fields that the server doesn't know. Otherwise such a field is ignored, and the answer's "
        "header X-Ovspec-Ignored names it.",
        default=False,
    )
    api_key_file: Path | None = option(
        "File with the keys that clients may use, one a line.",
        default=None,
        default_meaning="the key in OVSPEC_API_KEY, if it is set",
        metavar="FILE",
        parse=Path,
    )
    insecure: bool = option("Serve everybody who can reach the address, without a key.", default=False)
    deterministic: bool = option(
        "Don't start unless texts are proven to be independent of the load on this machine.", default=False
    )
    batch_size: int = option(
        "Maximum number of texts generated at a time; the others wait.", default=16, limits=AT_LEAST_1
    )
    queue_size: int = option(
        "Maximum number of texts that wait; requests for further ones are refused.", default=256, limits=NOT_NEGATIVE
    )
    queue_timeout: float = option(
        "Seconds that a request may wait before its text begins.", default=300.0, limits=POSITIVE
    )
    request_timeout: float = option("Seconds that a request may take in all.", default=3600.0, limits=POSITIVE)
    cache_size: float | None = option(
        "Gigabytes that all KV caches may take together: of texts, of drafts, and those kept of ended texts. A text "
        "takes memory as it grows. Where it runs out, the youngest text waits, and is then read again; with "
        "arithmetic that isn't exact, a text reserves memory for its maximum length instead.",
        default=None,
        limits=POSITIVE,
        default_meaning="80 % of the memory that is free after loading",
        metavar="GB",
    )
    share_prefixes: bool = option(
        "Let prompts with other API keys start from the same KV cache, too. Their time then tells what others asked.",
        default=False,
    )
    prefill_chunk: int | None = option(
        "Number of prompt tokens that a round reads. With many, as 256, drafters may bring more, but texts pause "
        "while the server reads prompts.",
        default=None,
        limits=AT_LEAST_1,
        default_meaning="so few that other texts hardly wait",
        metavar="N",
    )
    lookahead: int | Literal["auto"] | None = option(
        "Maximum number of tokens to propose per round and text; a request can lower it. auto: as many as are worth "
        "their time under the load.",
        default=None,
        limits=LOOKAHEAD,
        default_meaning="auto",
        metavar="auto|K",
        parse=parse_lookahead,
    )
    lookup_memory: int = option(
        "Number of tokens of earlier requests that lookup may also propose from; 0 for none. Its speed would tell "
        "one client what others wrote, so it is refused with several keys.",
        default=0,
        limits=NOT_NEGATIVE,
    )
    max_tokens: int | None = option(
        "Maximum number of tokens of a request that sets none; -1 for as many as the context holds.",
        default=None,
        limits=NumberLimits(1, description="at least 1, or -1", special_value=-1),
        default_meaning=LONG_DEFAULT_TEXT,
        flags=SAMPLING_OPTIONS["max_tokens"].flags,
        metavar="N",
    )
    json_schema_mode: Literal["strict", "checked"] = option(
        "What to do with a schema, also a tool's, that can't be enforced as a whole, unless the request says: strict "
        "refuses it; checked enforces what it can, and reports how the finished text breaks the rest.",
        default="strict",
    )
    temperature: float | None = option(
        "Sampling temperature of a request that sets none; 0 for greedy.",
        default=None,
        limits=TEMPERATURE,
        default_meaning=RECOMMENDED_DEFAULT_TEXTS["temperature"],
        flags=SAMPLING_OPTIONS["temperature"].flags,
    )


SERVE_OPTIONS = collect_options(ServeParams)
