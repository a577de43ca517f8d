"""MiniGPT on `jax_flash`: the model, its training and its sampling; run `python -m models.X`."""

import time

IMPORTED_S = time.monotonic()  # where the clock of a command starts: the rest takes seconds
