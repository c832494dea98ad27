"""The attacks that search something other than the inputs: ggl, gias, ci-net, and the controls beside them."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gradveil
from gradveil import metrics
from gradveil.attacks import ci_net
from gradveil.attacks.controls import noise_like, random_samples
from gradveil.attacks.matching import LBFGS, RELATIVE, Matching, Space, match
from gradveil.core.errors import ThreatModelError
from gradveil.models.generator import Generator
from gradveil.update import LocalSteps, Rounds

SHARE = gradveil.defense("none").share


@pytest.fixture
def make(tmp_path):
    """A function that writes a generator with random weights and returns it with its file."""

    def write(**layout):
        torch.manual_seed(3)
        generator = Generator(**{"latent": 4, "side": 3, "widths": (12,), "channels": 1, **layout})
        file = tmp_path / f"generator{len(list(tmp_path.iterdir()))}.safetensors"
        # Large weights, so that the images differ.
        save_file({name: 3 * value for name, value in generator.state_dict().items()}, file)
        generator.load_state_dict({name: 3 * value for name, value in generator.state_dict().items()})
        return generator.double().requires_grad_(False), str(file)

    return write


@pytest.fixture
def conditional(make):
    return make(classes=4)


def own_samples(generator, labels, seed=5):
    rng = torch.Generator().manual_seed(seed)
    return generator(torch.randn(len(labels), generator.latent, generator=rng, dtype=torch.float64), labels)


def reconstruct(attack, task, updates, threat=None, execution="batch", **options):
    rng = torch.Generator().manual_seed(0)
    threat = threat or gradveil.ThreatModel()
    return attack.reconstruct(task, updates, threat, generator=rng, execution=execution, **options)


class TestSpace:
    """A linear model without a bias whose loss is its output: its gradient is the input, so all is in closed form."""

    @pytest.fixture
    def setting(self, generator):
        model = nn.Linear(6, 1, bias=False).double()
        task = gradveil.Task(model, loss=lambda outputs, _targets: outputs.mean(), input_shape=(6,), classes=None)
        basis = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        update = gradveil.Update({"weight": torch.randn(1, 6, generator=generator, dtype=torch.float64)})
        return task, basis, update

    def search(self, setting, space, execution="batch", **granted):
        task, _, update = setting
        threat = gradveil.ThreatModel(labels="known", known_labels=torch.zeros(2, 1, 1, dtype=torch.float64), **granted)
        posed = gradveil.attack("idlg").pose(task, [update, update], threat, torch.Generator().manual_seed(0))
        start = torch.zeros(2, 3, dtype=torch.float64)
        found = match(posed, start, LBFGS(), Matching(["weight"], RELATIVE), iterations=50, space=space)
        return found, space.unpacked(found)

    @pytest.mark.parametrize("deviation", [0.0, 0.7])
    def test_the_minimum_is_that_of_ridge_regression(self, setting, deviation):
        _, basis, update = setting
        space = Space(lambda z, labels: ((basis @ z)[None], labels), lambda z: z.square().sum(), weight=0.03)
        granted = {"defense": gradveil.defense("gaussian-noise", std=deviation), "adaptive": True} if deviation else {}
        found, unpacked = self.search(setting, space, **granted)
        u = update["weight"][0]
        ridge = 0.03 * u @ u + deviation**2
        expected = torch.linalg.solve(basis.T @ basis + ridge * torch.eye(3, dtype=torch.float64), basis.T @ u)
        torch.testing.assert_close(found.inputs, expected.expand(2, 3), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(unpacked.inputs, (basis @ expected).expand(2, 1, 6), rtol=1e-6, atol=1e-8)

    def test_memory_is_counted(self, setting):
        _, basis, _ = setting
        space = Space(lambda z, labels: ((basis @ z.square())[None], labels))
        assert space.kept_values(torch.ones(3, dtype=torch.float64), torch.zeros(1)) == 3 + basis.numel()


def test_ggl_recovers_the_generators_own_samples(tiny_task, conditional):
    generator, file = conditional
    labels = torch.tensor([2, 0, 3])
    images = own_samples(generator, labels)
    updates = [SHARE(tiny_task, images[i : i + 1], labels[i : i + 1]) for i in range(3)]
    found = reconstruct(gradveil.attack("ggl", generator=file, iterations=150), tiny_task, updates)
    assert found.labels[:, 0].tolist() == labels.tolist()
    assert metrics.psnr(images, found.inputs[:, 0]).min() > 30
    assert found.history.restarts.shape == (3, 4)


def test_the_label_reaches_the_generator(tiny_task, conditional):
    """With wrong labels, images of the wrong classes are searched."""
    generator, file = conditional
    label = torch.tensor([2])
    update = SHARE(tiny_task, own_samples(generator, label), label)
    attack = gradveil.attack("ggl", generator=file, iterations=100)
    right, wrong = (
        reconstruct(
            attack, tiny_task, update, gradveil.ThreatModel(labels="known", known_labels=torch.tensor([[known]]))
        ).loss
        for known in (2, 1)
    )
    assert 10 * right < wrong


def test_batches_have_a_latent_vector_per_example(tiny_task, conditional):
    generator, file = conditional
    labels = torch.tensor([0, 3])
    images = own_samples(generator, labels)
    threat = gradveil.ThreatModel(batch_size=2, labels="known", known_labels=labels[None])
    attack = gradveil.attack("ggl", generator=file, iterations=150, restarts=2)
    found = reconstruct(attack, tiny_task, SHARE(tiny_task, images, labels), threat)
    assert metrics.psnr(images, found.inputs[0]).min() > 25


def test_rounds_and_local_steps_are_used(tiny_task, conditional):
    generator, file = conditional
    labels = torch.tensor([1, 3])
    images = own_samples(generator, labels)
    local = LocalSteps(epochs=1, batch_size=1, lr=0.1)
    later = tiny_task.with_parameters({name: 0.9 * value for name, value in tiny_task.parameters.items()})
    rounds = Rounds(
        (task, SHARE(task, images, labels, local=local, generator=torch.Generator().manual_seed(1)))
        for task in (tiny_task, later)
    )
    threat = gradveil.ThreatModel(
        batch_size=2, labels="known", known_labels=labels[None].flip(1), local=local, rounds=2
    )
    found = reconstruct(gradveil.attack("ggl", generator=file, iterations=150, restarts=2), tiny_task, rounds, threat)
    recovered = found.inputs[0][metrics.match(images, found.inputs[0])]
    assert metrics.psnr(images, recovered).min() > 25


@pytest.mark.parametrize(
    "spec",
    ["ggl:iterations=8", "gias:iterations=4,weight_iterations=4", "ci-net:iterations=4", "ci-net:iterations=4,tv=0"],
)
def test_a_batch_of_victims_equals_the_loop(spec, tiny_task, tiny_batch, conditional):
    name, _, _ = spec.partition(":")
    attack = gradveil.attack(spec if name == "ci-net" else f"{spec},generator={conditional[1]}")
    inputs, labels = tiny_batch
    updates = [SHARE(tiny_task, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]
    batch, loop = (reconstruct(attack, tiny_task, updates, execution=execution) for execution in ("batch", "loop"))
    torch.testing.assert_close(batch.inputs, loop.inputs, rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.loss, loop.loss, rtol=1e-6, atol=1e-9)


def test_gias_continues_where_ggl_ends(tiny_task, tiny_batch, conditional):
    """Its own loss is never above that of ggl, and images that the generator cannot make come closer."""
    inputs, labels = tiny_batch
    updates = [SHARE(tiny_task, inputs[i : i + 1], labels[i : i + 1]) for i in range(3)]
    file = conditional[1]
    ggl = reconstruct(gradveil.attack("ggl", generator=file, iterations=60, restarts=2, lr=0.1), tiny_task, updates)
    attack = gradveil.attack("gias", generator=file, iterations=60, weight_iterations=100, seeds=2, spread=0.1)
    steps = []
    gias = reconstruct(attack, tiny_task, updates, progress=lambda *step: steps.append(step[:2]))
    assert (gias.loss < ggl.loss).all()
    assert torch.equal(gias.history.restarts.amin(1), ggl.loss)
    assert metrics.psnr(inputs, gias.inputs[:, 0]).mean() > metrics.psnr(inputs, ggl.inputs[:, 0]).mean() + 2
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {total for _, total in steps} == {160}
    # A step that makes things worse is not taken.
    hopeless = gradveil.attack("gias", generator=file, iterations=60, weight_iterations=1, seeds=2, spread=1e5)
    ended = reconstruct(hopeless, tiny_task, updates)
    torch.testing.assert_close(ended.loss, ggl.loss)
    torch.testing.assert_close(ended.inputs, ggl.inputs)


def test_an_interrupted_gias_returns_what_it_has(tiny_task, tiny_batch, conditional):
    def interrupt(done, _total, _left):
        if done == 3:
            raise KeyboardInterrupt

    update = SHARE(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    found = reconstruct(gradveil.attack("gias", generator=conditional[1]), tiny_task, update, progress=interrupt)
    assert found.interrupted
    assert found.inputs.shape == (1, 1, 1, 6, 6)
    assert found.iterations.tolist() == [3]


@pytest.fixture
def smooth_image():
    down, across = torch.meshgrid(torch.linspace(-1, 1, 6), torch.linspace(-1, 1, 6), indexing="ij")
    return (0.5 + 0.3 * down - 0.1 * across * down)[None, None].double()


def test_ci_net_recovers_a_smooth_image(tiny_task, smooth_image):
    label = torch.tensor([1])
    attack = gradveil.attack("ci-net", iterations=120, lr=0.01)
    found = reconstruct(attack, tiny_task, SHARE(tiny_task, smooth_image, label))
    assert metrics.psnr(smooth_image, found.inputs[0]).item() > 25
    assert found.history.late[0] < 0.1 * found.history.start[0]


def test_ci_net_has_more_weights_than_the_batch_has_pixels():
    def weights(planes):
        return sum(value.numel() for value in ci_net.untrained_network(planes, 3).parameters())

    for pixels in (1, 100_000, 200_000, 400_000):
        planes = ci_net.block_width(pixels, 3)
        assert weights(planes) > pixels
        assert planes == 64 or weights(planes - 64) <= pixels


@pytest.mark.parametrize("name", ["ggl", "ci-net"])
def test_knowledge_of_a_mask_helps(name, tiny_task, conditional, smooth_image):
    """Of a sparse update, an adaptive attacker matches only what arrived; a plain one matches the zeros as well."""
    generator, file = conditional
    label = torch.tensor([2])
    image = own_samples(generator, label) if name == "ggl" else smooth_image
    parameters = {"generator": file} if name == "ggl" else {"lr": 0.01}
    defense = gradveil.defense("top-k", keep=0.1)
    update = defense.share(tiny_task, image, label)
    adaptive, plain = (
        reconstruct(
            gradveil.attack(name, iterations=100, **parameters),
            tiny_task,
            update,
            gradveil.ThreatModel(defense=defense, adaptive=adaptive, labels="known", known_labels=label[None]),
        ).inputs[0]
        for adaptive in (True, False)
    )
    assert metrics.psnr(image, adaptive) > metrics.psnr(image, plain) + 3


def test_a_larger_colour_generator_serves_small_grey_images(tiny_task, make):
    generator, file = make(channels=3, side=6)
    label, rng = torch.tensor([1]), torch.Generator().manual_seed(1)
    image = random_samples(file, tiny_task, label, rng)
    latent = torch.randn(1, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = generator(latent).mean(1, keepdim=True).view(1, 1, 6, 2, 6, 2).mean((3, 5))
    torch.testing.assert_close(image, reference)
    attack = gradveil.attack("ggl", generator=file, iterations=150)
    found = reconstruct(attack, tiny_task, SHARE(tiny_task, image, label))
    assert metrics.psnr(image, found.inputs[0]).item() > 30


def test_what_the_generator_reaches_alone(tiny_task, conditional):
    """On noise of the same length the attack finds images of the generator, but not the victim's."""
    generator, file = conditional
    labels = torch.tensor([2, 0, 3, 1])
    images = own_samples(generator, labels)
    real = [SHARE(tiny_task, images[i : i + 1], labels[i : i + 1]) for i in range(4)]
    noise = [noise_like(update, torch.Generator().manual_seed(i)) for i, update in enumerate(real)]
    for update, other in zip(real, noise, strict=True):
        lengths = [sum(value.square().sum() for value in tensors.values()) for tensors in (update, other)]
        torch.testing.assert_close(*lengths)
        assert update.meta == other.meta
    threat = gradveil.ThreatModel(labels="known", known_labels=labels[:, None])
    attack = gradveil.attack("ggl", generator=file, iterations=100, restarts=2)
    scores = [
        metrics.psnr(images, reconstruct(attack, tiny_task, updates, threat).inputs[:, 0]).mean()
        for updates in (real, noise)
    ]
    drawn = random_samples(file, tiny_task, labels, torch.Generator().manual_seed(9))
    torch.testing.assert_close(drawn, own_samples(generator, labels, seed=9), rtol=1e-6, atol=1e-6)
    scores.append(metrics.psnr(images, drawn).mean())
    assert scores[0] > max(scores[1:]) + 10


def test_generators_that_do_not_fit_are_refused(tiny_task, tiny_batch, make):
    update = SHARE(tiny_task, tiny_batch[0][:1], tiny_batch[1][:1])
    for name in ("ggl", "gias"):
        with pytest.raises(ThreatModelError, match=f"^{name}: needs a generator of images like the victims', got none"):
            reconstruct(gradveil.attack(name), tiny_task, update)
    with pytest.raises(ThreatModelError, match="makes images of 7 classes, got a task with 4"):
        reconstruct(gradveil.attack("ggl", generator=make(classes=7)[1]), tiny_task, update)
    with pytest.raises(ThreatModelError, match=r"makes images with 2 channels, got inputs of shape \[1, 6, 6\]"):
        reconstruct(gradveil.attack("ggl", generator=make(channels=2)[1]), tiny_task, update)
    table = gradveil.Task(nn.Linear(5, 3), input_shape=(5,), classes=3)
    update = SHARE(table, torch.rand(1, 5), torch.tensor([1]))
    with pytest.raises(ThreatModelError, match=r"makes images with 1 channels, got inputs of shape \[5\]"):
        reconstruct(gradveil.attack("ggl", generator=make()[1]), table, update)
    with pytest.raises(ThreatModelError, match=r"ci-net: needs images .*, got inputs of shape \[5\]"):
        reconstruct(gradveil.attack("ci-net"), table, update)
