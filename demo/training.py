"""Training one model: the step, its state, checkpoints that a killed run resumes from bit for bit, evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore
from flax import nnx

from demo import InputError
from demo.parallel import Layout
from demo.stop import StopRequest
from demo.tasks import Batch, Task
from models.config import TransformerConfig
from models.transformer import Transformer

WARMUP_FRACTION = 0.1
MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.01
SECONDS_BETWEEN_UPDATES = 0.25  # of the progress display


class TrainState(NamedTuple):
    """Everything that a training step changes, and so everything that a checkpoint holds."""

    step: jax.Array  # int32 []
    params: Any
    optimizer: Any
    losses: jax.Array  # float32 [steps]: the loss of each step so far, NaN for those to come


class Progress(Protocol):
    """Where training says how far it is."""

    def update(self, step: int, loss: float) -> None: ...


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: what is trained, on what, for how long."""

    config: TransformerConfig
    task: Task
    batch_size: int
    steps: int
    learning_rate: float
    seed: int
    layout: Layout = Layout()  # noqa: RUF009 - frozen

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        warmup = max(1, round(WARMUP_FRACTION * self.steps))
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, max(self.steps, warmup + 1))
        return optax.chain(
            optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
        )

    @functools.cached_property
    def graph(self) -> Any:
        """The model without its weights."""
        return nnx.split(nnx.eval_shape(lambda: Transformer(self.config, rngs=nnx.Rngs(self.seed))))[0]

    def initial_state(self) -> TrainState:
        """The same for every attention implementation: parameters depend on the seed alone."""
        params = nnx.to_pure_dict(nnx.state(Transformer(self.config, rngs=nnx.Rngs(self.seed))))
        losses = jnp.full(self.steps, jnp.nan, jnp.float32)
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params), losses)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each part of the state is on the layout's mesh: parameters as the model's metadata says, and what the
        optimizer keeps of each likewise."""
        with self.layout.in_use():
            model = nnx.eval_shape(lambda: nnx.state(Transformer(self.config, rngs=nnx.Rngs(self.seed))))
            params = nnx.to_pure_dict(nnx.get_named_sharding(model, self.layout.mesh))
        whole, abstract = self.layout.whole, jax.eval_shape(self.initial_state)
        optimizer = optax.tree.map_params(
            self.optimizer, lambda _, of: of, abstract.optimizer, params, transform_non_params=lambda _: whole
        )
        return TrainState(whole, params, optimizer, whole)

    def start(self) -> TrainState:
        """The initial state, where the layout wants it."""
        if self.layout.devices == 1:
            return self.initial_state()
        return jax.jit(self.initial_state, out_shardings=self.shardings)()

    def place(self, batch: Batch) -> Batch:
        return self.layout.place(batch, zigzag=self.config.context_parallel is not None)

    def model(self, params: Any) -> Transformer:
        return nnx.merge(self.graph, params)

    def train_step(self, state: TrainState, batch: Batch) -> TrainState:
        """One step of Adam on the mean cross-entropy of the positions that count."""

        def mean_loss(params: Any) -> jax.Array:
            losses, _ = self.losses_and_hits(params, batch)
            return jnp.sum(losses) / jnp.sum(batch.weights)

        loss, gradients = jax.value_and_grad(mean_loss)(state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer, state.losses.at[state.step].set(loss))

    def losses_and_hits(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats and whether the likeliest token is right, float32 [B, T]; 0 where nothing counts."""
        logits = self.model(params)(batch.tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        hits = jnp.argmax(logits, axis=-1) == batch.targets
        return losses * batch.weights, hits * batch.weights

    def compile_step(self, batch_size: int, seq_len: int) -> jax.stages.Compiled:
        """The training step for batches of this size. Allocates nothing: for measuring as well as for running."""
        return self.lower_step(batch_size, seq_len).compile()

    def lower_step(self, batch_size: int, seq_len: int) -> jax.stages.Lowered:
        """What `compile_step` compiles."""
        shape = (self.layout.num_rows(batch_size), seq_len)
        batch = Batch(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)))
        state = jax.eval_shape(self.initial_state)
        shardings: dict[str, Any] = {}
        if self.layout.devices > 1:
            rows = self.layout.rows
            shardings = {"in_shardings": (self.shardings, Batch(rows, rows, rows)), "out_shardings": self.shardings}
        with self.layout.in_use():
            return jax.jit(self.train_step, donate_argnums=0, **shardings).lower(state, batch)


class Evaluation(NamedTuple):
    """Means over the held-out positions that count."""

    accuracy: float
    loss: float  # nats
    positions: int

    @property
    def bits(self) -> float:
        return self.loss / math.log(2.0)


def evaluate(run: Run, params: Any) -> Evaluation:
    """Accuracy and loss on sequences that training never saw."""

    @jax.jit
    def sums(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        losses, hits = run.losses_and_hits(params, batch)
        return jnp.sum(losses), jnp.sum(hits)

    loss = hits = count = 0.0
    for batch in run.task.evaluation_batches(run.seed, run.batch_size):
        with run.layout.in_use():
            batch_loss, batch_hits = sums(params, run.place(batch))
        loss, hits, count = loss + float(batch_loss), hits + float(batch_hits), count + float(np.sum(batch.weights))
    return Evaluation(hits / count, loss / count, int(count))


class Checkpoints:
    """The newest states of one run in one folder. A checkpoint is there as a whole or not at all."""

    def __init__(self, folder: Path, *, read_only: bool = False):
        """`read_only` is for looking: nothing in the folder is made, cleaned up or deleted."""
        self._folder = folder
        # Written before save() returns: a state that is about to be donated must not be read in the background.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else 2,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        if (step := int(state.step)) != self.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """The newest state; `like` gives its structure, shapes and devices. InputError if it cannot be that."""
        step = self.latest_step()
        try:
            self._look_into(step)
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise InputError(
                f"--resume: {self._folder / str(step)} is damaged or of a run with another configuration; "
                "delete that folder to go on from an older checkpoint or from the beginning"
            ) from error

    def _look_into(self, step: int | None) -> None:
        """ValueError for a database that is damaged. Orbax reads its arrays side by side, and each of them that fails
        after the first one prints a traceback."""
        path = str((self._folder / str(step) / "default").absolute()) + "/"
        database = {"driver": "ocdbt", "base": {"driver": "file", "path": path}}
        tensorstore.KvStore.open(database).result().list().result()

    def close(self) -> None:
        self._manager.close()


class Trained(NamedTuple):
    """Where a run stands when it ends or is interrupted."""

    state: TrainState
    step_seconds: list[float]  # of each step of this process: neither data, checkpoints nor the display count
    stopped: str | None  # why it ended early: None, "interrupted" or "diverged"


def train(
    run: Run,
    step_program: Callable[[TrainState, Batch], TrainState],
    checkpoints: Checkpoints,
    *,
    checkpoint_every: int,
    stop: StopRequest,
    progress: Progress,
) -> Trained:
    """Train to the end, from the newest checkpoint if there is one; save at intervals, at the end and on a signal."""
    state = run.start()
    if checkpoints.latest_step() is not None:
        state = checkpoints.restore(state)
    stopped, shown, seconds = None, 0.0, []
    for step in range(int(state.step), run.steps):
        if stop.asked():
            stopped = "interrupted"
            break
        batch = run.place(run.task.train_batch(run.seed, step, run.batch_size))
        begin = time.perf_counter()
        state = jax.block_until_ready(step_program(state, batch))
        seconds.append(time.perf_counter() - begin)
        if (step + 1) % checkpoint_every == 0:
            checkpoints.save(state)
        if time.perf_counter() - shown >= SECONDS_BETWEEN_UPDATES or step + 1 == run.steps:
            loss, shown = float(state.losses[step]), time.perf_counter()
            progress.update(step + 1, loss)
            if not math.isfinite(loss):
                stopped = "diverged"
                break
    checkpoints.save(state)
    return Trained(state, seconds, stopped)
