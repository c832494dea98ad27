import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import source_of
from gradveil.task.sensitivity import batch_parts, direction_bytes


def autograd_gradients(model, inputs, labels):
    model = copy.deepcopy(model)
    F.cross_entropy(model(inputs), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    return model, torch.rand(5, 1, 6, 6), torch.tensor([0, 1, 2, 3, 0])


def test_gradients_equal_autograd(tiny_task, tiny_batch):
    expected = autograd_gradients(tiny_task._functional.live, *tiny_batch)
    got = tiny_task.gradients(*tiny_batch)
    assert list(got) == list(expected)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-12)


def test_per_example_gradients_equal_those_of_single_examples(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    every = tiny_task.per_example_gradients(inputs, labels, chunk=2)
    for index in range(len(inputs)):
        alone = tiny_task.gradients(inputs[index : index + 1], labels[index : index + 1])
        for name in alone:
            torch.testing.assert_close(every[name][index], alone[name], rtol=0, atol=1e-12)
    together = tiny_task.gradients(inputs, labels)
    for name in together:
        torch.testing.assert_close(every[name].mean(0), together[name], rtol=0, atol=1e-12)


class Residual(nn.Module):
    """Two branches that are added, and a strided convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.branch = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.last = nn.Linear(50, 3)

    def forward(self, x):
        x = F.softplus(self.first(x))
        return self.last((x + F.softplus(self.branch(x))).flatten(1))


class Attention(nn.Module):
    """One block of self-attention over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.last = nn.MultiheadAttention(5, 1, batch_first=True), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        rows = self.norm(x.flatten(1, 2))
        return self.last((rows + self.mix(rows, rows, rows, need_weights=False)[0]).mean(1))


TINY_MODELS = {
    "conv": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(27, 3)),
    "residual": Residual,
    "attention": Attention,
}


@pytest.fixture(params=TINY_MODELS)
def small(request, generator):
    """A tiny task in double precision, a batch of two, and the squared norms of its brute-force Jacobian."""
    torch.manual_seed(0)
    task = gradveil.Task(TINY_MODELS[request.param]().double(), input_shape=(1, 5, 5), classes=3)
    inputs, labels = torch.rand(2, 1, 5, 5, generator=generator, dtype=torch.float64), torch.tensor([2, 0])
    jacobian = torch.autograd.functional.jacobian(lambda x: tuple(task.gradients(x, labels).values()), inputs)
    exact = {n: j.flatten(g.ndim).square().sum(-1) for (n, g), j in zip(task.parameters.items(), jacobian, strict=True)}
    return task, inputs, labels, exact


def test_exact_sensitivity_is_the_brute_force_jacobian(small):
    task, inputs, labels, exact = small
    got = task.sensitivity(inputs, labels, directions=None)
    in_parts = task.sensitivity(inputs, labels, directions=None, memory_budget=1)
    for name, expected in exact.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-20)
        torch.testing.assert_close(in_parts[name], expected, rtol=1e-10, atol=1e-20)


def test_the_error_of_the_estimate_is_as_stated(small, generator):
    """Estimate / truth is chi-square with k degrees of freedom over k: mean 1, variance 2 / k, in every coordinate."""
    task, inputs, labels, exact = small
    truth = torch.cat([value.flatten() for value in exact.values()])
    nonzero = truth > 1e-12 * truth.max()
    k, repeats = 4, 120
    ratios = []
    for _ in range(repeats):
        estimate = task.sensitivity(inputs, labels, directions=k, generator=generator)
        ratios.append(torch.cat([value.flatten() for value in estimate.values()])[nonzero] / truth[nonzero])
    ratios = torch.stack(ratios)
    error = gradveil.task.sensitivity_error(k)
    # Five standard errors of each coordinate's mean; the spread is averaged over coordinates.
    assert float((ratios.mean(0) - 1).abs().max()) < 5 * error / repeats**0.5
    assert float(ratios.std(0).square().mean().sqrt()) == pytest.approx(error, rel=0.15)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_sensitivity_does_not_depend_on_the_memory_budget(batch_norm, generator):
    """The budget decides how many directions run together and whether the batch is split, never the result."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(2) if batch_norm else nn.Identity()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(18, 3)).double()
    task = gradveil.Task(model, input_shape=(1, 5, 5), classes=3)
    inputs, labels = torch.rand(5, 1, 5, 5, generator=generator).double(), torch.tensor([0, 1, 2, 0, 1])

    def estimate(budget):
        return task.sensitivity(inputs, labels, 7, generator=torch.Generator().manual_seed(3), memory_budget=budget)

    assert len(batch_parts(task, 5, 1)) == (1 if batch_norm else 5)
    all_at_once = estimate(1 << 30)
    for budget in (1, direction_bytes(task, 3), 3 * direction_bytes(task, 5)):
        for name, value in estimate(budget).items():
            torch.testing.assert_close(value, all_at_once[name], rtol=1e-10, atol=1e-20)


def test_sensitivity_refuses_no_directions(tiny_task, tiny_batch):
    with pytest.raises(ParameterError, match=r"Task.sensitivity: directions must be a whole number of at least 1"):
        tiny_task.sensitivity(*tiny_batch, directions=0)


def test_the_task_follows_the_live_model(tiny_task, tiny_batch):
    before = tiny_task.gradients(*tiny_batch)
    with torch.no_grad():
        for parameter in tiny_task._functional.live.parameters():
            parameter += 0.1
    after = tiny_task.gradients(*tiny_batch)
    expected = autograd_gradients(tiny_task._functional.live, *tiny_batch)
    assert not torch.equal(before["3.weight"], after["3.weight"])
    torch.testing.assert_close(after["3.weight"], expected["3.weight"])


def test_other_weights_leave_the_live_model_alone(tiny_task, tiny_batch):
    kept = {name: value.clone() for name, value in tiny_task.parameters.items()}
    moved = tiny_task.with_parameters({name: value + 1 for name, value in kept.items()})
    assert not torch.equal(moved.gradients(*tiny_batch)["3.bias"], tiny_task.gradients(*tiny_batch)["3.bias"])
    assert all(torch.equal(kept[name], value) for name, value in tiny_task.parameters.items())
    with pytest.raises(InputError, match="must be named"):
        tiny_task.with_parameters({"wrong": torch.zeros(1)})


def test_batch_norm_in_train_mode_uses_the_batch_and_changes_nothing():
    model, inputs, labels = with_batch_norm()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4)
    before = copy.deepcopy(model.state_dict())
    got, expected = task.gradients(inputs, labels), autograd_gradients(model, inputs, labels)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)
    task.sensitivity(inputs, labels, directions=2)
    task.predict(inputs)
    updated = task.updated_buffers(inputs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    trained = copy.deepcopy(model)
    trained(inputs)
    for name, value in updated.items():
        torch.testing.assert_close(value, trained.state_dict()[name])
    assert set(updated) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_batch_norm_in_eval_mode_uses_running_statistics():
    model, inputs, labels = with_batch_norm()
    model(inputs)
    model.eval()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4)
    expected = autograd_gradients(model, inputs, labels)
    every = task.per_example_gradients(inputs, labels)
    for name in expected:
        torch.testing.assert_close(every[name].mean(0), expected[name], rtol=1e-4, atol=1e-6)
    assert task.updated_buffers(inputs) == {}
    torch.testing.assert_close(task.outputs(task.parameters, inputs), model(inputs))
    assert list(task.gradients(inputs, labels)) == [name for name, _ in model.named_parameters()]


def test_per_example_gradients_refuse_batch_statistics():
    model, inputs, labels = with_batch_norm()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4)
    with pytest.raises(InputError, match=r"put the batch-norm modules in eval mode .* or use group norm"):
        task.per_example_gradients(inputs, labels)


class SwapAxes(nn.Module):
    def forward(self, x):
        return x.mT


def with_dropout():
    """Dropout of values and of channels, one module in two places, one called twice."""
    torch.manual_seed(3)
    drop = nn.Dropout(0.5)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.channels, self.drop = nn.Conv2d(1, 4, 3), nn.Dropout2d(0.25), drop
            self.head = nn.Sequential(nn.Linear(64, 8), drop, nn.Linear(8, 3))

        def forward(self, x):
            return self.head(self.drop(torch.tanh(self.channels(self.conv(x))).flatten(1)))

    return Model().double()


def masked_source(seed=0):
    return source_of(torch.Generator().manual_seed(seed))


class TestDropout:
    def batch(self, examples=4):
        torch.manual_seed(1)
        return torch.rand(examples, 1, 6, 6, dtype=torch.float64), torch.arange(examples) % 3

    def task(self):
        return gradveil.Task(with_dropout(), input_shape=(1, 6, 6), classes=3)

    def test_masks_have_the_shapes_and_values_of_torchs_dropout(self):
        task = self.task()
        assert task.dropout_rates == {"channels": 0.25, "drop": 0.5}
        assert task.mask_shapes(4) == {
            "channels.mask0": (4, 4, 1, 1),
            "drop.mask0": (4, 64),
            "drop.mask1": (4, 8),
        }
        masks = task.with_masks(2000, masked_source())._masks
        for name, keep in {"channels.mask0": 4 / 3, "drop.mask0": 2.0}.items():
            assert set(masks[name].unique().tolist()) == {0.0, keep}
            assert masks[name].mean() == pytest.approx(1, abs=0.03)

    def test_gradients_equal_autograd_with_the_same_masks(self):
        task, (inputs, labels) = self.task(), self.batch()
        masked = task.with_masks(4, masked_source())
        model, masks = with_dropout(), masked._masks
        z = torch.tanh(model.conv(inputs) * masks["channels.mask0"]).flatten(1) * masks["drop.mask0"]
        outputs = model.head[2](model.head[0](z) * masks["drop.mask1"])
        expected = torch.autograd.grad(F.cross_entropy(outputs, labels), list(model.parameters()))
        for found, value in zip(masked.gradients(inputs, labels).values(), expected, strict=True):
            torch.testing.assert_close(found, value)

    def test_per_example_gradients_and_parts_use_each_examples_own_mask(self):
        batch = self.batch()
        masked = self.task().with_masks(4, masked_source())
        each = masked.per_example_gradients(*batch)
        for name, value in masked.gradients(*batch).items():
            torch.testing.assert_close(each[name].mean(0), value)
        part = masked.for_examples(slice(1, 3)).per_example_gradients(batch[0][1:3], batch[1][1:3])
        for name, value in part.items():
            torch.testing.assert_close(value, each[name][1:3])
        exact = masked.sensitivity(*batch, directions=None)
        in_parts = masked.sensitivity(*batch, directions=None, memory_budget=1)
        for name, value in exact.items():
            torch.testing.assert_close(in_parts[name], value)

    def test_it_is_never_silently_off(self):
        task, batch = self.task(), self.batch()
        for function in (task.gradients, task.per_example_gradients, task.sensitivity):
            with pytest.raises(InputError, match=r"dropout 'channels' is active, so this depends on masks; draw them"):
                function(*batch)
        with pytest.raises(InputError, match="masks were drawn for 4 rows and used with 2"):
            task.with_masks(4, masked_source()).gradients(batch[0][:2], batch[1][:2])

    def test_inference_mode_is_that_of_torch(self):
        task, (inputs, labels) = self.task(), self.batch()
        expected = autograd_gradients(with_dropout().eval(), inputs, labels)
        off = task.without_dropout()
        assert not off.has_dropout
        for name, value in off.gradients(inputs, labels).items():
            torch.testing.assert_close(value, expected[name])
            torch.testing.assert_close(task.gradient(task.parameters, inputs, labels)[name], expected[name])

    def test_the_statistics_of_a_batch_norm_depend_on_the_mask_before_it(self):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3))
        task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
        masked = task.with_masks(8, masked_source())
        inputs = torch.rand(8, 1, 2, 2)
        new = masked.updated_buffers(inputs)["2.running_mean"]
        torch.testing.assert_close(new, 0.1 * (inputs.flatten(1) * masked._masks["1.mask0"]).mean(0))
        fixed = masked.with_fixed_norms(masked.updated_buffers(inputs))
        assert fixed.has_dropout
        assert not fixed.has_batch_statistics

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (nn.AlphaDropout(), "expected an active dropout to be nn.Dropout .* got AlphaDropout '1'"),
            (nn.Sequential(SwapAxes(), nn.Dropout(), SwapAxes()), "expected the examples in the first dimension"),
        ],
    )
    def test_dropout_that_cannot_be_masked_is_refused(self, module, message):
        model = nn.Sequential(nn.Flatten(), module, nn.Linear(4, 3))
        with pytest.raises(InputError, match=message):
            gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
        assert gradveil.Task(model.eval(), input_shape=(1, 2, 2), classes=3).size == 15


def test_normalisation_is_part_of_the_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
    task = gradveil.Task(model, input_shape=(2, 2, 2), classes=3, mean=(0.1, 0.2), std=(0.5, 2.0))
    images, labels = torch.rand(4, 2, 2, 2), torch.tensor([0, 1, 2, 0])
    normalised = (images - torch.tensor([0.1, 0.2]).view(2, 1, 1)) / torch.tensor([0.5, 2.0]).view(2, 1, 1)
    expected = autograd_gradients(model, normalised, labels)
    torch.testing.assert_close(task.gradients(images, labels)["1.weight"], expected["1.weight"])
    with pytest.raises(ParameterError, match="one value for each of the 2 entries of an input's first axis"):
        gradveil.Task(model, input_shape=(2, 2, 2), classes=3, mean=(0.1,), std=(1.0, 1.0))


def test_the_classifier_is_found_by_running_the_model():
    class Backwards(nn.Module):
        """Declares its layers in a different order than it uses them."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 3, bias=False)
            self.first = nn.Linear(4, 5)

        def forward(self, x):
            return self.last(self.first(x.flatten(1)).relu())

    task = gradveil.Task(Backwards(), input_shape=(1, 2, 2), classes=3)
    assert task.classifier == gradveil.task.Classifier("last.weight", None)


def test_a_custom_loss_and_soft_labels(tiny_task, tiny_batch):
    inputs, labels = tiny_batch
    soft = F.one_hot(labels, 4).double()
    hard_gradients, soft_gradients = tiny_task.gradients(inputs, labels), tiny_task.gradients(inputs, soft)
    torch.testing.assert_close(hard_gradients["3.weight"], soft_gradients["3.weight"])
    squared = gradveil.Task(
        tiny_task._functional.live, lambda outputs, y: F.mse_loss(outputs, y), input_shape=(1, 6, 6), classes=4
    )
    assert not torch.allclose(squared.gradients(inputs, soft)["3.weight"], soft_gradients["3.weight"])


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.zeros(2, 1, 5, 5), torch.tensor([0, 1]), r"inputs must have shape \[N, 1, 6, 6\]"),
        (torch.zeros(0, 1, 6, 6), torch.tensor([]).long(), r"with N >= 1"),
        (torch.zeros(2, 1, 6, 6), torch.tensor([0, 1]), r"type of the weights, torch.float64, got torch.float32"),
        (torch.zeros(2, 1, 6, 6).double(), torch.tensor([0]), r"got 1 labels for 2 inputs"),
        (torch.zeros(2, 1, 6, 6).double(), torch.tensor([0, 4]), r"labels must lie in 0 to 3 .* got 0 to 4"),
        (torch.zeros(2, 1, 6, 6).double(), torch.tensor([-1, 0]), r"got -1 to 0"),
        (torch.zeros(2, 1, 6, 6).double(), torch.tensor([[0], [1]]), r"labels must be int64 of shape \[2\]"),
        (torch.zeros(2, 1, 6, 6).double(), torch.tensor([0.0, 1.0]), r"class numbers must be of an integer type"),
    ],
)
def test_batches_that_do_not_fit_are_refused(tiny_task, inputs, labels, message):
    with pytest.raises(InputError, match=message):
        tiny_task.gradients(inputs, labels)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.full((1, 1, 6, 6), torch.nan).double(), torch.tensor([0]), "inputs must be finite"),
        (torch.zeros(1, 1, 6, 6).double(), [0], "labels must be a tensor, got list"),
        ([[0.0]], torch.tensor([0]), "inputs must be a tensor, got list"),
        (torch.zeros(1, 1, 6, 6).double(), torch.tensor([0], dtype=torch.int32), "labels must be int64"),
    ],
)
def test_malformed_batches_are_refused(tiny_task, inputs, labels, message):
    with pytest.raises(InputError, match=message):
        tiny_task.gradients(inputs, labels)


class RandomOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(F.dropout(x.flatten(1), 0.5, self.training))


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)), x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (RandomOutput(), "gives different outputs for the same inputs"),
        (
            nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(4, 3)),
            "writes its buffer",
        ),
        (nn.Sequential(nn.Flatten()), "no parameters to train"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "has no shape yet"),
        (TwoOutputs(4, 3), "must return one tensor, got tuple"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_are_not_functions_of_the_data_are_refused(model, message):
    with pytest.raises(InputError, match=message):
        gradveil.Task(model, input_shape=(1, 2, 2), classes=3)


def test_batch_norm_over_a_single_value_says_what_to_do():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
    with pytest.raises(InputError, match="use a larger batch .* or use group norm"):
        task.gradients(torch.rand(1, 1, 2, 2), torch.tensor([0]))


def test_frozen_parameters_are_constants():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3))
    model[1].requires_grad_(False)
    task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
    batch = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    gradients = task.gradients(*batch)
    assert list(gradients) == ["2.weight", "2.bias"]
    expected = autograd_gradients(model, *batch)
    torch.testing.assert_close(gradients["2.weight"], expected["2.weight"])
    assert task.to(torch.float64).gradients(batch[0].double(), batch[1])["2.bias"].dtype == torch.float64


def test_tied_weights_have_one_name_and_one_gradient():
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x.flatten(1)).sigmoid())

    task = gradveil.Task(Tied(), input_shape=(1, 1, 3), classes=3)
    batch = torch.rand(2, 1, 1, 3), torch.tensor([0, 1])
    assert task.classifier == gradveil.task.Classifier("a.weight", "b.bias")
    torch.testing.assert_close(
        task.gradients(*batch)["a.weight"], autograd_gradients(task._functional.live, *batch)["a.weight"]
    )


def test_only_a_linear_layer_that_computes_the_logits_is_the_classifier():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten())
    assert gradveil.Task(model, input_shape=(1, 2, 2), classes=3).classifier is None


def test_torchs_attention_has_second_and_forward_derivatives():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Flatten(2), layer, nn.Flatten(), nn.Linear(16, 3))
    task = gradveil.Task(model, input_shape=(4, 2, 2), classes=3)
    batch = torch.rand(2, 4, 2, 2), torch.tensor([0, 1])
    assert all(torch.isfinite(value).all() for value in task.sensitivity(*batch, directions=2).values())
    images = batch[0].clone().requires_grad_()
    sum(value.square().sum() for value in task.gradients(images, batch[1]).values()).backward()
    assert images.grad.abs().sum() > 0


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"the model does not take inputs of shape \[2, 1, 3, 3\]"):
        gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), input_shape=(1, 3, 3), classes=3)
    with pytest.raises(InputError, match=r"logits of shape \[N, 5\], got \[2, 3\]"):
        gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), input_shape=(1, 2, 2), classes=5)
    with pytest.raises(ParameterError, match="loss must be one of cross-entropy, logistic, got 'hinge'"):
        gradveil.Task(nn.Linear(4, 3), "hinge", input_shape=(4,), classes=3)


def test_the_logistic_loss_is_cross_entropy_of_two_classes_from_one_logit(generator):
    """One logit z is equivalent to the two logits (0, z)."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Flatten(), nn.Linear(4, 1)).double()
    two = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        two[1].weight.copy_(torch.cat([torch.zeros_like(one[1].weight), one[1].weight]))
        two[1].bias.copy_(torch.cat([torch.zeros_like(one[1].bias), one[1].bias]))
    inputs, labels = torch.rand(5, 1, 2, 2, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    task = gradveil.Task(one, "logistic", input_shape=(1, 2, 2), classes=2)
    pair = gradveil.Task(two, input_shape=(1, 2, 2), classes=2)
    torch.testing.assert_close(
        task.gradients(inputs, labels)["1.weight"][0], pair.gradients(inputs, labels)["1.weight"][1]
    )
    soft = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    soft = soft / soft.sum(1, keepdim=True)
    torch.testing.assert_close(task.gradients(inputs, soft)["1.bias"][0], pair.gradients(inputs, soft)["1.bias"][1])
    assert task.loss_name == "logistic"
    with pytest.raises(ParameterError, match="needs 2 classes, got classes=3"):
        gradveil.Task(one, "logistic", input_shape=(1, 2, 2), classes=3)
    with pytest.raises(InputError, match=r"logits of shape \[N, 1\], got \[2, 2\]"):
        gradveil.Task(two, "logistic", input_shape=(1, 2, 2), classes=2)


def test_a_model_can_be_copied_changed_and_put_back(tiny_task, tiny_batch):
    moved = tiny_task.with_parameters({name: value + 0.1 for name, value in tiny_task.parameters.items()})
    copied = moved.copy_model()
    torch.testing.assert_close(copied(tiny_batch[0]), moved.outputs(moved.parameters, tiny_batch[0]))
    with torch.no_grad():
        copied[0].weight.zero_()
    assert moved.parameters["0.weight"].any()  # a copy
    single = tiny_task.to(torch.float32).copy_model()
    assert {value.dtype for value in single.parameters()} == {torch.float32}
    named = gradveil.Task(copied, input_shape=(1, 6, 6), classes=4, mean=[0.4], std=[0.2]).with_model(
        moved.copy_model()
    )
    values = named.normalised(tiny_batch[0])
    torch.testing.assert_close(values, (tiny_batch[0] - 0.4) / 0.2)
    torch.testing.assert_close(named.denormalised(values), tiny_batch[0])
    torch.testing.assert_close(named.outputs(named.parameters, tiny_batch[0]), moved.outputs(moved.parameters, values))


class PerPosition(nn.Module):
    """Predicts a class for each of five columns of numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 6, 3, padding=1), nn.Conv1d(6, 3, 1)

    def forward(self, x):
        return self.last(self.first(x).sigmoid())


def per_position():
    torch.manual_seed(0)
    inputs = torch.rand(300, 2, 5, dtype=torch.float64)
    labels = (2.5 * inputs.mean(1)).long().clamp(max=2)
    return gradveil.Task(PerPosition().double(), input_shape=(2, 5), classes=3), inputs, labels


def regression():
    torch.manual_seed(0)
    inputs = torch.rand(300, 4, dtype=torch.float64)
    heights = torch.stack([inputs.sum(1), inputs[:, 0] - inputs[:, 1]], 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)).double()
    return gradveil.Task(model, F.mse_loss, input_shape=(4,), classes=None), inputs, heights


@pytest.mark.parametrize("make", [per_position, regression])
class TestOtherTargets:
    """Targets that are not one class per input: gradients, per-example gradients, sensitivity, training."""

    def test_gradients_equal_autograd_and_the_mean_over_examples(self, make):
        task, inputs, targets = make()
        batch = inputs[:4], targets[:4]
        got, every = task.gradients(*batch), task.per_example_gradients(*batch)
        values = torch.autograd.grad(
            task.loss_of(task._functional.live(batch[0]), batch[1]), list(task._functional.live.parameters())
        )
        for (name, value), expected in zip(got.items(), values, strict=True):
            torch.testing.assert_close(value, expected)
            torch.testing.assert_close(every[name].mean(0), expected)
            alone = task.gradients(inputs[2:3], targets[2:3])[name]
            torch.testing.assert_close(every[name][2], alone)

    def test_sensitivity_is_the_brute_force_jacobian(self, make):
        task, inputs, targets = make()
        batch = inputs[:2], targets[:2]
        jacobian = torch.autograd.functional.jacobian(lambda x: tuple(task.gradients(x, batch[1]).values()), batch[0])
        got = task.sensitivity(*batch, directions=None)
        for value, exact in zip(got.values(), jacobian, strict=True):
            torch.testing.assert_close(value, exact.flatten(value.ndim).square().sum(-1), rtol=1e-10, atol=1e-20)

    def test_shapes_that_do_not_fit_are_refused(self, make):
        task, inputs, targets = make()
        with pytest.raises(InputError, match="got 3 labels for 4 inputs"):
            task.gradients(inputs[:4], targets[:3])
        with pytest.raises(InputError, match="attack: needs a task with one class per input, got (one for|no classes)"):
            task.single_classes("attack")


def test_class_numbers_and_probabilities_of_positions():
    task, inputs, labels = per_position()
    assert task.positions == (5,)
    assert task.classifier is None
    soft = F.one_hot(labels[:4], 3).movedim(-1, 1).double()
    hard = task.gradients(inputs[:4], labels[:4])["first.weight"]
    torch.testing.assert_close(hard, task.gradients(inputs[:4], soft)["first.weight"])
    assert task.classes_of(task.predict(inputs)).shape == labels.shape
    with pytest.raises(InputError, match=r"labels must be int64 of shape \[4, 5\], got torch.int64 of shape \[4\]"):
        task.gradients(inputs[:4], labels[:4, 0])
    with pytest.raises(InputError, match=r"probabilities must have shape \[4, 3, 5\], got \[4, 3\]"):
        task.gradients(inputs[:4], soft[..., 0])
    drawn = task.random_labels(7, torch.Generator().manual_seed(0))
    assert drawn.shape == (7, 5)
    assert int(drawn.max()) == 2


def test_a_custom_loss_needs_no_classes_and_takes_any_finite_targets():
    task, inputs, _ = regression()
    assert repr(task) == "Task(Sequential, input_shape=(4,), classes=None, parameters=58)"
    with pytest.raises(InputError, match="labels must be finite"):
        task.gradients(inputs[:1], torch.tensor([[0.0, torch.nan]]).double())
    with pytest.raises(InputError, match="cannot be drawn at random"):
        task.random_labels(3, torch.Generator())
    with pytest.raises(ParameterError, match="the cross-entropy loss needs classes, got None"):
        gradveil.Task(task._functional.live, input_shape=(4,), classes=None)
    counts = gradveil.Task(task._functional.live, lambda z, y: (z - y).square().mean(), input_shape=(4,), classes=None)
    assert torch.isfinite(counts.gradients(inputs[:2], torch.tensor([[3, -1], [200, 7]]))["0.weight"]).all()


def test_normalisation_follows_the_first_axis_of_an_input():
    task, inputs, _ = regression()
    shifted = gradveil.Task(
        task._functional.live,
        F.mse_loss,
        input_shape=(4,),
        classes=None,
        mean=[0.1, 0.2, 0.3, 0.4],
        std=[1.0, 2.0, 3.0, 4.0],
    )
    mean, std = torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    torch.testing.assert_close(shifted.normalised(inputs), (inputs - mean) / std)
    torch.testing.assert_close(shifted.denormalised(shifted.normalised(inputs)), inputs)
    assert task.with_model(task.copy_model()).classes is None


def test_probabilities_for_a_custom_loss_have_the_classes_second(tiny_task, tiny_batch):
    squared = gradveil.Task(tiny_task._functional.live, F.mse_loss, input_shape=(1, 6, 6), classes=4)
    with pytest.raises(InputError, match=r"must have shape \[3, 4\], got \[3\]; .* need a task with classes=None"):
        squared.gradients(tiny_batch[0], torch.rand(3).double())


DEVICES = [
    "cpu",
    *(["cuda"] if torch.cuda.is_available() else []),
    *(["mps"] if torch.backends.mps.is_available() else []),
]


def all_results(task, inputs, labels):
    """Everything that a task computes, by name."""
    return {
        "gradients": task.gradients(inputs, labels),
        "sensitivity": task.sensitivity(inputs[:2], labels[:2], directions=None),
        "smoothed": task.smoothed(5.0).gradients(inputs, labels),
        "buffers": task.updated_buffers(inputs),
        "statistics": task.statistics(task.parameters, inputs),
        "predictions": {"": task.predict(inputs)},
        "representation": {"": task.representation(task.parameters, inputs)},
        "denormalised": {"": task.denormalised(task.normalised(inputs))},
        "model": dict(task.copy_model().named_parameters()),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_a_task_computes_the_same_on_every_device(device):
    model, inputs, labels = with_batch_norm()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4, mean=[0.4], std=[0.2])
    moved = task.to(device)
    assert (moved.device.type, moved.dtype) == (device, torch.float32)
    expected, got = all_results(task, inputs, labels), all_results(moved, inputs.to(device), labels.to(device))
    for result, values in expected.items():
        for name, value in values.items():
            assert got[result][name].device.type == device, (result, name)
            torch.testing.assert_close(got[result][name].cpu(), value, rtol=1e-3, atol=1e-4)
    assert next(model.parameters()).device.type == "cpu"


def test_everything_a_task_holds_goes_to_another_device():
    """Tensors on the meta device have no values and cannot be combined with tensors elsewhere."""
    model, inputs, labels = with_batch_norm()
    task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4, mean=[0.4], std=[0.2]).to("meta")
    assert task.device.type == "meta"
    gradients = task.gradient(task.parameters, inputs.to("meta"), labels.to("meta"))
    assert {name: value.shape for name, value in gradients.items()} == {n: v.shape for n, v in model.named_parameters()}
    assert {value.device.type for value in (*gradients.values(), *task.buffers.values())} == {"meta"}
    assert task.denormalised(inputs.to("meta")).device.type == "meta"
    with pytest.raises(InputError, match=r"on the device of the weights, meta, got cpu; move the inputs"):
        task.gradients(inputs, labels)
    assert next(model.parameters()).device.type == "cpu"


def test_precision_and_device_can_be_given_in_any_form(tiny_task):
    for moved in (
        tiny_task.to(torch.float32),
        tiny_task.to("cpu", torch.float32),
        tiny_task.to(torch.device("cpu")).to(dtype=torch.float32),
        tiny_task.to(device="cpu", dtype=torch.float32),
    ):
        assert (moved.device.type, moved.dtype) == ("cpu", torch.float32)
    assert tiny_task.to("cpu").dtype == tiny_task.dtype == torch.float64
    counted = gradveil.Task(with_batch_norm()[0], input_shape=(1, 6, 6), classes=4).to(torch.float64)
    assert counted.buffers["1.num_batches_tracked"].dtype == torch.int64


def test_by_autograd_does_not_affect_other_tasks(tiny_task, tiny_batch):
    """While one thread uses autograd, others vmap their own tasks."""
    fast = tiny_task.with_model(tiny_task.copy_model()).by_autograd()
    expected = tiny_task.gradients(*tiny_batch)
    failures = []

    def loop():
        for _ in range(50):
            leaf = tiny_batch[0].clone().requires_grad_()
            got = fast.gradient(fast.parameters, leaf, tiny_batch[1])
            (slope,) = torch.autograd.grad(sum(value.square().sum() for value in got.values()), leaf)
            failures.extend(n for n, v in got.items() if not torch.allclose(v, expected[n]) or not slope.any())

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(50):
        every = tiny_task.per_example_gradients(*tiny_batch)
        torch.testing.assert_close(every["3.bias"].mean(0), expected["3.bias"])
    thread.join()
    assert not failures
    assert torch.equal(fast.by_autograd(False).gradients(*tiny_batch)["3.bias"], expected["3.bias"])
