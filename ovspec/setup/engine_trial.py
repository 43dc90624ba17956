"""Compare a model's engines in a separate process: ``paging.py`` starts this file if a crash is possible.

It has two arguments: the model's folder, and the device options as JSON. It prints the result as JSON.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ovspec.ir.crash_trial import disable_core_dumps
from ovspec.ir.device import DeviceOptions
from ovspec.setup.paging import check_paged_logits

if __name__ == "__main__":
    disable_core_dumps()
    option_fields = json.loads(sys.argv[2])
    options = DeviceOptions(
        **option_fields | {"cache_dir": option_fields["cache_dir"] and Path(option_fields["cache_dir"])}
    )
    print(json.dumps(asdict(check_paged_logits(Path(sys.argv[1]), options))))
