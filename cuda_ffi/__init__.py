"""Hand-written CUDA kernels for decoding, behind the name ``"cuda"``."""
