"""The compiled half of training: schedule, optimiser, train step and validation.

One compiled program runs up to `steps_per_dispatch` optimiser steps; how many is an argument of it,
so a run that stopped anywhere and was resumed executes the same code on the same batches as one
that did not, and ends with the same bits. (A GPU adds up the gradients of embeddings in any order
unless XLA_FLAGS=--xla_gpu_deterministic_ops=true forbids it.)

Several devices share each batch: parameters are whole on all of them, XLA splits the work along the
batch and adds up the gradients. A dropout mask is the same however many there are.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models.minigpt import MiniGPT, MiniGPTConfig
from models.settings import TrainConfig

Array = jax.Array
State = dict[str, Any]


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up, then a cosine down to `min_learning_rate` at the last step."""
    warmup = min(config.warmup_steps, config.steps // 10)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=config.min_learning_rate,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm. Biases and norm scales do not decay."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("bias", "scale"), params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def num_devices(config: TrainConfig) -> int:
    """Devices that share a batch: those asked for, else as many GPUs as divide it."""
    if config.num_devices is None:
        found = jax.local_device_count() if jax.default_backend() == "gpu" else 1
        return next(n for n in range(found, 0, -1) if config.batch_size % n == 0)
    if config.num_devices > jax.local_device_count():
        raise ValueError(
            f"num_devices is {config.num_devices}, and there are {jax.local_device_count()}"
        )
    return config.num_devices


def make_shardings(count: int) -> tuple[NamedSharding, NamedSharding]:
    """On this many devices: whole on each, and batches `[K, B, T]` split along B."""
    devices = jax.local_devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, "data"))


class Trainer:
    """The compiled functions of a run.

    A state is `{"params", "optimizer", "step"}`: nested dictionaries of fp32 arrays, Optax's state,
    and the number of steps done.

    Attributes:
        new_state: `() -> state`, freshly initialised.
        train: `(state, batches [K, B, T + 1], count) -> (state, mean loss)`; runs the first `count`
            of the batches and gives the old state's memory to the new one.
        evaluate: `(params, batches [N, B, T + 1]) -> mean loss`, without dropout.
        learning_rate: `(step) -> rate` of the schedule, both fp32.
        copy: `state -> state` in memory of its own, which `train` leaves alone.
        state_shapes: shapes and dtypes of a state.
        state_sharding: where a state that was loaded must be put.
        graph: the model without its arrays; `nnx.merge(graph, params)` is the model.

    Raises:
        ValueError, TypeError, NotImplementedError: the model cannot be traced with these settings,
            such as with an attention implementation that does not exist.
    """

    def __init__(self, config: TrainConfig, model_config: MiniGPTConfig) -> None:
        self.config = config
        self.model_config = model_config
        self.optimizer = make_optimizer(config)
        self.graph = nnx.split(nnx.eval_shape(self._new_model))[0]
        whole, split = make_shardings(num_devices(config))
        self.new_state = jax.jit(self._new_state, out_shardings=whole)
        self.train = jax.jit(
            self._train,
            donate_argnames="state",
            in_shardings=(whole, split, whole),
            out_shardings=whole,
        )
        self.evaluate = jax.jit(self._evaluate, in_shardings=(whole, split))
        self.learning_rate = jax.jit(make_schedule(config))
        self.copy = jax.jit(
            functools.partial(jax.tree.map, jnp.copy), in_shardings=whole, out_shardings=whole
        )
        self.state_sharding = whole
        self.state_shapes = jax.eval_shape(self.new_state)
        jax.eval_shape(self.train, *self._train_arguments())

    def compile_ahead(self) -> list[Future[Any]]:
        """Begins to compile what a run needs, all at the same time, in threads.

        JAX finds the programs when they are called; a call before that would compile them again.

        Returns:
            What to wait for.
        """
        number = jax.ShapeDtypeStruct((), jnp.float32)
        windows = self._window_shapes(self.config.eval_batches)
        pool = ThreadPoolExecutor()
        # Lowered one after another, under the caller's settings; first what takes longest.
        compiled = [
            pool.submit(function.lower(*arguments).compile)
            for function, arguments in (
                (self.train, self._train_arguments()),
                (self.evaluate, (self.state_shapes["params"], windows)),
                (self.copy, (self.state_shapes,)),
                (self.learning_rate, (number,)),
            )
        ]
        pool.shutdown(wait=False)
        return compiled

    def _train_arguments(self) -> tuple[Any, ...]:
        windows = self._window_shapes(self.config.steps_per_dispatch)
        return self.state_shapes, windows, jax.ShapeDtypeStruct((), jnp.int32)

    def _window_shapes(self, count: int) -> jax.ShapeDtypeStruct:
        shape = (count, self.config.batch_size, self.config.context_length + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def _new_model(self) -> MiniGPT:
        return MiniGPT(self.model_config, rngs=nnx.Rngs(self.config.seed))

    def _new_state(self) -> State:
        params = nnx.to_pure_dict(nnx.state(self._new_model()))
        optimizer = self.optimizer.init(params)
        return {"params": params, "optimizer": optimizer, "step": jnp.zeros((), jnp.int32)}

    def _train(self, state: State, batches: Array, count: Array) -> tuple[State, Array]:
        def body(index: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, loss = self._step(carry[0], batches[index])
            return state, carry[1] + loss

        state, total = jax.lax.fori_loop(0, count, body, (state, jnp.zeros((), jnp.float32)))
        return state, total / count.astype(jnp.float32)

    def _step(self, state: State, batch: Array) -> tuple[State, Array]:
        key = jax.random.fold_in(jax.random.key(self.config.seed), state["step"])
        loss, gradients = jax.value_and_grad(self._loss)(
            state["params"], batch, deterministic=False, dropout_rng=key
        )
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            updates, optimizer = self.optimizer.update(
                gradients, state["optimizer"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, loss

    def _evaluate(self, params: Any, batches: Array) -> Array:
        return jnp.mean(jax.lax.map(functools.partial(self._loss, params), batches))

    def _loss(self, params: Any, batch: Array, **options: Any) -> Array:
        logits = nnx.merge(self.graph, params)(batch[:, :-1], **options)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))
