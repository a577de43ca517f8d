"""Attention kernels in Pallas Mosaic GPU, for Hopper. Loaded by :mod:`jax_flash.backends`."""
