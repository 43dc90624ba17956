"""The options of ``ovspec serve``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ovspec.params import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE, POSITIVE, RECOMMENDED, SAMPLING, TOKENS
from ovspec.params.option import Limits, Option, declared, fields_of


class ServeOptions(TypedDict, total=False):
    """The options that decide who is served, and how much at a time."""

    host: Annotated[
        str, "Address to listen on. Another one than this machine's own needs a key or --insecure.", Option("127.0.0.1")
    ]
    port: Annotated[int, "Port to listen on; 0 for any free one.", Option(8000, Limits(0, 65535, "from 0 to 65535"))]
    model_name: Annotated[
        Sequence[str],
        "A name of the model. Answers have the first.",
        Option(tuple, usual="the folder's name", metavar="NAME"),
    ]
    strict_model: Annotated[bool, "Refuse requests that name another model. Otherwise any name will do.", Option(False)]
    strict_fields: Annotated[
        bool,
        "Refuse requests with fields that the server doesn't know. Otherwise such a field is ignored, and the answer's "
        "header X-Ovspec-Ignored names it.",
        Option(False),
    ]
    api_key_file: Annotated[
        Path | None,
        "File with the keys that clients may use, one a line.",
        Option(usual="the key in OVSPEC_API_KEY, if it is set", metavar="FILE", parse=Path),
    ]
    insecure: Annotated[bool, "Serve everybody who can reach the address, without a key.", Option(False)]
    deterministic: Annotated[
        bool, "Don't start unless texts are proven to be independent of the load on this machine.", Option(False)
    ]
    batch_size: Annotated[int, "Maximum number of texts generated at a time; the others wait.", Option(16, AT_LEAST_1)]
    queue_size: Annotated[
        int, "Maximum number of texts that wait; requests for further ones are refused.", Option(256, NOT_NEGATIVE)
    ]
    queue_timeout: Annotated[float, "Seconds that a request may wait before its text begins.", Option(300.0, POSITIVE)]
    request_timeout: Annotated[float, "Seconds that a request may take in all.", Option(3600.0, POSITIVE)]
    cache_size: Annotated[
        float | None,
        "Gigabytes that the KV caches of all texts may take together.",
        Option(limits=POSITIVE, usual="80 % of the memory that is free after loading", metavar="GB"),
    ]
    share_prefixes: Annotated[
        bool,
        "Let prompts with other API keys start from the same KV cache, too. Their time then tells what others asked.",
        Option(False),
    ]
    prefill_chunk: Annotated[
        int | None,
        "Number of prompt tokens that a round reads. With many, as 256, drafters may bring more, but texts pause "
        "while the server reads prompts.",
        Option(limits=AT_LEAST_1, usual="so few that other texts hardly wait", metavar="N"),
    ]
    lookahead: Annotated[
        int | Literal["auto"] | None,
        "Maximum number of tokens to propose per round and text; a request can lower it. auto: as many as are worth "
        "their time under the load.",
        LOOKAHEAD,
    ]
    lookup_memory: Annotated[
        int,
        "Number of tokens of earlier requests that lookup may also propose from; 0 for none. Its speed would tell "
        "one client what others wrote, so it is refused with several keys.",
        Option(0, NOT_NEGATIVE),
    ]
    max_tokens: Annotated[
        int | None,
        "Maximum number of tokens of a request that sets none; -1 for as many as the context holds.",
        replace(SAMPLING["max_tokens"][1], limits=replace(TOKENS, least=1, words="at least 1, or -1")),
    ]
    json_schema_mode: Annotated[
        Literal["strict", "checked"],
        "What to do with a schema, also a tool's, that can't be enforced as a whole, unless the request says: strict "
        "refuses it; checked enforces what it can, and reports how the finished text breaks the rest.",
        Option("strict"),
    ]
    temperature: Annotated[
        float | None,
        "Sampling temperature of a request that sets none; 0 for greedy.",
        replace(SAMPLING["temperature"][1], default=None, usual=RECOMMENDED["temperature"]),
    ]


SERVE = declared(ServeOptions)
_ServeFields = fields_of(SERVE)


@dataclass(frozen=True)
class ServeParams(_ServeFields):
    """All options of a server, beside those of its model."""
