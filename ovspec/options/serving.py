"""The options of ``ovspec serve``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ovspec.options import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE
from ovspec.options.option import Limits, Option, declared, fields_of
from ovspec.options.reading import auto_or_number, count_or_all
from ovspec.options.sampling import POSITIVE, TOKENS


class ServeOptions(TypedDict, total=False):
    """The options that decide who is served, and how much at a time."""

    host: Annotated[
        str, Option("Address to listen on. Another one than this machine's own needs a key or --insecure.", "127.0.0.1")
    ]
    port: Annotated[int, Option("Port to listen on; 0 for any free one.", 8000, Limits(0, 65535, "from 0 to 65535"))]
    model_name: Annotated[
        str | None, Option("The model's name in requests and answers.", usual="the folder's name", metavar="NAME")
    ]
    api_key_file: Annotated[
        Path | None,
        Option(
            "File with the keys that clients may use, one a line.",
            usual="the key in OVSPEC_API_KEY, if it is set",
            metavar="FILE",
            parse=Path,
        ),
    ]
    insecure: Annotated[bool, Option("Serve everybody who can reach the address, without a key.", False)]
    deterministic: Annotated[
        bool, Option("Don't start unless texts are proven to be independent of the load on this machine.", False)
    ]
    batch_size: Annotated[int, Option("Maximum number of texts generated at a time; the others wait.", 16, AT_LEAST_1)]
    queue_size: Annotated[
        int, Option("Maximum number of texts that wait; requests for further ones are refused.", 256, NOT_NEGATIVE)
    ]
    queue_timeout: Annotated[float, Option("Seconds that a request may wait before its text begins.", 300.0, POSITIVE)]
    request_timeout: Annotated[float, Option("Seconds that a request may take in all.", 3600.0, POSITIVE)]
    cache_size: Annotated[
        float | None,
        Option(
            "Gigabytes that the KV caches of all texts may take together.",
            limits=POSITIVE,
            usual="80 % of the memory that is free after loading",
            metavar="GB",
        ),
    ]
    prefill_chunk: Annotated[
        int | None,
        Option(
            "Number of prompt tokens that a round reads. With many, as 256, drafters may bring more, but texts pause "
            "while the server reads prompts.",
            limits=AT_LEAST_1,
            usual="so few that other texts hardly wait",
            metavar="N",
        ),
    ]
    lookahead: Annotated[
        int | Literal["auto"] | None,
        Option(
            "Maximum number of tokens to propose per round and text; a request can lower it. auto: as many as pay "
            "under the load.",
            limits=LOOKAHEAD,
            usual="auto",
            metavar="auto|K",
            parse=auto_or_number,
        ),
    ]
    lookup_memory: Annotated[
        int,
        Option(
            "Number of tokens of earlier requests that lookup may also propose from; 0 for none. Its speed would tell "
            "one client what others wrote, so it is refused with several keys.",
            0,
            NOT_NEGATIVE,
        ),
    ]
    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of tokens of a request that sets none; -1 for as many as the context holds.",
            limits=TOKENS,
            usual="from the model's generation config, or 256",
            flags=("-n", "--max-tokens"),
            metavar="N",
            parse=count_or_all,
        ),
    ]


SERVE = declared(ServeOptions)
_ServeFields = fields_of(SERVE)


@dataclass(frozen=True)
class ServeParams(_ServeFields):
    """All options of a server, beside those of its model."""
