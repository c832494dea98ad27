"""A task: a model and a loss as pure functions of weights, inputs and labels."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core import checks
from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import Randomness, Source, source_of
from gradveil.modality import IMAGE, Modality
from gradveil.task.model import Classifier, FunctionalModel, Gradients, named_tensors, recording
from gradveil.task.sensitivity import MEMORY_BUDGET, chunk_size, squared_sensitivity

Loss = Callable[[Tensor, Tensor], Tensor]


def _logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of two classes from a single logit, the one of class 1."""
    target = labels if labels.ndim == 1 else labels[:, 1]
    return F.binary_cross_entropy_with_logits(outputs[:, 0], target.to(outputs.dtype))


LOSSES: dict[str, Loss] = {"cross-entropy": F.cross_entropy, "logistic": _logistic}


class Task:
    r"""A model with its loss: gradients, per-example gradients and how gradients react to the inputs.

    Everything is computed functionally (`torch.func`), so it can be vmapped and differentiated again, and
    the model is never changed. The task follows the live model: after an optimiser step it uses the new weights. While
    it computes, torch puts tensors into copies of its modules: give each thread its own task (`with_model`).

    Frozen parameters (``requires_grad=False``) are constants: they have no gradient and are never shared.
    Batch norm and dropout are in the mode that their modules have when the task is created. A batch-norm module in
    train mode uses the statistics of the batch and leaves its running statistics alone, so nothing passes from
    one client to the next (`updated_buffers` returns the new statistics instead of storing them); in eval mode it
    uses the running statistics. A dropout module in train mode needs a mask for every example: a client draws fresh
    ones in every step (`with_masks`), and without any the pure functions below compute in inference mode. Modules that
    are random in another way or write other buffers while they compute are refused: their gradients are not a function
    of the data.

    Args:
        model: any module that maps a batch ``[N, *input_shape]`` to one tensor of outputs, for cross-entropy logits
            ``[N, classes]``, or ``[N, classes, *positions]`` if every position of an input has a class.
        loss: ``"cross-entropy"``; ``"logistic"``, which distinguishes two classes by one logit; or a function
            ``(outputs, labels) -> scalar``, the mean over the batch, for labels of any shape with N first.
        input_shape: shape of one input, such as ``(3, 32, 32)``. Images are in [0, 1] everywhere in gradveil.
        classes: number of classes; None for a custom loss whose labels are not classes.
        mean, std: the model's normalisation, one value for each entry of the first axis of an input (an image's
            channels), applied to inputs in the modality's range. Default: no normalisation.
        modality: what an input is.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> task = Task(model, input_shape=(1, 2, 2), classes=3)
        >>> gradients = task.gradients(torch.rand(8, 1, 2, 2), torch.zeros(8, dtype=torch.long))
        >>> {name: tuple(g.shape) for name, g in gradients.items()}
        {'1.weight': (3, 4), '1.bias': (3,)}
        >>> task.classifier
        Classifier(weight='1.weight', bias='1.bias')
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss = "cross-entropy",
        *,
        input_shape: Sequence[int],
        classes: int | None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        modality: Modality = IMAGE,
    ) -> None:
        self._settings: dict[str, Any] = {"loss": loss, "input_shape": input_shape, "classes": classes}
        self._settings |= {"mean": mean, "std": std, "modality": modality}
        self.modality = modality
        self.input_shape = tuple(
            checks.integer("Task", "every entry of input_shape", size, low=1) for size in input_shape
        )
        self.classes = None if classes is None else checks.integer("Task", "classes", classes, low=1)
        if isinstance(loss, str):
            self._loss: Loss = LOSSES[checks.choice("Task", "loss", loss, LOSSES)]
        else:
            self._loss = loss
        # An attacker who inverts the loss must know which one it is; None for a custom loss.
        self.loss_name = next((name for name, known in LOSSES.items() if known is self._loss), None)
        if self.loss_name and self.classes is None:
            raise ParameterError(f"Task: the {self.loss_name} loss needs classes, got None; pass their number")
        if self.loss_name == "logistic" and self.classes != 2:
            raise ParameterError(f"Task: the logistic loss needs 2 classes, got classes={self.classes}")
        self._normalisation = _normalisation(mean, std, self.input_shape)
        self._by_autograd = False
        self._parameters: Gradients | None = None  # None means those of the live model
        self._buffers: Gradients | None = None
        self._masks: Gradients = {}  # of active dropout: what each value is multiplied by
        self._functional = FunctionalModel(model)
        trace = self._functional.trace(self.parameters, self.buffers, self.normalised(self._probe()))
        logits = 1 if self.loss_name == "logistic" else self.classes
        shape = tuple(trace.outputs.shape)
        # Shape of the positions of an input that have a class each; () if the input has one class.
        self.positions = shape[2:] if self.loss_name == "cross-entropy" else ()
        if self.loss_name and shape != (2, logits, *self.positions):
            raise InputError(
                f"Task: the model must return logits of shape [N, {logits}], got {list(shape)} for N = 2; "
                "check classes="
            )
        self.classifier: Classifier | None = trace.classifier
        self.activations: int = trace.activations
        self._functional.find_masks(
            {**self.parameters, **self.buffers}, lambda count: self.normalised(self._probe(count))
        )

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Gradients:
        """The trained weights by name, detached; the live model's unless `with_parameters` made the task."""
        if self._parameters is not None:
            return self._parameters
        return {name: value.detach() for name, value in self._functional.live.named_parameters() if value.requires_grad}

    @property
    def buffers(self) -> Gradients:
        """All tensors that are not trained, by name, detached: running statistics, constants, frozen parameters."""
        if self._buffers is not None:
            return self._buffers
        return {name: value.detach() for name, value in named_tensors(self._functional.live) if not value.requires_grad}

    @property
    def loss_function(self) -> Loss:
        """The loss as a function of outputs and labels."""
        return self._loss

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(iter(self.parameters.values())).dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.parameters.values())).device

    @property
    def has_batch_statistics(self) -> bool:
        """Whether a batch norm uses the statistics of the batch, which makes the examples of a batch interact."""
        return bool(self._functional.batch_norms)

    def with_parameters(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> "Task":
        """The same task with other weights; the live model is not changed."""
        current = self.parameters
        if list(parameters) != list(current):
            raise InputError(f"Task: parameters must be named {list(current)} in this order, got {list(parameters)}")
        other = copy.copy(self)
        other._parameters = {name: value.detach() for name, value in parameters.items()}
        other._buffers = {**self.buffers, **(buffers or {})}
        return other

    def copy_model(self) -> nn.Module:
        """A copy of the model with the task's weights, to build another model from."""
        model = copy.deepcopy(self._functional.live)
        values = {**self.parameters, **self.buffers}
        with torch.no_grad():
            for name, tensor in named_tensors(model):
                tensor.data = values[name].clone()  # not copy_, because the task may be in another precision
        return model

    def with_model(self, model: nn.Module) -> "Task":
        """A task for another model with the same loss, inputs, classes and normalisation."""
        return Task.like(self, model)

    @classmethod
    def like(cls, task: "Task", model: nn.Module) -> Self:
        """`with_model` for subclasses: a task for `model` with everything else as in `task`."""
        return cls(model, **task._settings)

    def with_fixed_norms(self, buffers: Mapping[str, Tensor]) -> "Task":
        """The same task with batch norms in evaluation mode: they use the running statistics in `buffers`.

        Then every example has a gradient of its own, even if the task itself uses the statistics of the batch.
        """
        model = self.copy_model()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        other = copy.copy(self)
        other._functional = FunctionalModel(model)
        other._functional.find_masks(
            {**self.parameters, **self.buffers}, lambda count: self.normalised(self._probe(count))
        )
        return other.with_parameters(self.parameters, buffers)

    # -- dropout ------------------------------------------------------------------------------------------------------

    @property
    def dropout_rates(self) -> dict[str, float]:
        """The rates of the dropout modules that are active in training, by name."""
        return dict(self._functional.dropout_rates)

    @property
    def has_dropout(self) -> bool:
        """Whether a dropout is active in training, so that gradients depend on masks that a client draws."""
        return bool(self._functional.dropout_rates)

    def mask_shapes(self, examples: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the dropout masks of a batch, by name: one mask for each call of each active dropout."""
        return {name: (examples * rows, *rest) for name, (rows, *rest) in self._functional.mask_shapes.items()}

    def largest_masks(self) -> dict[str, float]:
        """What each mask multiplies a value by that is not dropped, 1 / (1 - rate), by the name of the mask."""
        rates = {name: self._functional.dropout_rates[name.rpartition(".")[0]] for name in self._functional.mask_shapes}
        return {name: 0.0 if rate == 1 else 1 / (1 - rate) for name, rate in rates.items()}

    def with_masks(self, examples: int, source: Source) -> Self:
        """The same task with freshly drawn dropout masks for a batch of `examples`; itself if no dropout is active.

        >>> model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3))
        >>> task = Task(model, input_shape=(1, 2, 2), classes=3)
        >>> source = source_of(torch.Generator().manual_seed(0))
        >>> batch = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
        >>> one, other = (task.with_masks(2, source).gradients(*batch) for _ in range(2))
        >>> torch.equal(one["2.weight"], other["2.weight"])
        False
        """
        if not self.has_dropout:
            return self
        masks, kept = {}, self.largest_masks()
        for name, shape in self.mask_shapes(examples).items():
            rate = self._functional.dropout_rates[name.rpartition(".")[0]]
            drawn = source.uniform(torch.empty(shape, dtype=self.dtype, device=self.device))
            masks[name] = (drawn >= rate).to(self.dtype) * kept[name]
        return self.with_given_masks(masks)

    def with_given_masks(self, masks: Mapping[str, Tensor]) -> Self:
        """The same task with these dropout masks, of the shapes that `mask_shapes` says."""
        other = copy.copy(self)
        other._masks = dict(masks)
        return other

    def for_examples(self, chosen: slice | Tensor) -> Self:
        """The task for a part of the batch that its dropout masks were drawn for; itself if it has none."""
        if not self._masks:
            return self
        return self.with_given_masks(
            {name: mask[chosen].flatten(0, 1) for name, mask in self._masks_by_example().items()}
        )

    def without_dropout(self) -> "Task":
        """The same task with dropout in inference mode."""
        if not self.has_dropout:
            return self
        model = self.copy_model()
        for name in self._functional.dropout_rates:
            model.get_submodule(name).eval()
        other = copy.copy(self)
        other._functional, other._masks = FunctionalModel(model), {}
        return other.with_parameters(self.parameters, self.buffers)

    def _masks_by_example(self) -> Gradients:
        """The masks ``[examples, rows of one example, ...]``."""
        rows = {name: shape[0] for name, shape in self._functional.mask_shapes.items()}
        return {name: mask.view(-1, rows[name], *mask.shape[1:]) for name, mask in self._masks.items()}

    def _check_masks(self) -> None:
        if self.has_dropout and not self._masks:
            raise InputError(
                f"Task: dropout {next(iter(self.dropout_rates))!r} is active, so this depends on masks; draw them with "
                "task.with_masks(len(inputs), source), or use task.without_dropout()"
            )

    def normalised(self, inputs: Tensor) -> Tensor:
        """The values that the model is fed for these inputs."""
        if self._normalisation is None:
            return inputs
        mean, std = (value.to(inputs) for value in self._normalisation)
        return (inputs - mean) / std

    def denormalised(self, values: Tensor) -> Tensor:
        """The inputs for which the model is fed these values."""
        if self._normalisation is None:
            return values
        mean, std = (value.to(values) for value in self._normalisation)
        return values * std + mean

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> "Task":
        """The same task on another device or in another precision; the live model is not changed.

        Args:
            device: where weights, buffers and normalisation go; may also be a dtype.
            dtype: type of the weights and of floating-point buffers.

        >>> task = Task(nn.Linear(2, 2), input_shape=(2,), classes=2)
        >>> task.to(torch.float64).dtype, task.to("cpu", torch.float64).dtype, task.to(device="meta").device
        (torch.float64, torch.float64, device(type='meta'))
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def moved(values: Gradients) -> Gradients:
            return {name: v.to(device, dtype if v.is_floating_point() else None) for name, v in values.items()}

        other = self.with_parameters(moved(self.parameters), moved(self.buffers))
        other._masks = moved(self._masks)
        if self._normalisation is not None:
            mean, std = self._normalisation
            other._normalisation = mean.to(device), std.to(device)
        return other

    def by_autograd(self, wanted: bool = True) -> "Task":
        """The same task with `gradient` computed by torch.autograd if `wanted`, else by torch.func as usual.

        Autograd is 1.1 to 1.3 times faster for one victim, but cannot be vmapped.
        """
        other = copy.copy(self)
        other._by_autograd = wanted
        return other

    @property
    def has_kinks(self) -> bool:
        """Whether the model has ReLU modules, at whose kinks its gradients jump."""
        return bool(self._functional.relus)

    def smoothed(self, sharpness: float) -> "Task":
        r"""The same task with the kink of every ReLU and LeakyReLU module smoothed.

        .. math:: relu(x) \approx log(1 + e^{\beta x}) / \beta, \quad \beta = sharpness / rms(x)

        where rms(x) is the typical input of that particular module, measured on noise. The gradient of a ReLU network
        jumps wherever a unit switches on or off, so a gradient-matching cost has no useful slope there; the smoothed
        network has one. At sharpness 5 it is a different network, at 100 nearly the same.
        """
        checks.number("Task.smoothed", "sharpness", sharpness, above=0)
        other = copy.copy(self)
        other._functional = self._functional.smoothed(
            sharpness, {**self.parameters, **self.buffers}, self.normalised(self._probe())
        )
        return other

    # -- pure functions: no checks, safe under vmap, grad and jvp --------------------------------------------------

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The outputs of the model in training, as a pure function (`predict` gives those in evaluation mode)."""
        return self._call(self._functional.stateless, parameters, self.buffers, inputs)

    def loss(self, parameters: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch as a pure function; see `check` for labels."""
        return self._loss(self.outputs(parameters, inputs), labels)

    def gradient(self, parameters: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Gradients:
        """Gradient of `loss` with respect to the parameters as a pure function."""
        if self._by_autograd:
            leaves = {n: v if v.requires_grad else v.detach().requires_grad_() for n, v in parameters.items()}
            with torch.enable_grad():
                loss = self.loss(leaves, inputs, labels)
                values = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            return dict(zip(leaves, values, strict=True))
        result: Gradients = grad(self.loss)(dict(parameters), inputs, labels)
        return result

    def representation(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The inputs of the classifier, ``[N, units]``, as a pure function; captured while the model runs."""
        if self.classifier is None:
            raise InputError("Task: the model has no linear classifier, so there is no representation before it")
        stateless = self._functional.stateless
        weight = stateless.get_parameter(self.classifier.weight)
        linears = {n: m for n, m in stateless.named_modules() if isinstance(m, nn.Linear) and m.weight is weight}
        classifier_inputs: list[Tensor] = []
        with recording(linears, lambda _name, value: classifier_inputs.append(value)):
            self.outputs(parameters, inputs)
        return classifier_inputs[-1]  # if layers share a weight, the last one to run computes the logits

    def inputs_of(self, module: str, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """What a module of the model is fed, as a pure function; of a module that runs more than once, the last."""
        fed: list[Tensor] = []
        with recording({module: self._functional.stateless.get_submodule(module)}, lambda _, value: fed.append(value)):
            self.outputs(parameters, inputs)
        return fed[-1]

    def statistics(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Gradients:
        """The batch-norm statistics after a step on `inputs`, as a pure, differentiable function.

        These are the values of `updated_buffers` without the counts; batch norm with ``momentum=None`` is left out.
        """
        inputs_of: dict[str, Tensor] = {}
        norms = {name: self._functional.stateless.get_submodule(name) for name in self._functional.batch_norms}
        with recording(norms, inputs_of.__setitem__):
            self.outputs(parameters, inputs)
        buffers, result = self.buffers, {}
        for name, values in inputs_of.items():
            momentum = getattr(self._functional.live.get_submodule(name), "momentum", None)
            if momentum is None or f"{name}.running_mean" not in buffers:
                continue
            axes = [axis for axis in range(values.ndim) if axis != 1]
            new = {"running_mean": values.mean(axes), "running_var": values.var(axes)}
            for kind, value in new.items():
                result[f"{name}.{kind}"] = (1 - momentum) * buffers[f"{name}.{kind}"] + momentum * value
        return result

    # -- checked functions for users --------------------------------------------------------------------------------

    def gradients(self, inputs: Tensor, labels: Tensor) -> Gradients:
        """Gradient of the mean loss over the batch, by parameter name."""
        self.check(inputs, labels)
        self._check_masks()
        return self.gradient(self.parameters, inputs, labels)

    def per_example_gradients(self, inputs: Tensor, labels: Tensor, *, chunk: int | None = None) -> Gradients:
        """The gradient of each example by itself, ``[N, *parameter shape]`` by name; their mean is `gradients`.

        Args:
            inputs: a batch ``[N, *input_shape]``.
            labels: its labels.
            chunk: examples processed at once; default: as many as fit in about 1 GiB.
        """
        self.check(inputs, labels)
        if self.has_batch_statistics:
            raise InputError(
                f"Task: per-example gradients do not exist with batch statistics (batch norm "
                f"{self._functional.batch_norms[0]!r} is in train mode); put the batch-norm modules in eval mode "
                "before making the task, or use group norm"
            )
        self._check_masks()
        parameters = self.parameters

        def example_gradient(example: Tensor, label: Tensor, masks: Gradients) -> Gradients:
            return self.with_given_masks(masks).gradient(parameters, example[None], label[None])

        # vmap takes no empty argument.
        batch = (inputs, labels, self._masks_by_example()) if self._masks else (inputs, labels)
        function = example_gradient if self._masks else partial(example_gradient, masks={})
        result: Gradients = vmap(function, chunk_size=chunk or chunk_size(self, 1))(*batch)
        return result

    def sensitivity(
        self,
        inputs: Tensor,
        labels: Tensor,
        directions: int | None = 10,
        *,
        generator: Randomness | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> Gradients:
        r"""Estimate how strongly each gradient coordinate reacts to the inputs, **squared**.

        .. math:: s_i^2 = |\partial g_i / \partial x|^2 = E_v (J v)_i^2, \quad v \sim N(0, I)

        The estimate is the mean of squared forward-mode derivatives over random directions, which is unbiased; each
        coordinate's relative standard error is ``sensitivity_error(directions)``, sqrt(2 / directions). `x` is the
        entire batch.

        Directions are processed together as far as the memory budget allows; if not even one fits, the batch is split
        into parts whose derivatives are added up. Neither changes the result. A batch with batch-norm statistics
        cannot be split, so it needs at least the memory of one direction.

        Args:
            inputs: a batch ``[N, *input_shape]``.
            labels: its labels.
            directions: number of random directions; None uses every input value in turn, which is exact and needs as
                many directions as the batch has values. That is for small inputs, tests and benchmarks.
            generator: source of the directions, to make them repeatable; default: a cryptographic stream. Not used
                by the exact form.
            memory_budget: how many bytes the directions processed at once may take.

        Example:
            >>> from torch import nn
            >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
            >>> _ = nn.init.zeros_(model[1].weight)  # then both classes are equally likely, and g = +-x / 2
            >>> task = Task(model, input_shape=(1, 1, 2), classes=2)
            >>> task.sensitivity(torch.rand(1, 1, 1, 2), torch.tensor([0]), directions=None)["1.weight"].tolist()
            [[0.25, 0.25], [0.25, 0.25]]
        """
        self.check(inputs, labels)
        if directions is not None:
            checks.integer("Task.sensitivity", "directions", directions, low=1)
        self._check_masks()
        return squared_sensitivity(self, inputs, labels, directions, source_of(generator), memory_budget)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """The outputs in evaluation mode, in which batch norm uses its running statistics."""
        self._check_inputs(inputs)
        return self._call(self._functional.evaluating, self.parameters, self.buffers, inputs)

    def loss_of(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of outputs that have already been computed."""
        return self._loss(outputs, labels)

    def classes_of(self, outputs: Tensor) -> Tensor:
        """The predicted class of each example or position: the largest logit, or the sign of a single logit."""
        return (outputs[:, 0] > 0).long() if self.loss_name == "logistic" else outputs.argmax(1)

    def single_classes(self, owner: str) -> int:
        """The number of classes, for an `owner` that needs one class per input; other tasks are refused."""
        if self.classes is None or self.positions:
            got = f"one for each of {list(self.positions)} positions" if self.positions else "no classes"
            raise InputError(f"{owner}: needs a task with one class per input, got {got}")
        return self.classes

    def random_labels(self, count: int, generator: torch.Generator) -> Tensor:
        """Random class numbers to try the task with."""
        if self.classes is None:
            raise InputError("Task: labels of a task without classes cannot be drawn at random")
        return torch.randint(self.classes, (count, *self.positions), generator=generator, device=self.device)

    @torch.no_grad()
    def updated_buffers(self, inputs: Tensor) -> Gradients:
        """The batch-norm statistics after training on `inputs`; empty for a model without them."""
        if not self.has_batch_statistics:
            return {}
        self._check_inputs(inputs)
        buffers = {name: value.clone() for name, value in self.buffers.items()}
        self._call(self._functional.tracking, self.parameters, buffers, inputs)
        statistics = {name for name, _ in self._functional.live.named_buffers()} - self._functional.stateless_names
        return {name: value for name, value in buffers.items() if name in statistics}

    def check(self, inputs: Tensor, labels: Tensor) -> None:
        """Raise `InputError` unless inputs and labels fit the task and each other.

        Labels are class numbers ``[N, *positions]`` (int64) or probabilities ``[N, classes, *positions]``; a custom
        loss may have other positions, and labels of any kind if the task has no classes.
        """
        self._check_inputs(inputs)
        if not isinstance(labels, Tensor):
            raise InputError(f"Task: labels must be a tensor, got {type(labels).__name__}")
        if labels.ndim == 0 or len(labels) != len(inputs):
            got = len(labels) if labels.ndim else "no"
            raise InputError(f"Task: expected one label per input, got {got} labels for {len(inputs)} inputs")
        self.check_labels("Task: labels", labels)

    def check_labels(self, whose: str, labels: Tensor) -> None:
        """Raise an `InputError` that begins with `whose` unless the labels fit the task; see `check`."""
        count = len(labels)
        if labels.is_floating_point() and not torch.isfinite(labels).all():
            raise InputError(f"{whose} must be finite, got NaN or Inf; check the data")
        if self.classes is None:
            return
        if labels.is_floating_point():
            expected = (count, self.classes, *(self.positions if self.loss_name else labels.shape[2:]))
            if labels.shape != expected:
                raise InputError(
                    f"{whose} that are probabilities must have shape {list(expected)}, got {list(labels.shape)}; class "
                    "numbers must be of an integer type, and labels that are not classes need a task with classes=None"
                )
            return
        expected = (count, *(self.positions if self.loss_name else labels.shape[1:]))
        if labels.dtype != torch.int64 or labels.shape != expected:
            raise InputError(
                f"{whose} must be int64 of shape {list(expected)}, got {labels.dtype} of shape {list(labels.shape)}"
            )
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise InputError(
                f"{whose} must lie in 0 to {self.classes - 1} ({self.classes} classes), got {low} to {high}; "
                "check classes= and the label encoding"
            )

    def __repr__(self) -> str:
        return (
            f"Task({type(self._functional.live).__name__}, input_shape={self.input_shape}, classes={self.classes}, "
            f"parameters={self.size:,})"
        )

    # -- internals --------------------------------------------------------------------------------------------------

    def _call(self, view: nn.Module, parameters: Mapping[str, Tensor], buffers: Gradients, inputs: Tensor) -> Tensor:
        masks = {} if view is self._functional.evaluating else self._masks
        return self._functional(view, {**parameters, **buffers, **masks}, self.normalised(inputs))

    def _probe(self, examples: int = 2) -> Tensor:
        return self.modality.probe(examples, self.input_shape, dtype=self.dtype, device=self.device)

    def _check_inputs(self, inputs: Tensor) -> None:
        if not isinstance(inputs, Tensor):
            raise InputError(f"Task: inputs must be a tensor, got {type(inputs).__name__}")
        if tuple(inputs.shape[1:]) != self.input_shape or len(inputs) == 0:
            raise InputError(
                f"Task: inputs must have shape [N, {', '.join(map(str, self.input_shape))}] with N >= 1, "
                f"got {list(inputs.shape)}"
            )
        if inputs.dtype != self.dtype:
            raise InputError(
                f"Task: inputs must have the type of the weights, {self.dtype}, got {inputs.dtype}; "
                "convert the inputs, or the task with task.to(dtype)"
            )
        if inputs.device != self.device:
            raise InputError(
                f"Task: inputs must be on the device of the weights, {self.device}, got {inputs.device}; "
                "move the inputs, or the task with task.to(device)"
            )
        if not torch.isfinite(inputs).all():
            raise InputError("Task: inputs must be finite, got NaN or Inf; check the data")


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, input_shape: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    if mean is None and std is None:
        return None
    entries = input_shape[0] if input_shape else 0
    if mean is None or std is None or len(mean) != entries or len(std) != entries:
        raise ParameterError(
            f"Task: mean and std must both have one value for each of the {entries} entries of an input's first axis, "
            f"got mean={mean}, std={std}"
        )
    if min(std) <= 0:
        raise ParameterError(f"Task: every std must be above 0, got {std}")
    shape = [-1] + [1] * (len(input_shape) - 1)
    return torch.tensor(mean).view(shape), torch.tensor(std).view(shape)
