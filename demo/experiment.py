"""The whole job: measure what each attention costs, train with each, and save after every part."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from rich.console import Console

from demo import attentions, comparison, tasks
from demo.compiling import Compiler
from demo.console import TrainingProgress
from demo.options import Options, make_run
from demo.run_folder import RESULTS, RunFolder
from demo.stop import StopRequest
from demo.training import Checkpoints, Evaluation, Run, Trained, evaluate, train
from models.config import CUDNN
from models.generate import generate
from pallas_flash.benchmarks.environment import facts

PROMPT_BYTES, SAMPLE_BYTES = 64, 256


class Probe(NamedTuple):
    """A first look at a training step on one sequence."""

    cost: comparison.Cost  # as compiled
    compile: Callable[[], jax.stages.Compiled | None]  # to be run; None where the compiler has too little memory


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run at work. `results` is saved after each part; parts that it holds already are not done again."""

    options: Options
    task: tasks.Task
    folder: RunFolder
    checkpoint_every: int
    results: dict[str, Any]
    console: Console
    stop: StopRequest

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        return {name: make_run(self.options, self.task, name) for name in self.options.implementation}

    def work(self) -> None:
        """Measure what a step costs, train, and search for the longest sequence: while nothing has been trained, the
        peaks of the allocator are those of the single steps."""
        results = self.results
        results["options"] = dataclasses.asdict(self.options)
        results.setdefault("environments", [])
        results.setdefault("model", describe_model(next(iter(self.runs.values())), self.options.seq_len))
        results.setdefault("uses", {name: attentions.chosen(run) for name, run in self.runs.items()})
        results.setdefault("training", {})
        results.setdefault("costs", [])
        results.setdefault("longest", [])
        with Compiler(self.stop) as compiler:
            self._measure_costs(compiler)
            self._train(compiler)
            self._search(compiler)

    def _save(self) -> None:
        """After something new was found out here."""
        if (here := environment()) not in self.results["environments"]:
            self.results["environments"].append(here)
        self.folder.write_json(RESULTS, self.results)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def _measure_costs(self, compiler: Compiler) -> None:
        """Find out what each step needs; then, by growing need, compile and run batch after batch, never both at once,
        for compiling would disturb the times."""
        order = [(seq_len, name) for seq_len in self.options.lengths for name in self.runs]
        saved = {(cost["seq_len"], cost["implementation"]) for cost in self.results["costs"]}
        jobs = {key: self._probe(compiler, *key) for key in order if key not in saved}
        if jobs:
            self._say(f"compiling {len(jobs)} training steps on one sequence: {', '.join(self.runs)}")

        def save(cost: comparison.Cost) -> None:
            self.results["costs"].append(dataclasses.asdict(cost))
            self.results["costs"].sort(key=lambda cost: order.index((cost["seq_len"], cost["implementation"])))
            self._save()

        probes = dict.fromkeys(order)  # so that equal needs stay in the order of the options
        for key, probe in compiler.each(jobs):
            probes[key] = probe
            if probe.cost.status != comparison.MEASURED:
                save(probe.cost)
        fitting = [p.cost for p in probes.values() if p is not None and p.cost.status == comparison.MEASURED]
        for batch in comparison.in_batches(fitting):
            ready = dict(compiler.each({cost: probes[cost.seq_len, cost.implementation].compile for cost in batch}))
            for name, seq_len, cost in ((cost.implementation, cost.seq_len, cost) for cost in batch):
                if not self.stop.asked():
                    self._say(f"measuring a training step: {name}, {seq_len} tokens")
                    program = ready.pop(cost)
                    cost = comparison.cost_as_compiled(name, seq_len, program, self.options.budget_bytes)
                    runs = program is not None and cost.status == comparison.MEASURED
                    save(comparison.measured(self.runs[name], cost, program) if runs else cost)

    def _probe(self, compiler: Compiler, seq_len: int, name: str) -> Callable[[], Probe]:
        """A job for the compiler. Where peaks are counted, the program of the first look is not run."""
        counted = comparison.peak_bytes() is not None

        def probe() -> Probe:
            lowered = compiler.lower(self.runs[name], 1, seq_len)
            options = comparison.UNTUNED if counted else None
            program = comparison.compiled_or_none(lambda: lowered.compile(options))
            cost = comparison.cost_as_compiled(name, seq_len, program, self.options.budget_bytes)
            return Probe(cost, lambda: comparison.compiled_or_none(lowered.compile) if counted else program)

        return probe

    def _train(self, compiler: Compiler) -> None:
        trainings, size = self.results["training"], (self.options.batch_size, self.options.seq_len)
        pending = [name for name in self.runs if trainings.get(name, {}).get("status") in (None, "interrupted")]
        if pending:
            self._say(f"compiling the training: {', '.join(pending)}")
        jobs = {name: self._compilation(compiler, name, *size) for name in pending}
        programs = dict(compiler.each(jobs))
        for name in pending:
            if not self.stop.asked():
                trainings[name] = self._train_one(name, programs.pop(name))
                self._save()

    def _search(self, compiler: Compiler) -> None:
        found = {longest["implementation"] for longest in self.results["longest"]}
        pending = [name for name in self.runs if name not in found] if self.options.longest else []
        if pending:
            self._say(f"searching for the longest sequence within the budget: {', '.join(pending)}")
        for _, longest in compiler.each({name: self._search_for(compiler, name) for name in pending}):
            self.results["longest"].append(dataclasses.asdict(longest))
            self.results["longest"].sort(key=lambda found: list(self.runs).index(found["implementation"]))
            self._save()

    def _compilation(
        self, compiler: Compiler, name: str, batch_size: int, seq_len: int
    ) -> Callable[[], jax.stages.Compiled | None]:
        """A job for the compiler."""
        step = functools.partial(compiler.step, self.runs[name], batch_size, seq_len)
        return lambda: comparison.compiled_or_none(step)

    def _search_for(self, compiler: Compiler, name: str) -> Callable[[], comparison.Longest]:
        known = [comparison.Cost(**cost) for cost in self.results["costs"] if cost["implementation"] == name]

        def memory_of(seq_len: int) -> comparison.Memory | None:
            program = self._compilation(compiler, name, 1, seq_len)()
            return comparison.memory(program) if program else None

        budget = self.options.budget_bytes
        return lambda: comparison.longest_sequence(name, self.runs[name], budget, known, memory_of)

    def _train_one(self, name: str, program: jax.stages.Compiled | None) -> dict[str, Any]:
        """Train and evaluate with one attention; running out of memory is a result, not an error."""
        run, options = self.runs[name], self.options
        if program is None:
            return {"status": comparison.OUT_OF_MEMORY, "steps": 0, "losses": []}
        memory = comparison.memory(program)
        if memory.total > options.budget_bytes:
            return {"status": comparison.OVER_BUDGET, "total_bytes": memory.total, "steps": 0, "losses": []}
        tokens = options.batch_size * options.seq_len
        try:
            with (
                closing(Checkpoints(self.folder.checkpoints(name))) as checkpoints,
                TrainingProgress(self.console, name, steps=options.steps, tokens_per_step=tokens) as progress,
            ):
                every = self.checkpoint_every
                trained = train(run, program, checkpoints, checkpoint_every=every, stop=self.stop, progress=progress)
            evaluation = None if trained.stopped else evaluate(run, trained.state.params)
            outcome = training_outcome(run, trained, evaluation)
            if evaluation and isinstance(run.task, tasks.Text) and name == options.implementation[-1]:
                outcome["sample"] = sample(run, run.task, trained.state.params)
            return outcome
        except jax.errors.JaxRuntimeError as error:
            if not comparison.is_out_of_memory(error):
                raise
            return {"status": comparison.OUT_OF_MEMORY, "steps": 0, "losses": []}


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    return {**facts(), "flax": flax.__version__}


def describe_model(run: Run, seq_len: int) -> dict[str, Any]:
    shapes = jax.eval_shape(run.initial_state).params
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        "flops_per_token": run.config.flops_per_token(seq_len),
        **{name: getattr(run.config, name) for name in ("num_layers", "hidden_dim", "num_q_heads", "num_kv_heads")},
    }


def training_outcome(run: Run, trained: Trained, evaluation: Evaluation | None) -> dict[str, Any]:
    """What the report says of a training, as JSON has it."""
    steps = int(trained.state.step)
    losses = [loss if math.isfinite(loss) else None for loss in np.asarray(trained.state.losses)[:steps].tolist()]
    outcome: dict[str, Any] = {"status": trained.stopped or "finished", "steps": steps, "losses": losses}
    if trained.step_seconds:
        p20, median, p80 = np.percentile(trained.step_seconds, [20, 50, 80]).tolist()
        outcome["step_seconds"] = {"p20": p20, "median": median, "p80": p80}
        outcome["tokens_per_second"] = run.batch_size * run.task.seq_len / median
    if evaluation:
        outcome |= {
            "accuracy": evaluation.accuracy,
            "loss": evaluation.loss,
            "bits": evaluation.bits,
            "positions": evaluation.positions,
        }
    return outcome


def sample(run: Run, task: tasks.Text, params: Any) -> dict[str, str]:
    """How the trained model continues the beginning of the validation text: with a cache, so by flash_attention where
    the training was by cuDNN."""
    if run.config.attention == CUDNN:
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, attention=None))
    prompt = task.prompt(min(PROMPT_BYTES, task.seq_len))
    key = jax.random.key(run.seed)
    new = generate(
        run.model(params), prompt[None], np.array([len(prompt)]),
        max_new_tokens=SAMPLE_BYTES, temperature=0.8, top_p=0.95, key=key,
    )[0]  # fmt: skip

    def decoded(tokens: Any) -> str:
        text = np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

    return {"prompt": decoded(prompt), "continuation": decoded(new)}
