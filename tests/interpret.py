"""Makes JAX's GPU interpret mode fast enough for hundreds of small kernels.

In that mode each access of a kernel to memory or to a barrier is a call of Python, for which JAX
puts every index on a device, to read it back at once; and it compiles what the threads run with all
of LLVM's optimisations. Neither changes a result, and on tiny arrays they take most of the time.
"""

import functools
import threading

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic.interpret import thread_map

_io_callback = callbacks.io_callback_impl
_lock = threading.Lock()


def speed_up():
    """From now on, in this process."""
    callbacks.io_callback_impl = _call_with_numpy
    thread_map._run_jaxpr = _run_thread


def _call_with_numpy(*args, callback, result_avals, **facts):
    """``io_callback_impl``, whose callback is given numbers and copies in NumPy."""
    args = [np.array(x) if np.ndim(x) else np.asarray(x).item() for x in args]
    results = _io_callback(callback=lambda: callback(*args), result_avals=result_avals, **facts)
    return [np.asarray(x, aval.dtype) for x, aval in zip(results, result_avals, strict=True)]


def _run_thread(jaxpr, consts, *args):
    """``_run_jaxpr``, compiled once for all threads, and quickly."""
    with _lock:
        program = _compiled(jaxpr)
    program(consts, *args)


@functools.lru_cache(maxsize=16)
def _compiled(jaxpr):
    consts, args = (
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of]
        for of in (jaxpr.consts, jaxpr.in_avals)
    )
    run = jax.jit(thread_map._run, static_argnums=0)
    lowered = run.trace(jaxpr, consts, *args).lower()
    return lowered.compile({"xla_backend_optimization_level": 0})
