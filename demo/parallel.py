"""Training on several devices: which of them hold what, and processes that belong together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from demo import InputError
from demo.tasks import Batch
from pallas_flash.distributed import to_zigzag

KINDS = ("data", "context", "both")
DATA, CONTEXT = "data", "context"
MAX_DEVICES = 4096
# What the names in the model's sharding metadata mean here: each weight is cut along the width of the residual stream,
# and gathered where it is used (fully sharded data parallelism).
PARAMETER_AXES = (("embed", DATA),)


def largest(value: float) -> float:
    """Of what the processes of this run have: the same in each, so that all decide alike. They must all ask for it."""
    if jax.process_count() == 1:
        return value
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among those of one run, as `jax.distributed` wants it; all None: it is alone."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in dataclasses.astuple(self)]
        if any(given) and not all(given):
            raise InputError("--coordinator, --num-processes and --process-id go together")
        if all(given) and not 0 <= self.process_id < self.num_processes:
            raise InputError(f"--process-id {self.process_id}: must be below --num-processes {self.num_processes}")

    @property
    def count(self) -> int:
        return self.num_processes or 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return not self.process_id

    def start(self, devices: int) -> None:
        """Find the other processes, and make sure of this many devices. Before JAX is used for anything else."""
        if devices % self.count:
            raise InputError(f"--devices {devices}: must be a multiple of --num-processes {self.count}")
        with contextlib.suppress(RuntimeError):  # JAX is in use: then its devices must do
            jax.config.update("jax_num_cpu_devices", devices // self.count)
        if self.coordinator is not None:
            # JAX's own handler of SIGTERM would take the place of ours, which saves.
            jax.config.update("jax_enable_preemption_service", False)
            jax.distributed.initialize(self.coordinator, self.num_processes, self.process_id)
        if jax.device_count() < devices or (self.count > 1 and jax.device_count() != devices):
            raise InputError(f"--devices {devices}: there are {jax.device_count()}")

    def flags(self) -> list[str]:
        """The flags that say all of this."""
        flags = []
        for name, value in vars(self).items():
            flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return flags

    def meet(self, where: str) -> None:
        """Wait for the others."""
        if self.count > 1:
            multihost_utils.sync_global_devices(where)


@dataclasses.dataclass(frozen=True)
class Layout:
    """`data` groups of devices share the sequences of a batch; the `context` devices of each share every sequence."""

    data: int = 1
    context: int = 1

    @classmethod
    def of(cls, devices: int, kind: str) -> Layout:
        if kind == "both" and devices % 2:
            raise InputError(f"--parallel both: needs an even number of --devices, not {devices}")
        context = {"data": 1, "context": devices, "both": 2}[kind]
        return cls(devices // context, context)

    @property
    def devices(self) -> int:
        return self.data * self.context

    @property
    def length_unit(self) -> int:
        """What the length of a sequence must be a multiple of: two chunks a device, for ring attention."""
        return 2 * self.context if self.context > 1 else 1

    @functools.cached_property
    def mesh(self) -> Mesh:
        axes = (AxisType.Auto, AxisType.Auto)
        return jax.make_mesh((self.data, self.context), (DATA, CONTEXT), axes, devices=jax.devices()[: self.devices])

    @property
    def rows(self) -> NamedSharding:
        """Of tokens [B, T]."""
        return NamedSharding(self.mesh, PartitionSpec(DATA, CONTEXT))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Where the model finds the mesh, and what its axes are called there."""
        if self.devices == 1:
            yield
        else:
            with jax.set_mesh(self.mesh), nnx.logical_axis_rules(PARAMETER_AXES):
                yield

    def num_rows(self, batch_size: int) -> int:
        """Sequences in a batch with those that fill it up."""
        return -(-batch_size // self.data) * self.data

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, batch: Batch, *, zigzag: bool) -> Batch:
        """The batch as arrays of all devices. Each process makes all of it, and gives its devices their part."""
        if self.devices == 1:
            return batch
        missing = self.num_rows(len(batch.tokens)) - len(batch.tokens)

        def placed(array: np.ndarray) -> jax.Array:
            array = np.pad(array, ((0, missing), (0, 0)))  # with sequences of weight 0
            if zigzag:
                array = np.asarray(to_zigzag(array, self.context))
            return jax.make_array_from_callback(array.shape, self.rows, lambda index: array[index])

        return Batch(*map(placed, batch))
