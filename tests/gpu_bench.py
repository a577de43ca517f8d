"""A stand-in for a GPU, so that suites of the bench run on the CPU: its clock and its ceilings."""

import argparse

import jax

from bench import results, roofline, run, timing


def pretend(monkeypatch):
    """Everything as on a GPU but its clock: ours takes 10 µs for a call, others 20."""

    def kernel_times_us(calls, **_):
        for call in calls.values():
            jax.block_until_ready(call())
        return {name: 10.0 if name == results.OURS else 20.0 for name in calls}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "kernel_times_us", kernel_times_us)
    monkeypatch.setattr(roofline, "matmul_tflops", lambda: 800.0)
    monkeypatch.setattr(roofline, "read_gbps", lambda: 4000.0)


def ran(*arguments):
    """The exit status of ``python -m bench run`` with these arguments."""
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.run(parser.parse_args(arguments))
