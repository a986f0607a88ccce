"""From a workload and an implementation to compiled programs, ready to be called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax

from pallas_flash.benchmarks.cases import Inputs, Workload
from pallas_flash.benchmarks.check import Results
from pallas_flash.benchmarks.peers import Peer

# One set of inputs is enough if it is larger than the L2 cache of any GPU; smaller ones are rotated until they are.
LARGER_THAN_L2 = 128 * 2**20
MAX_SETS = 16


class Program(NamedTuple):
    """A compiled program and the arguments it is called with in turn."""

    compiled: Any
    arguments: list[tuple[Any, ...]]
    results: Callable[[Any], Results]  # of what the program returns
    temp_bytes: int | None = None
    argument_bytes: int = 0
    output_bytes: int = 0

    @property
    def peak_bytes(self) -> int | None:
        """Of device memory while it runs: arguments, results and what is temporary."""
        return None if self.temp_bytes is None else self.temp_bytes + self.argument_bytes + self.output_bytes

    def run(self) -> Results:
        """The results for the first arguments."""
        return self.results(self.compiled(*self.arguments[0]))


class Rotating:
    """Calls a program with its next arguments each time, so that they are not in the cache. JAX's profiler compiles
    what is no `jax.stages.Wrapped`: so it has that protocol's other methods, which nobody calls."""

    def __init__(self, program: Program):
        self._compiled = program.compiled
        self._arguments = itertools.cycle(program.arguments)

    def __call__(self) -> Any:
        return self._compiled(*next(self._arguments))

    def trace(self, *_: Any) -> Any:
        raise NotImplementedError("it is compiled already")

    lower = eval_shape = trace


def number_of_sets(workload: Any, *, rotate: bool) -> int:
    needed = -(-2 * LARGER_THAN_L2 // workload.min_bytes("forward"))
    return min(needed, MAX_SETS) if rotate and workload.min_bytes("forward") < LARGER_THAN_L2 else 1


def wanted(passes: list[str], *, alone: bool) -> list[str]:
    """The programs that the passes need."""
    kinds = {passed for passed in passes if passed != "backward"}
    if "backward" in passes:
        kinds |= {"backward"} if alone else {"forward", "forward+backward"}
    return sorted(kinds)


def lower(workload: Workload, peer: Peer, kind: str, sets: list[Inputs]) -> Callable[[], Program]:
    """Trace and lower, which is Python and not every library does in threads; returns what compiles the program, which
    may run in a thread. For the backward pass alone it also runs the forward pass once for each set of inputs."""
    assert peer.attend is not None, "PyTorch is not lowered here"
    attend = peer.attend(workload)
    arguments = [arguments_of(inputs) for inputs in sets]

    def forward(q: Any, k: Any, v: Any, dout: Any, packing: Any) -> Any:
        return attend(q, k, v, packing)

    def vjp(q: Any, k: Any, v: Any, packing: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, packing), q, k, v)

    def saving(q: Any, k: Any, v: Any, dout: Any, packing: Any) -> Any:
        """Only the function that takes the cotangent: it holds what is kept between the passes."""
        return vjp(q, k, v, packing)[1]

    def both(q: Any, k: Any, v: Any, dout: Any, packing: Any) -> Any:
        out, pull = vjp(q, k, v, packing)
        return out, pull(dout)

    if kind == "forward":
        return partial(finish, jax.jit(forward).lower(*arguments[0]), arguments, Results)
    if kind == "forward+backward":
        return partial(finish, jax.jit(both).lower(*arguments[0]), arguments, lambda both: _results(both[0], both[1]))
    first = jax.jit(saving).trace(*arguments[0])
    saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first.out_info)
    backward = jax.jit(lambda pull, dout: pull(dout)).lower(saved, sets[0].dout)
    return partial(_finish_backward, first.lower(), backward, arguments)


def arguments_of(inputs: Inputs) -> tuple[Any, ...]:
    """Of a program forward or forward + backward."""
    return inputs.q, inputs.k, inputs.v, inputs.dout, inputs.packing


def finish(lowered: Any, arguments: list[tuple[Any, ...]], results: Callable[[Any], Any]) -> Program:
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    if memory is None:
        return Program(compiled, arguments, results)
    sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
    return Program(compiled, arguments, results, *sizes)


def _finish_backward(saving: Any, backward: Any, arguments: list[tuple[Any, ...]]) -> Program:
    save = saving.compile()
    saved = [(save(*each), each[3]) for each in arguments]
    return finish(backward, saved, lambda gradients: _results(None, gradients))


def _results(out: Any, gradients: tuple[Any, Any, Any]) -> Results:
    dq, dk, dv = gradients
    return Results(out, dq, dk, dv)


def compile_program(
    function: Callable[..., Any], arguments: list[tuple[Any, ...]], options: dict[str, Any] | None = None
) -> Program:
    """Of a function that is no attention: a program without results to check. options: of the compiler."""
    return finish(jax.jit(function, compiler_options=options).lower(*arguments[0]), arguments, lambda _: Results())


def reason(error: BaseException) -> str:
    """The first lines of what an error says, on one line."""
    text = " ".join(" ".join(_lines(str(error))).split())
    return f"{type(error).__name__}: {text}"[:300]


def _lines(text: str) -> Iterator[str]:
    return itertools.islice((line for line in text.splitlines() if line.strip()), 3)
