"""The bound, compared with the best possible estimator and with attacks; the utilities, with closed forms."""

import pytest
import torch
from torch import nn

import gradveil
from gradveil import theory
from gradveil.core.errors import InputError


class Projection(nn.Module):
    """A model whose gradient is a fixed linear map of its input: outputs = <w, A x>, so d loss / d w = A x."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.w = nn.Parameter(torch.zeros(len(matrix), dtype=matrix.dtype))

    def forward(self, x):
        return (x.flatten(1) @ self.matrix.T) @ self.w[:, None]


def linear_task(matrix):
    model = Projection(matrix)
    return gradveil.Task(model, lambda outputs, _labels: outputs.mean(), input_shape=(matrix.shape[1],), classes=1)


def orthogonal(size, generator):
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def bayes_error(matrix, noise, prior):
    """Mean squared error of the posterior mean for a normal prior, which is the smallest possible."""
    precision = matrix.T @ matrix / noise + torch.linalg.inv(prior)
    return float(torch.linalg.inv(precision).trace())


def test_the_bound_is_the_bayes_error_for_an_isotropic_prior_and_an_orthogonal_map(generator):
    """Images smoothed by N(0, tau^2) around one public image: the prior is normal and the posterior mean is optimal."""
    size, noise, tau = 12, 0.37, 0.25
    matrix = orthogonal(size, generator)
    task = linear_task(matrix)
    batch = torch.rand(1, size, generator=generator, dtype=torch.float64), torch.tensor([0])
    bound = theory.reconstruction_bound(task, batch, noise, tau=tau, directions=None, generator=generator)
    best = bayes_error(matrix, noise, tau**2 * torch.eye(size, dtype=torch.float64))
    assert bound.total == pytest.approx(best, rel=1e-9)
    assert bound.data_information == pytest.approx(size / noise, rel=1e-9)
    assert bound.mse == pytest.approx(1 / (1 / noise + 1 / tau**2), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_never_exceeds_the_bayes_error_and_the_papers_form_does(seed):
    """Anisotropic prior, little data: the paper uses n times the smallest eigenvalue in place of the trace."""
    generator = torch.Generator().manual_seed(seed)
    size, noise = 8, 50.0
    matrix = torch.randn(5, size, generator=generator, dtype=torch.float64)
    basis = orthogonal(size, generator)
    prior = basis @ torch.diag(torch.logspace(-3, 1, size, dtype=torch.float64)) @ basis.T
    data_information, prior_matrix = float((matrix.T @ matrix / noise).trace()), torch.linalg.inv(prior)
    best = bayes_error(matrix, noise, prior)
    assert theory.cramer_rao(size, data_information, float(prior_matrix.trace())).total <= best
    smallest = float(torch.linalg.eigvalsh(prior_matrix).min())
    assert theory.cramer_rao(size, data_information, size * smallest).total > 1.5 * best


def test_nobody_beats_the_bound_on_a_real_gradient(tiny_task, generator):
    """The strongest attacker we can build: Bayes on the linearised gradient, knowing the image before smoothing."""
    tau, victims = 0.1, 40
    images = torch.rand(victims, 1, 1, 6, 6, generator=generator, dtype=torch.float64)
    label = torch.tensor([1])
    trace = sum(float(v.sum()) for v in tiny_task.sensitivity(images[0], label, None).values())
    variance = trace * tau**2 / 36  # the update says about as much as the prior, so the bound is near tau^2 / 2
    bound = theory.reconstruction_bound(
        tiny_task, [(image, label) for image in images], variance, tau=tau, directions=None, generator=generator
    )
    assert tau**2 / 3 < bound.mse < tau**2
    errors = []
    for image in images:
        smoothed = image + tau * torch.randn(image.shape, generator=generator, dtype=torch.float64)
        update = gradveil.defense("gaussian-noise", std=variance**0.5).share(
            tiny_task, smoothed, label, generator=generator
        )
        jacobian = torch.func.jacfwd(
            lambda x: torch.cat([v.flatten() for v in tiny_task.gradient(tiny_task.parameters, x, label).values()])
        )(image).flatten(1)
        difference = torch.cat([(update[n] - g).flatten() for n, g in tiny_task.gradients(image, label).items()])
        precision = jacobian.T @ jacobian / variance + torch.eye(36, dtype=torch.float64) / tau**2
        guess = image + torch.linalg.solve(precision, jacobian.T @ difference / variance).view_as(image)
        errors.append(float((guess - smoothed).square().mean()))
    measured = torch.tensor(errors)
    assert float(measured.mean()) > bound.mse
    assert float(measured.mean()) < tau**2  # the update helped the attacker, so this does test the bound


def test_which_defenses_have_a_bound(tiny_task, tiny_batch, generator):
    public = tiny_batch
    without = (
        "none",
        "gaussian-noise:std=0",
        "laplace-noise:std=0.1",
        "top-k:keep=0.1",
        "optimal-pruning",
        "optimal-noise",
        "optimal-dp-sgd",
        "risk-slicing",
        "optimal-pruning:form=global",
        "optimal-pruning:std=0.1",
        "dp-sgd:noise_multiplier=0",
        "coordinate-dp-sgd:std=0",
        "top-k:keep=0.5+gaussian-noise:std=0.1",
    )
    for spec in without:
        defense = gradveil.defense(spec)
        defense, _ = defense.prepare(tiny_task, public=public, generator=generator)
        assert theory.reconstruction_bound(tiny_task, tiny_batch, defense) is None, spec
    having = (
        "gaussian-noise:std=0.1",
        "optimal-noise:form=global",
        "optimal-dp-sgd:form=global",
        "optimal-pruning:form=global,std=0.1",
        "coordinate-dp-sgd:clip=0.1,std=0.1",
        "dp-sgd:clip=0.1",
        "dp-sgd:clip=0.1+top-k:keep=0.5",
    )
    for spec in having:
        defense = gradveil.defense(spec)
        defense, _ = defense.prepare(tiny_task, public=public, generator=generator)
        bound = theory.reconstruction_bound(tiny_task, tiny_batch, defense, generator=generator)
        assert 0 < bound.mse < 0.01, spec
        assert bound.values == 3 * 36


def flat(layers) -> torch.Tensor:
    return torch.cat([value.flatten() for value in layers.values()])


def trace_of(step, inputs: torch.Tensor) -> float:
    """The squared Frobenius norm of the brute-force Jacobian of a step, in the whole batch of inputs."""
    return float(torch.autograd.functional.jacobian(step, inputs, vectorize=True).square().sum())


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 2.0])
def test_clipping_examples_never_raises_the_trace(share, tiny_task, tiny_batch):
    """dp-sgd: the Jacobian of the mean of clipped gradients, for one example and for batches, some of them clipped."""
    inputs, labels = tiny_batch
    norms = [float(flat(tiny_task.gradients(x[None], y[None])).norm()) for x, y in zip(*tiny_batch, strict=True)]
    clip = share * max(norms)

    def mean(images: torch.Tensor, clip: float) -> torch.Tensor:
        gradients = [
            flat(tiny_task.gradient(tiny_task.parameters, image[None], label[None]))
            for image, label in zip(images, labels, strict=False)
        ]
        return torch.stack([g * (clip / g.norm()).clamp_max(1) for g in gradients]).mean(0)

    for count in (1, 2, 3):
        batch = inputs[:count]
        defense = gradveil.defense("dp-sgd", clip=clip, noise_multiplier=0.0)
        torch.testing.assert_close(flat(defense.share(tiny_task, batch, labels[:count])), mean(batch, clip))
        clipped, plain = (trace_of(lambda x, limit=limit: mean(x, limit), batch) for limit in (clip, 1e9))
        assert clipped <= plain * (1 + 1e-9)
        if max(norms[:count]) > clip:
            assert clipped < 0.999 * plain
        defense = gradveil.defense("dp-sgd", clip=clip, noise_multiplier=2.0)
        bound = theory.reconstruction_bound(tiny_task, (batch, labels[:count]), defense, tau=1e-9, directions=None)
        variance = (2.0 * clip / count) ** 2  # of the noise on the mean
        assert bound.data_information == pytest.approx(plain / variance, rel=1e-5)
        assert bound.data_information >= clipped / variance * (1 - 1e-5)


def test_the_noise_of_dp_sgd_is_that_on_the_mean():
    defense = gradveil.defense("dp-sgd:clip=0.5,noise_multiplier=2")
    assert defense.noise_variance(batch_size=4) == 0.0625
    assert gradveil.defense("dp-sgd:clip=0.5,noise_multiplier=2+top-k").noise_variance(batch_size=4) == 0.0625


def test_a_clipped_coordinate_tells_nothing(tiny_task, tiny_batch):
    """Compare tr J_F with that of the brute-force Jacobian of the clipped gradient."""
    inputs, labels = tiny_batch
    clip = 1.001 * float(flat(tiny_task.gradients(*tiny_batch)).abs().quantile(0.6))  # no coordinate lies on the edge

    def clipped(images: torch.Tensor) -> torch.Tensor:
        return flat(tiny_task.gradient(tiny_task.parameters, images, labels)).clamp(-clip, clip)

    defense = gradveil.defense("coordinate-dp-sgd", clip=clip, std=0.1)
    for each in (defense, gradveil.Chain(defense, gradveil.defense("top-k"))):
        bound = theory.reconstruction_bound(tiny_task, tiny_batch, each, tau=1e-9, directions=None)
        assert bound.data_information == pytest.approx(trace_of(clipped, inputs) / 0.01, rel=1e-5)
    plain = theory.reconstruction_bound(tiny_task, tiny_batch, 0.01, tau=1e-9, directions=None)
    assert bound.data_information < 0.9 * plain.data_information


def test_a_coordinate_that_is_never_sent_tells_nothing(tiny_task, tiny_batch, generator):
    """Pruning by public data with noise on what is kept: the sum of s^2 over what is kept, over the variance."""
    defense = gradveil.defense("optimal-pruning:rate=0.7,form=global,std=0.1")
    defense, _ = defense.prepare(tiny_task, public=tiny_batch, generator=generator)
    bound = theory.reconstruction_bound(tiny_task, tiny_batch, defense, tau=1e-9, directions=None)
    kept = flat(defense.share(tiny_task, *tiny_batch, generator=generator)) != 0
    squared = flat(tiny_task.sensitivity(*tiny_batch, None))
    assert bound.data_information == pytest.approx(float(squared[kept].sum()) / 0.01, rel=1e-5)


def test_the_bound_is_zero_if_a_value_reacts_and_has_no_noise(tiny_task, tiny_batch):
    variance = {name: torch.ones_like(value) for name, value in tiny_task.parameters.items()}
    variance["3.bias"][0] = 0
    assert theory.reconstruction_bound(tiny_task, tiny_batch, variance).total == 0


def test_the_estimate_agrees_with_the_exact_bound(tiny_task, tiny_batch, generator):
    exact = theory.reconstruction_bound(tiny_task, tiny_batch, 1e-3, tau=1e-6, directions=None, generator=generator)
    estimate = theory.reconstruction_bound(tiny_task, tiny_batch, 1e-3, tau=1e-6, directions=400, generator=generator)
    assert estimate.data_information == pytest.approx(exact.data_information, rel=0.1)


def test_misfitting_data_is_refused(tiny_task, tiny_batch):
    with pytest.raises(InputError, match="expected at least one batch, all of the same size"):
        theory.reconstruction_bound(tiny_task, [], 1.0)
    other = tiny_batch[0][:1], tiny_batch[1][:1]
    with pytest.raises(InputError, match="at least one batch, all of the same size"):
        theory.reconstruction_bound(tiny_task, [tiny_batch, other], 1.0)
    with pytest.raises(InputError, match="a variance must not be negative"):
        theory.reconstruction_bound(tiny_task, tiny_batch, -1.0)


def test_utilities_against_closed_forms(tiny_task, tiny_batch, generator):
    gradients = tiny_task.gradients(*tiny_batch)
    squared = sum(float(value.square().sum()) for value in gradients.values())
    noise = theory.usefulness(
        tiny_task, tiny_batch, gradveil.defense("gaussian-noise", std=0.2), draws=600, generator=generator
    )
    # <g, y> is normal with mean |g|^2 and variance std^2 |g|^2.
    assert noise.u1 == pytest.approx(squared, abs=4 * 0.2 * (squared / 600) ** 0.5)
    assert noise.u2 == pytest.approx(-0.04 * squared, rel=4 * (2 / 600) ** 0.5)
    pruned = gradveil.defense("top-k", keep=0.1)
    kept = theory.usefulness(tiny_task, tiny_batch, pruned, draws=2, generator=generator)
    assert kept.u1 == pytest.approx(sum(float(v.square().sum()) for v in pruned.perturb(gradients).values()))
    assert kept.u2 == 0
    two = theory.usefulness(tiny_task, [tiny_batch, tiny_batch], pruned, draws=2, generator=generator)
    assert two.u1 == pytest.approx(kept.u1)
