"""MiniGPT on `jax_flash`: the model, its training and its sampling; run `python -m models.X`."""
