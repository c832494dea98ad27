import math
from functools import partial
from itertools import pairwise

import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil import models
from gradveil.attacks.matching import LBFGS, Adam, Objective
from gradveil.attacks.matching import objective as objective_module
from gradveil.attacks.matching.distances import squared_distance
from gradveil.metrics import psnr
from gradveil.modality import IMAGE


def adam(objective, start, *, iterations, project=None, progress=None, **parameters):
    return Adam(**parameters).minimise(objective, start, iterations=iterations, project=project, progress=progress)


def lbfgs(objective, start, *, iterations, **parameters):
    return LBFGS(**parameters).minimise(objective, start, iterations=iterations)


def rosenbrock(x, scale):
    return (scale * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def test_lbfgs_finds_the_minimum_of_rosenbrock_for_every_victim():
    scales = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    start = torch.full((3, 6), -1.0, dtype=torch.float64)
    found = lbfgs(Objective(rosenbrock, scales), start, iterations=300)
    torch.testing.assert_close(found.candidates, torch.ones(3, 6, dtype=torch.float64), rtol=0, atol=1e-6)
    assert found.losses.max() < 1e-12
    assert found.iterations.max() < 300  # the tolerance ends it, each victim by itself
    assert len(set(found.iterations.tolist())) > 1


def test_lbfgs_needs_about_as_many_steps_as_scipy():
    start = torch.full((1, 6), -1.0, dtype=torch.float64)
    objective = Objective(rosenbrock, torch.tensor([100.0], dtype=torch.float64))
    ours = lbfgs(objective, start, iterations=500, history=10, tolerance=1e-8)

    def for_scipy(point):
        losses, gradients = objective(torch.from_numpy(point)[None], torch.tensor([0]))
        return losses.item(), gradients[0].numpy()

    theirs = scipy.optimize.minimize(
        for_scipy, start[0].numpy(), jac=True, method="L-BFGS-B", options={"maxcor": 10, "gtol": 1e-8, "ftol": 0}
    )
    assert theirs.fun < 1e-12
    assert int(ours.iterations[0]) <= 1.5 * theirs.nit


@given(st.integers(0, 10_000))
def test_lbfgs_in_a_batch_equals_lbfgs_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    scales = 10 * torch.rand(3, generator=generator, dtype=torch.float64) + 0.1
    start = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    together = lbfgs(Objective(rosenbrock, scales), start, iterations=20)
    for victim in range(3):
        alone = lbfgs(Objective(rosenbrock, scales[victim : victim + 1]), start[victim : victim + 1], iterations=20)
        torch.testing.assert_close(together.candidates[victim], alone.candidates[0], rtol=1e-6, atol=1e-9)


def test_lbfgs_survives_costs_that_are_not_finite():
    def wall(x, _):  # finite only for x < 1; the minimum is at 0.5
        return torch.where(x < 1, (x - 0.5) ** 2, torch.tensor(math.nan, dtype=x.dtype)).sum()

    victims = torch.zeros(2, 1, dtype=torch.float64)
    found = lbfgs(Objective(wall, victims), torch.tensor([[-30.0], [0.9]], dtype=torch.float64), iterations=50)
    torch.testing.assert_close(found.candidates, torch.full((2, 1), 0.5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_lbfgs_stops_where_the_loss_cannot_fall():
    flat = lbfgs(Objective(lambda x, _: 0 * x.sum(), torch.zeros(1)), torch.ones(1, 3).double(), iterations=50)
    assert flat.iterations.tolist() == [0]
    nan = lbfgs(Objective(lambda x, _: x.sum() * math.nan, torch.zeros(1)), torch.ones(1, 3).double(), iterations=50)
    assert nan.iterations.tolist() == [0]
    assert torch.equal(nan.candidates, torch.ones(1, 3).double())


def test_unsigned_adam_equals_torch():
    target = torch.tensor([[1.0, -2.0, 0.3]], dtype=torch.float64)

    def cost(x, t):
        return (x - t).pow(4).sum()

    ours = adam(Objective(cost, target), torch.zeros(1, 3).double(), iterations=60, lr=0.05, milestones=())
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([x], lr=0.05)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = cost(x, target[0])
        losses.append(loss.item())
        loss.backward()
        optimiser.step()
    losses.append(cost(x, target[0]).item())
    assert float(ours.losses[0]) == pytest.approx(min(losses), rel=1e-9)


def test_adam_keeps_the_box_and_the_best_candidate():
    target = torch.tensor([[2.0], [0.5]])
    seen = []
    found = adam(
        Objective(lambda x, t: (x - t).square().sum(), target),
        torch.zeros(2, 1),
        iterations=100,
        lr=0.1,
        signed=True,
        project=IMAGE.project,
        progress=lambda done, total, left: seen.append((done, total, left)),
    )
    assert found.candidates[0].item() == 1.0
    assert found.candidates[1].item() == pytest.approx(0.5, abs=0.02)
    assert seen[0][:2] == (1, 100)
    assert seen[0][2] > 0
    assert seen[-1] == (100, 100, 0.0)


def test_the_step_size_falls_at_the_milestones():
    moves = []
    objective = Objective(lambda x, _: x.sum(), torch.zeros(1))

    class Watch:
        def __call__(self, candidates, indices):
            moves.append(candidates.item())
            return objective(candidates, indices)

    adam(Watch(), torch.zeros(1, 1), iterations=8, lr=1.0, signed=True)  # type: ignore[arg-type]
    steps = [round(a - b, 6) for a, b in pairwise(moves)]
    assert steps == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001], rel=1e-4)


def quartic(x, target):
    return (x - target).pow(4).sum() + (x - target).square().sum()


by_either = pytest.mark.parametrize(
    "optimise",
    [lambda o, s: adam(o, s, iterations=30, lr=0.1), lambda o, s: lbfgs(o, s, iterations=9)],
    ids=["adam", "lbfgs"],
)


@pytest.fixture
def targets(generator):
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("execution", ["batch", "auto", "compile", "compile-loop"])
@by_either
def test_every_execution_ends_where_the_loop_ends(targets, execution, optimise):
    start = torch.zeros(5, 3, dtype=torch.float64)
    expected = optimise(Objective(quartic, targets, execution="loop"), start)
    got = optimise(Objective(quartic, targets, execution=execution), start)
    torch.testing.assert_close(got.candidates, expected.candidates, rtol=0, atol=1e-9)
    assert got.iterations.tolist() == expected.iterations.tolist()


@pytest.mark.parametrize("execution", ["loop", "batch"])
def test_chunks_change_nothing_and_bound_what_is_evaluated_at_once(targets, execution):
    whole = Objective(quartic, targets, execution=execution)
    cut = Objective(quartic, targets, execution=execution, victim_bytes=10, memory_budget=25)
    sizes = []
    evaluate = cut._evaluate
    cut._evaluate = lambda candidates, indices: (sizes.append(len(indices)), evaluate(candidates, indices))[1]
    candidates, indices = torch.ones(5, 3, dtype=torch.float64), torch.arange(5)
    for part, other in zip(cut(candidates, indices), whole(candidates, indices), strict=True):
        torch.testing.assert_close(part, other)
    assert sizes == [2, 2, 1]


def test_auto_measures_and_says_what_it_chose(targets, monkeypatch):
    monkeypatch.setattr("gradveil.core.compilation.has_compiler", lambda: True)

    def choose(alone, batched, evaluations=1):
        measured = iter([alone, batched])
        monkeypatch.setattr(objective_module, "_seconds", lambda _work: next(measured))
        objective = Objective(quartic, targets, evaluations=evaluations)
        return objective._find_fastest(torch.zeros(5, 3, dtype=torch.float64), torch.arange(5))

    assert choose(alone=1.0, batched=10.0) == "loop"  # ten seconds for five victims are two for one
    assert choose(alone=1.0, batched=2.0) == "batch"
    assert choose(alone=1.0, batched=2.0, evaluations=10_000) == "compile"
    assert choose(alone=1.0, batched=10.0, evaluations=10_000) == "compile-loop"


def test_victims_leave_when_they_have_finished(targets):
    """A victim at its minimum is not evaluated again; the others go on to the end."""
    evaluated = []

    class Watch(Objective):
        def __call__(self, candidates, indices):
            evaluated.append(indices.tolist())
            return super().__call__(candidates, indices)

    start = torch.zeros(5, 3, dtype=torch.float64)
    start[2] = targets[2]
    found = adam(Watch(quartic, targets, execution="batch"), start, iterations=40, lr=0.01, tolerance=1e-12)
    assert evaluated[0] == [0, 1, 2, 3, 4]
    assert evaluated[1] == [0, 1, 3, 4]
    assert found.iterations.tolist()[2] == 0
    assert set(found.iterations.tolist()[:2]) == {40}


def test_stalled_victims_leave_after_the_last_milestone():
    """On a flat valley floor the loss no longer improves."""
    objective = Objective(lambda x, t: ((x - t).abs() - 0.1).relu().sum(), torch.tensor([[0.5]]), execution="loop")
    found = adam(objective, torch.zeros(1, 1), iterations=200, lr=0.1)
    assert int(found.iterations[0]) == 175  # seven eighths, where the last milestone is
    assert float(found.losses[0]) == 0


def test_each_victim_may_have_its_own_step_size():
    objective = Objective(lambda x, t: (x * t).sum(), torch.ones(2, 1), execution="batch")
    found = adam(objective, torch.zeros(2, 1), iterations=3, lr=torch.tensor([0.1, 0.5]), signed=True, milestones=())
    torch.testing.assert_close(found.candidates, torch.tensor([[-0.3], [-1.5]]), rtol=1e-4, atol=0)


@by_either
def test_an_interrupt_returns_the_best_so_far(targets, optimise):
    class Interrupted(Objective):
        calls = 0

        def __call__(self, candidates, indices):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().__call__(candidates, indices)

    start = torch.zeros(5, 3, dtype=torch.float64)
    found = optimise(Interrupted(quartic, targets, execution="batch"), start)
    assert found.interrupted
    begun = Objective(quartic, targets, execution="batch")(start, torch.arange(5))[0]
    assert (found.losses < begun).all()


def attack_objective(execution, dtype, victims=3):
    """Gradient matching on a small network, as the attacks do it."""
    model = models.create("lenet", input_shape=(1, 12, 12), classes=4, init="uniform")
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=4).to(dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(victims, 1, 1, 12, 12, generator=generator).to(dtype)
    labels = torch.arange(victims)[:, None] % 4
    gradients = [task.gradients(images[v], labels[v]) for v in range(victims)]
    targets = {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}
    parameters = task.parameters

    def cost(candidate, target, label):
        return squared_distance(task.gradient(parameters, candidate, label), target)

    start = torch.rand(victims, 1, 1, 12, 12, generator=generator).to(dtype)
    return Objective(cost, targets, labels, execution=execution), start, images


@pytest.mark.parametrize(
    "optimise",
    [lambda o, s: adam(o, s, iterations=200, lr=0.01), lambda o, s: lbfgs(o, s, iterations=20)],
    ids=["adam-200", "lbfgs-20"],
)
def test_batched_attacks_equal_the_loop_in_double_precision(optimise):
    loop, start, _ = attack_objective("loop", torch.float64)
    batch, _, _ = attack_objective("batch", torch.float64)
    torch.testing.assert_close(optimise(batch, start).candidates, optimise(loop, start).candidates, rtol=0, atol=1e-6)


def test_batched_attacks_are_as_good_as_the_loop_in_single_precision():
    def median(execution):
        objective, start, images = attack_objective(execution, torch.float32, victims=5)
        found = adam(objective, start, iterations=300, lr=0.02).candidates.clamp(0, 1)
        return float(psnr(images[:, 0], found[:, 0]).median())

    assert abs(median("loop") - median("batch")) < 0.5


@pytest.mark.parametrize("optimiser", [lbfgs, partial(adam, lr=0.05, milestones=())])
def test_the_history_has_the_first_and_the_late_loss(optimiser):
    """The late loss, after nine tenths of the steps, is the final loss of a search with that many steps."""
    scales = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    start = torch.full((3, 6), -1.0, dtype=torch.float64)
    objective = Objective(rosenbrock, scales, execution="loop")
    whole, shorter = (optimiser(objective, start, iterations=steps) for steps in (10, 9))
    first, _ = objective(start, torch.arange(3))
    torch.testing.assert_close(whole.history.start, first)
    torch.testing.assert_close(whole.history.late, shorter.losses)
    assert (whole.history.late > whole.losses).all()
    assert whole.history.restarts.tolist() == whole.losses[:, None].tolist()


def test_the_late_loss_of_a_search_that_ended_early_is_the_final_one():
    objective = Objective(lambda c, t: (c - t).square().sum(), torch.ones(1, 2, dtype=torch.float64))
    solution = lbfgs(objective, torch.zeros(1, 2, dtype=torch.float64), iterations=100)
    assert solution.iterations < 90
    assert solution.history.late.tolist() == solution.losses.tolist()
