"""Files of requests, for ``ovspec batch``: reading, running, writing and resuming them."""
