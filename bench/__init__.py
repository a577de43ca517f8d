"""Measurements and checks of the kernels: ``python -m bench --help``."""
