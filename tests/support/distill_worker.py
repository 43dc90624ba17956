"""Runs the jobs of exports and distillations, with quick stand-ins for those that take minutes.

    python -m distill_worker JOB JSON-ARGUMENTS

The variable STAND_IN holds JSON: ``checkpoint`` is what training leaves; ``ir`` what a head is exported to,
``exported`` what a model is exported to, and ``rows`` what was gained (without one of these three, the real job runs);
``began`` a folder in which each job leaves its arguments; ``stall`` the job that goes on until it is asked to stop.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXPORT = Path(__file__).resolve().parent.parent.parent / "export" / "ovspec_export"
GIVEN: dict[str, Any] = json.loads(os.environ.get("STAND_IN", "{}"))
DOCUMENTS, TOKENS = 20, 30  # that the stand-in writes
TRAINED = 1000  # tokens that the stand-in trains on

# Without the package, which takes a second to import.
_spec = importlib.util.spec_from_file_location("channel", EXPORT / "channel.py")
assert _spec and _spec.loader
channel: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(channel)


def write_texts(work_folder: str, **_: Any) -> None:
    file = Path(work_folder) / "documents.jsonl"
    first = len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0
    with file.open("a", encoding="utf-8") as documents:
        for i in range(first, first + DOCUMENTS):
            ids = [5 + (i + place) % 50 for place in range(TOKENS)]
            document = {"ids": ids, "answer": 10, "source": ("own", "text")[i % 2], "greedy": True}
            documents.write(json.dumps(document | {"held_out": i % 10 == 0}) + "\n")
    channel.report_progress(tokens=(first + DOCUMENTS) * TOKENS, per_second=1234.0)


def measure_costs(**_: Any) -> None:
    channel.report_progress(costs=[0.01, 0.011, 0.012, 0.013])


def write_features(work_folder: str, **_: Any) -> None:
    folder = Path(work_folder) / "features"
    folder.mkdir(exist_ok=True)
    count = len(list(folder.iterdir())) + 1
    (folder / f"{count:07}.safetensors").write_bytes(bytes(1000))
    channel.report_progress(tokens=count * DOCUMENTS * TOKENS, per_second=2345.0)


def train(work_folder: str, tokens: int, **_: Any) -> None:
    place = Path(work_folder) / "training.pt"
    seen = min(tokens, TRAINED + int(place.read_text() if place.exists() else 0))
    place.write_text(str(seen))
    without = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(GIVEN["checkpoint"], Path(work_folder) / "checkpoint", dirs_exist_ok=True, ignore=without)
    channel.report_progress(tokens=seen, per_second=345.0, accepted=[0.2, 0.3, 0.34], agreement=[0.5, 0.25, 0.125])


def convert_eagle_head(folder: str, **_: Any) -> None:
    shutil.copytree(GIVEN["ir"], folder, dirs_exist_ok=True)


def export_with_optimum(arguments: list[str], **_: Any) -> None:
    shutil.copytree(GIVEN["exported"], arguments[-1], dirs_exist_ok=True)


def measure_gain(output: str, **_: Any) -> None:
    Path(output).write_text(json.dumps({"rows": GIVEN["rows"]}), encoding="utf-8")


STAND_INS: dict[str, Callable[..., None]] = {job.__name__: job for job in (write_texts, measure_costs, write_features)}
STAND_INS |= {"train_head": train, "train_draft": train}
STAND_INS |= {"convert_eagle_head": convert_eagle_head} if "ir" in GIVEN else {}
STAND_INS |= {"export_with_optimum": export_with_optimum} if "exported" in GIVEN else {}
STAND_INS |= {"measure_gain": measure_gain} if "rows" in GIVEN else {}


def main(name: str, arguments: dict[str, Any]) -> None:
    job = STAND_INS.get(name)
    if job is None:
        from ovspec_export.worker import JOBS

        job = JOBS[name]
    channel.open_channel()
    job(**arguments)
    if "began" in GIVEN:
        with (Path(GIVEN["began"]) / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(arguments) + "\n")
    while GIVEN.get("stall") == name and not channel.is_stop_requested():
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
