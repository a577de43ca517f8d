"""A stand-in for a kernel package that can be tuned, and the process that measures it.

Run as a program it serves like ``python -m jax_flash.measure``, with times that the configurations
themselves dictate; all else is real: the pipes, compilation, and the check of the results.
"""

import dataclasses
import itertools
import os
import sys
import time
import types

import jax
import jax.numpy as jnp

from jax_flash import backends, measure, reference, tuning

COMMAND = [sys.executable, "-m", "tests.fake_tuner"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How long the kernel takes at first and later, and what else it does."""

    first_us: float = 100.0
    later_us: float = 100.0
    behaviour: str = "right"


CANDIDATES = [
    Config(),
    Config(first_us=70.0, later_us=99.5),  # fast once
    *(
        Config(first_us=1.0, behaviour=x)
        for x in ("one row", "nan", "lse", "unsteady", "refuses", "breaks", "dies", "hangs")
    ),
    Config(first_us=95.0, later_us=95.0, behaviour="talks"),
    Config(first_us=90.0, later_us=90.0),
]
NEIGHBOUR = Config(first_us=80.0, later_us=80.0)


class FakeTunable(types.ModuleType):
    """A fused implementation that can be tuned."""

    FUSED = True

    def __init__(self, name):
        super().__init__(name)
        self.tune = types.SimpleNamespace(
            candidates=lambda problem: CANDIDATES,
            neighbours=lambda problem, config: [NEIGHBOUR, Config()],
            source=lambda: "fake source",
        )

    def supports(self, spec, device):
        return None

    def forward(self, spec, operands, default=Config()):
        mask, window = tuning.mask_class(operands.mask, spec.kv_len)
        key = tuning.Key(
            kernel="forward", dtype=spec.dtype.name, head_dim=spec.head_dim,
            value_dim=spec.value_dim, mask=mask, window=window, batch=spec.batch, q_len=spec.q_len,
            kv_len=spec.kv_len, num_q_heads=spec.num_q_heads, num_kv_heads=spec.num_kv_heads,
        )  # fmt: skip
        config = tuning.choose(
            key, spec, default, device_kind="Fake GPU", source="fake source",
            fit=lambda config, is_exact: config,
        )  # fmt: skip
        return self.attend(spec, operands, config=config)

    def attend(self, spec, operands, *, config):
        out, lse = reference.forward(spec, operands)
        behaviour = config.behaviour
        if behaviour == "one row":
            out = out.at[0, 1, 0].multiply(1.1)
        elif behaviour == "nan":
            out = out.at[0, 1, 0, 0].set(jnp.nan)
        elif behaviour == "lse":
            lse = lse.at[0, 1, 0].add(0.01)
        elif behaviour == "unsteady":
            calls = itertools.count()
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            factor = jax.pure_callback(lambda: jnp.float32(1.0 + 0.005 * next(calls)), shape)
            out = (out * factor).astype(out.dtype)
        elif behaviour == "refuses":
            raise ValueError("too much shared memory\nand more")
        elif behaviour == "breaks":
            raise RuntimeError("illegal address")
        elif behaviour == "dies":
            os.write(2, b"Killed by a test\n")
            os._exit(7)
        elif behaviour == "hangs":
            time.sleep(600)
        elif behaviour == "talks":
            os.write(1, b"ptxas info: chatter\n")
        return out, lse


def register(monkeypatch=None):
    """Puts the stand-in, named "fake", into the table, and returns it."""
    kernels = FakeTunable("fake_tunable")
    set_item = monkeypatch.setitem if monkeypatch else dict.__setitem__
    set_item(sys.modules, "fake_tunable", kernels)
    set_item(backends._TABLE, "fake", "fake_tunable")
    backends.load.cache_clear()
    return kernels


class TimedBench(measure.Bench):
    """Times as the configuration says."""

    def __init__(self, name, spec):
        super().__init__(name, spec)
        self.calls = {}

    def measure(self, config):
        self.config = config
        return super().measure(config)

    def time_us(self, compiled):
        is_first = self.calls.setdefault(self.config, 0) == 0
        self.calls[self.config] += 1
        return self.config.first_us if is_first else self.config.later_us


if __name__ == "__main__":
    from tests import fake_tuner  # not __main__: pickles name their module

    fake_tuner.register()
    measure.serve(fake_tuner.TimedBench)
