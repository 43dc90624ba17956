"""Use ovspec in an application, in ten lines.

python demos/embed.py [FOLDER]   a model exported by 'ovspec export', by default the demo pair of this clone
"""

import sys
from pathlib import Path

import ovspec

DEMO = Path(__file__).resolve().parent.parent / "models" / "demo"
lm = ovspec.load(sys.argv[1] if len(sys.argv) > 1 else DEMO, draft="lookup,draft")
for piece in lm.stream("import os\n\ndef main(", max_tokens=48):
    print(piece.text, end="", flush=True)
with lm.session() as session:  # a text whose KV cache is kept
    session.append("\n\n# the best colour\ncolour = '")
    print(session.text, session.select(["red", "green", "blue"], terminator="'").text, sep="")
