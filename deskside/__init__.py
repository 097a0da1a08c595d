"""deskside: plan, train and align language models on the GPU you own."""

import time

__version__ = "0.2.0"

STARTED = time.perf_counter()  # a run's wall clock begins here, before the long imports
