"""Search for the minimum of a cost, through the stages of a smoothed model if there are any."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.matching.cost import Matching, victim_bytes
from gradveil.attacks.matching.masks import MaskSearch
from gradveil.attacks.matching.objective import Objective
from gradveil.attacks.matching.optimisers import Optimiser
from gradveil.attacks.matching.space import Space
from gradveil.attacks.problem import Problem


def match(
    problem: Problem,
    start: Tensor,
    optimiser: Optimiser,
    matching: Matching,
    *,
    iterations: int,
    smoothing: Sequence[float] = (),
    space: Space | None = None,
) -> Reconstruction:
    """Find candidates whose update is near the shared one and that are likely under the prior.

    If dropout is active, the masks that the client drew are searched for as well, see `MaskSearch`.

    Args:
        problem: the updates of all rounds, and what is known.
        start: first candidates ``[victims, ...]``.
        optimiser: how to minimise the cost.
        matching: how candidates are judged.
        iterations: steps of the optimiser in each smoothing stage.
        smoothing: sharpness of the ReLUs in each stage, from smooth to sharp (see `Task.smoothed`); empty: a single
            stage on the model as it is.
        space: what candidates stand for; None: they are the inputs. The inputs of what is returned are the candidates;
            `Space.unpacked` turns them into inputs.
    """
    precision = optimiser.precision or problem.task.dtype
    targets = [{name: value.to(precision) for name, value in updates.items()} for _, updates in problem.rounds]
    stages = smoothing or (None,)
    total = iterations * len(stages)
    unpacking = space.kept_values(start[0].to(precision), problem.labels[0]) if space else 0
    history: LossHistory | None = None
    search = MaskSearch.of(problem, start)
    start = search.extended(start) if search else start
    candidates, taken, execution = start.to(precision), torch.zeros(len(start), dtype=torch.long), problem.execution
    for number, sharpness in enumerate(stages):
        tasks = [(task if sharpness is None else task.smoothed(sharpness)).to(precision) for task, _ in problem.rounds]
        cost, alone = (
            matching.cost(problem, variant, space, search)
            for variant in (tasks, [task.by_autograd() for task in tasks])
        )
        objective = Objective(
            cost,
            targets,
            problem.labels,
            alone=alone,
            execution=execution,
            evaluations=iterations,
            victim_bytes=victim_bytes(tasks[0], problem, unpacking),
        )

        def report(done: int, _steps: int, left: float, before: int = number * iterations) -> None:
            if problem.progress:
                later = total - before - iterations
                problem.progress(before + done, total, left + later * left / max(1, iterations - done))

        project = None if space else _projection(problem.modality.project, search)
        solution = optimiser.minimise(objective, candidates, iterations=iterations, project=project, progress=report)
        candidates, taken, execution = solution.candidates, taken + solution.iterations, objective.execution
        history = solution.history if history is None else replace(solution.history, start=history.start)
        if solution.interrupted:
            break
    found = replace(solution.found(problem.labels), iterations=taken, history=history, execution=execution)
    return replace(found, inputs=search.candidates(found.inputs)) if search else found


def _projection(project: Callable[[Tensor], Tensor], search: MaskSearch | None) -> Callable[[Tensor], Tensor]:
    """The projection of candidates that may be extended by masks, which have no limits."""
    if search is None:
        return project
    return lambda extended: search.with_candidates(extended, project(search.candidates(extended)))
