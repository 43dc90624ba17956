"""The options of ``ovspec serve``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ovspec.options import AT_LEAST_1, GENERATE, LOOKAHEAD, NOT_NEGATIVE, SAMPLING
from ovspec.options.option import Limits, Option, declared, fields_of
from ovspec.options.sampling import POSITIVE


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
    batch_size: Annotated[int, replace(GENERATE["batch_size"][1], default=16, commands=())]
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
        replace(
            LOOKAHEAD,
            help="Maximum number of tokens to propose per round and text; a request can lower it. auto: as many as are "
            "worth their time under the load.",
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
        replace(
            SAMPLING["max_tokens"][1],
            help="Maximum number of tokens of a request that sets none; -1 for as many as the context holds.",
        ),
    ]


SERVE = declared(ServeOptions)
_ServeFields = fields_of(SERVE)


@dataclass(frozen=True)
class ServeParams(_ServeFields):
    """All options of a server, beside those of its model."""
