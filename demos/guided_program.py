"""Let a model fill in a form. The program is written twice: with ovspec's own sessions and with the guidance library.

python demos/guided_program.py [FOLDER [LOOKAHEAD]]   a model exported by 'ovspec export', by default the demo pair

The second program needs guidance: pip install 'ovspec[guidance]'. The two may choose differently: a session selects by
the probability of a whole option, guidance token by token; and where a pattern may end, guidance ends it as soon as the
model prefers another token. The times are those of a first run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import ovspec
from ovspec import OvspecError

KINDS = ["server", "client", "library"]
LICENSES = ["Apache-2.0", "MIT", "PSF-2.0"]
# Runs the program once and returns (the form, the number of the target's inferences).
Program = Callable[[], tuple[str, int]]


def with_sessions(lm: ovspec.LanguageModel) -> Program:
    def program() -> tuple[str, int]:
        with lm.session() as form:
            form.append('"""A form about a Python package."""\n\nname = "')
            made = [form.generate(regex="[a-z]{3,12}", max_tokens=8)]
            form.append('"\nkind = "')
            form.select(KINDS, terminator='"')
            form.append('"\nlicense = "')
            form.select(LICENSES, terminator='"')
            form.append('"\nversion = "')
            made.append(form.generate(regex=r"[0-9]\.[0-9]{1,2}", max_tokens=8))
            form.append('"\nmodules = [')
            for _ in range(3):
                form.append('"')
                made.append(form.generate(stop='"', max_tokens=8))
                form.append('", ')
            form.append("]\n\ndef main(")
            made.append(form.generate(stop="\n\n", max_tokens=60))
            return form.text, 2 + sum(result.stats.rounds for result in made)  # two selections, one inference each

    return program


def with_guidance(lm: ovspec.LanguageModel) -> Program:
    from ovspec.integrations.guidance import OpenVINO

    # isort: split
    from guidance import gen, select  # type: ignore

    model = OpenVINO(lm, echo=False, enable_monitoring=False)

    def program() -> tuple[str, int]:
        before = model.stats.inferences
        form = model + '"""A form about a Python package."""\n\nname = "' + gen(regex="[a-z]{3,12}", max_tokens=8)
        form += '"\nkind = "' + select(KINDS) + '"\nlicense = "' + select(LICENSES)
        form += '"\nversion = "' + gen(regex=r"[0-9]\.[0-9]{1,2}", max_tokens=8) + '"\nmodules = ['
        for _ in range(3):
            form += '"' + gen(stop='"', max_tokens=8) + '", '
        form += "]\n\ndef main(" + gen(stop="\n\n", max_tokens=60)
        return str(form), model.stats.inferences - before

    return program


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "models" / "demo"
    lookahead = int(sys.argv[2]) if len(sys.argv) > 2 else "auto"
    for draft in (False, "lookup,draft"):
        lm = ovspec.load(folder, draft, lookahead=lookahead if draft else "auto")
        for written in (with_sessions, with_guidance):
            print(f"--- {written.__name__}, {draft or 'no draft'}")
            try:
                program = written(lm)
            except OvspecError as error:
                print(error)
                continue
            began = time.perf_counter()
            form, inferences = program()
            print(form, f"\n--- {inferences} inferences of the target, {1000 * (time.perf_counter() - began):.0f} ms\n")


if __name__ == "__main__":
    main()
