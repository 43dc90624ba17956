"""Convert checkpoints to GGUF with llama.cpp's own script; its folder comes first, then input, output, input, output …

Further options of the script may follow ``--``. The random models have the demo pair's tokenizer, whose pre-tokenizer
llama.cpp doesn't know; it is written as GPT-2's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    folder, *rest = sys.argv[1:]
    places, more = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    sys.path.insert(0, folder)
    import convert_hf_to_gguf as script  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    choose = script.get_model_class

    def with_our_vocabulary(*args: Any, **options: Any) -> Any:
        chosen = choose(*args, **options)
        chosen.set_vocab = lambda self: self._set_vocab_gpt2()
        return chosen

    script.get_model_class = with_our_vocabulary
    for source, output in zip(places[::2], places[1::2], strict=True):
        if Path(output).exists():
            continue
        sys.argv = ["convert", source, "--outfile", output, "--outtype", "f32", *more]
        script.main()


if __name__ == "__main__":
    main()
