"""The whole job: train with each attention, measure what each costs, and save after every part."""

from __future__ import annotations

import dataclasses
import math
import platform
from contextlib import closing
from typing import Any

import flax
import jax
import numpy as np
from rich.console import Console

from demo import comparison, tasks
from demo.console import TrainingProgress
from demo.options import Options, make_run
from demo.run_folder import RESULTS, RunFolder
from demo.stop import StopRequest
from demo.training import Checkpoints, Evaluation, Run, Trained, evaluate, train
from models.generate import generate

PROMPT_BYTES, SAMPLE_BYTES = 64, 256


def work(
    options: Options,
    task: tasks.Task,
    folder: RunFolder,
    checkpoint_every: int,
    results: dict[str, Any],
    console: Console,
    stop: StopRequest,
) -> None:
    """Train and compare, saving `results` after each part; parts that they hold already are not done again."""
    runs = {name: make_run(options, task, name) for name in options.implementation}
    results["environment"] = environment()
    results["options"] = dataclasses.asdict(options)
    results["model"] = describe_model(next(iter(runs.values())), options.seq_len)
    results["uses"] = {name: comparison.chosen_implementation(run) for name, run in runs.items()}
    trainings = results.setdefault("training", {})
    costs = results.setdefault("costs", [])
    longest = results.setdefault("longest", [])
    for name, run in runs.items():
        if stop.signal is None and trainings.get(name, {}).get("status", "interrupted") == "interrupted":
            trainings[name] = train_one(name, run, options, folder, checkpoint_every, console, stop)
            folder.write_json(RESULTS, results)
    for seq_len in options.lengths:
        for name, run in runs.items():
            if stop.signal is None and (name, seq_len) not in {(c["implementation"], c["seq_len"]) for c in costs}:
                console.print(f"measuring a training step: {name}, {seq_len} tokens", highlight=False)
                costs.append(dataclasses.asdict(comparison.measure(name, run, seq_len, options.budget_bytes)))
                folder.write_json(RESULTS, results)
    for name, run in runs.items():
        if options.longest and stop.signal is None and name not in {found["implementation"] for found in longest}:
            console.print(f"searching for the longest sequence within the budget: {name}", highlight=False)
            measured = [comparison.Cost(**cost) for cost in costs if cost["implementation"] == name]
            found = comparison.longest_sequence(name, run, options.budget_bytes, measured)
            longest.append(dataclasses.asdict(found))
            folder.write_json(RESULTS, results)


def environment() -> dict[str, str]:
    """Where the numbers come from."""
    return {
        "device": jax.devices()[0].device_kind,
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
    }


def describe_model(run: Run, seq_len: int) -> dict[str, Any]:
    shapes = jax.eval_shape(run.initial_state).params
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        "flops_per_token": run.config.flops_per_token(seq_len),
        **{name: getattr(run.config, name) for name in ("num_layers", "hidden_dim", "num_q_heads", "num_kv_heads")},
    }


def train_one(
    name: str, run: Run, options: Options, folder: RunFolder, checkpoint_every: int, console: Console, stop: StopRequest
) -> dict[str, Any]:
    """Train and evaluate with one attention; running out of memory is a result, not an error."""
    try:
        console.print(f"[bold]{name}[/]: compiling the training step", highlight=False)
        program = run.compile_step(options.batch_size, options.seq_len)
        memory = comparison.memory(program)
        if memory.total > options.budget_bytes:
            return {"status": comparison.OVER_BUDGET, "total_bytes": memory.total, "steps": 0, "losses": []}
        tokens = options.batch_size * options.seq_len
        with (
            closing(Checkpoints(folder.checkpoints(name))) as checkpoints,
            TrainingProgress(console, name, steps=options.steps, tokens_per_step=tokens) as progress,
        ):
            trained = train(run, program, checkpoints, checkpoint_every=checkpoint_every, stop=stop, progress=progress)
        evaluation = None if trained.stopped else evaluate(run, trained.state.params)
        outcome = training_outcome(run, trained, evaluation)
        if evaluation and isinstance(run.task, tasks.Text) and name == options.implementation[-1]:
            outcome["sample"] = sample(run, run.task, trained.state.params)
        return outcome
    except jax.errors.JaxRuntimeError as error:
        if not comparison.is_out_of_memory(error):
            raise
        return {"status": comparison.OUT_OF_MEMORY, "steps": 0, "losses": []}


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
    """How the trained model continues the beginning of the validation text."""
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
