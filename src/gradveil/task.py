"""A task: a model and a loss, seen as pure functions of weights, inputs and labels."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil import checks
from gradveil.errors import InputError, ParameterError
from gradveil.randomness import fresh_generator

Gradients = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {"cross-entropy": F.cross_entropy}


@dataclass(frozen=True)
class Classifier:
    """Names of the parameters of the last linear layer that computes the logits; `bias` is None if it has none."""

    weight: str
    bias: str | None


class Task:
    r"""A model with its loss: gradients, per-example gradients and how gradients react to the inputs.

    Everything is computed functionally (`torch.func`), so it can be vmapped, differentiated again and never
    changes the model. The task follows the live model: after an optimiser step it uses the new weights.

    Batch norm and dropout follow the flags their modules carry when the task is made. A batch-norm module in
    train mode uses the statistics of the batch and leaves its running statistics alone, so nothing passes from
    one client to the next (`updated_buffers` returns the new statistics instead of storing them); in eval mode it
    uses the running statistics. Active dropout is refused: its gradients are not a function of the data.

    Args:
        model: any module that maps a batch ``[N, *input_shape]`` to logits ``[N, classes]``.
        loss: ``"cross-entropy"``, or a function ``(outputs, labels) -> scalar``, the mean over the batch.
        input_shape: shape of one input, such as ``(3, 32, 32)``. Images are in [0, 1] everywhere in gradveil.
        classes: number of classes.
        mean, std: the model's normalisation per channel, applied to the [0, 1] images. Default: none.

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
        classes: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        self.input_shape = tuple(
            checks.integer("Task", "every entry of input_shape", size, low=1) for size in input_shape
        )
        self.classes = checks.integer("Task", "classes", classes, low=1)
        if isinstance(loss, str):
            self._loss: Loss = LOSSES[checks.choice("Task", "loss", loss, LOSSES)]
        else:
            self._loss = loss
        self._normalisation = _normalisation(mean, std, self.input_shape[0])
        _refuse_dropout(model)

        self._parameters: Gradients | None = None  # None: the live model's
        self._buffers: Gradients | None = None
        # Three views on one set of live tensors: copying with the tensors in the memo copies the structure only.
        self._model = model
        self._tracking = _share_tensors(model)
        self._stateless = _share_tensors(model)
        self._batch_norms = [
            name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training
        ]
        for name in self._batch_norms:
            _forget_running_statistics(self._stateless.get_submodule(name))
        self._evaluating = _share_tensors(model).eval()
        self.classifier, self._activations = self._look_inside()

    # -- weights ------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> Gradients:
        """The weights by name, detached; those of the live model unless the task was made by `with_parameters`."""
        if self._parameters is not None:
            return self._parameters
        return {name: value.detach() for name, value in self._model.named_parameters()}

    @property
    def buffers(self) -> Gradients:
        """Buffers by name (running statistics, constants), detached."""
        if self._buffers is not None:
            return self._buffers
        return {name: value.detach() for name, value in self._model.named_buffers()}

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
        """Where the weights are."""
        return next(iter(self.parameters.values())).device

    def with_parameters(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> "Task":
        """The same task at other weights; the live model is not touched."""
        current = self.parameters
        if list(parameters) != list(current):
            raise InputError(f"Task: parameters must be named {list(current)} in this order, got {list(parameters)}")
        other = copy.copy(self)
        other._parameters = {name: value.detach() for name, value in parameters.items()}
        other._buffers = {**self.buffers, **(buffers or {})}
        return other

    def to(self, dtype: torch.dtype) -> "Task":
        """The same task with weights and buffers in another precision; the live model is not touched."""
        return self.with_parameters(
            {name: value.to(dtype) for name, value in self.parameters.items()},
            {name: v.to(dtype) if v.is_floating_point() else v for name, v in self.buffers.items()},
        )

    # -- pure functions: no checks, safe under vmap, grad and jvp --------------------------------------------------

    def loss(self, parameters: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch as a pure function; labels are numbers ``[N]`` or probabilities ``[N, classes]``."""
        return self._loss(self._call(self._stateless, parameters, self.buffers, inputs), labels)

    def gradient(self, parameters: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Gradients:
        """Gradient of `loss` with respect to the parameters as a pure function."""
        result: Gradients = grad(self.loss)(dict(parameters), inputs, labels)
        return result

    # -- what users call --------------------------------------------------------------------------------------------

    def gradients(self, inputs: Tensor, labels: Tensor) -> Gradients:
        """Gradient of the mean loss over the batch, by parameter name."""
        self.check(inputs, labels)
        return self.gradient(self.parameters, inputs, labels)

    def per_example_gradients(self, inputs: Tensor, labels: Tensor, *, chunk: int | None = None) -> Gradients:
        """Gradients of each example by itself, ``[N, *parameter shape]`` by name; their mean is `gradients`.

        Args:
            inputs: a batch ``[N, *input_shape]``.
            labels: its labels.
            chunk: examples worked on at once; default: as many as fit in about 1 GiB.
        """
        self.check(inputs, labels)
        if self._batch_norms:
            raise InputError(
                f"Task: per-example gradients do not exist with batch statistics (batch norm "
                f"{self._batch_norms[0]!r} is in train mode); put the batch-norm modules in eval mode before making "
                "the task, or use group norm"
            )
        parameters = self.parameters

        def one(example: Tensor, label: Tensor) -> Gradients:
            return self.gradient(parameters, example[None], label[None])

        result: Gradients = vmap(one, chunk_size=chunk or self._chunk(1))(inputs, labels)
        return result

    def sensitivity(
        self,
        inputs: Tensor,
        labels: Tensor,
        directions: int = 10,
        *,
        generator: torch.Generator | None = None,
        memory_budget: int = 1 << 30,
    ) -> Gradients:
        r"""Estimate how strongly each gradient coordinate reacts to the inputs, **squared**.

        .. math:: s_i^2 = |\partial g_i / \partial x|^2 = E_v (J v)_i^2, \quad v \sim N(0, I)

        The mean over random directions of squared forward-mode derivatives; each coordinate's relative standard
        error is sqrt(2 / directions). `x` is the whole batch.

        Args:
            inputs: a batch ``[N, *input_shape]``.
            labels: its labels.
            directions: number of random directions.
            generator: source of the directions; default: fresh entropy.
            memory_budget: bytes the directions worked on at once may take.
        """
        self.check(inputs, labels)
        checks.integer("Task.sensitivity", "directions", directions, low=1)
        generator = generator or fresh_generator(inputs.device)
        parameters = self.parameters

        def squared_response(direction: Tensor) -> Gradients:
            tangent: Gradients = jvp(lambda x: self.gradient(parameters, x, labels), (inputs,), (direction,))[1]
            return {name: value.square() for name, value in tangent.items()}

        total = {name: torch.zeros_like(value) for name, value in parameters.items()}
        chunk = self._chunk(len(inputs), memory_budget)
        for start in range(0, directions, chunk):
            # Drawn one by one: a larger draw is not the same as several smaller ones, and the chunk must not matter.
            drawn = [
                torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device)
                for _ in range(min(chunk, directions - start))
            ]
            for name, value in vmap(squared_response)(torch.stack(drawn)).items():
                total[name] += value.sum(0)
        return {name: value / directions for name, value in total.items()}

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Logits in evaluation mode: batch norm with its running statistics."""
        self._check_inputs(inputs)
        return self._call(self._evaluating, self.parameters, self.buffers, inputs)

    @torch.no_grad()
    def updated_buffers(self, inputs: Tensor) -> Gradients:
        """What training on `inputs` would make of the batch-norm statistics; empty for a model without them."""
        if not self._batch_norms:
            return {}
        self._check_inputs(inputs)
        buffers = {name: value.clone() for name, value in self.buffers.items()}
        self._call(self._tracking, self.parameters, buffers, inputs)
        prefixes = tuple(f"{name}." if name else "" for name in self._batch_norms)
        return {name: value for name, value in buffers.items() if name.startswith(prefixes)}

    def check(self, inputs: Tensor, labels: Tensor) -> None:
        """Raise `InputError` unless inputs and labels fit the task and each other."""
        self._check_inputs(inputs)
        if len(labels) != len(inputs):
            raise InputError(f"Task: expected one label an input, got {len(labels)} labels for {len(inputs)} inputs")
        if labels.is_floating_point():
            if labels.shape != (len(inputs), self.classes):
                raise InputError(
                    f"Task: label probabilities must have shape {(len(inputs), self.classes)}, "
                    f"got {tuple(labels.shape)}; class numbers must be of an integer type"
                )
            return
        if labels.ndim != 1:
            raise InputError(f"Task: labels must have shape [{len(inputs)}], got {list(labels.shape)}")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise InputError(
                f"Task: labels must lie in 0 to {self.classes - 1} ({self.classes} classes), got {low} to {high}; "
                "check classes= and the label encoding"
            )

    def __repr__(self) -> str:
        return (
            f"Task({type(self._model).__name__}, input_shape={self.input_shape}, classes={self.classes}, "
            f"parameters={self.size:,})"
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _call(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
    ) -> Tensor:
        if self._normalisation is not None:
            mean, std = (value.to(inputs) for value in self._normalisation)
            inputs = (inputs - mean) / std
        if buffers:  # the stateless view has fewer of them
            known = dict(module.named_buffers())
            parameters = {**parameters, **{name: value for name, value in buffers.items() if name in known}}
        output: Tensor = functional_call(module, dict(parameters), (inputs,))
        return output

    def _check_inputs(self, inputs: Tensor) -> None:
        if tuple(inputs.shape[1:]) != self.input_shape or len(inputs) == 0:
            raise InputError(
                f"Task: inputs must have shape [N, {', '.join(map(str, self.input_shape))}] with N >= 1, "
                f"got {list(inputs.shape)}"
            )
        if inputs.dtype != self.dtype:
            raise InputError(
                f"Task: inputs must have the type of the weights, {self.dtype}, got {inputs.dtype}; "
                "convert the inputs (images as floats in [0, 1]) or the task with task.to(dtype)"
            )

    def _chunk(self, batch: int, memory_budget: int = 1 << 30) -> int:
        # A direction keeps the tangents of activations and gradients. Measured peak, in units of both together:
        # 1.9 on resnet18, 2.0 to 3.1 on lenet; 4 leaves room.
        values = 4 * (batch * self._activations + self.size)
        return max(1, memory_budget // (values * self.dtype.itemsize))

    @torch.no_grad()
    def _look_inside(self) -> tuple[Classifier | None, int]:
        """Run the model once: does it take the inputs, which layer makes the logits, how many activations has it?"""
        order: list[str] = []
        activations = 0

        def watch(name: str) -> Callable[[nn.Module, object, object], None]:
            def hook(_module: nn.Module, _args: object, output: object) -> None:
                nonlocal activations
                order.append(name)
                activations += output.numel() if isinstance(output, Tensor) else 0

            return hook

        leaves = [(n, m) for n, m in self._stateless.named_modules() if not any(m.children())]
        handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
        probe = torch.zeros(2, *self.input_shape, dtype=self.dtype, device=self.device)
        try:
            output = self._call(self._stateless, self.parameters, self.buffers, probe)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InputError(
                f"Task: the model does not take inputs of shape {list(probe.shape)}: {error}; "
                "check input_shape, or use larger images"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        if self._loss is F.cross_entropy and tuple(output.shape) != (2, self.classes):
            raise InputError(
                f"Task: the model must return logits of shape [N, {self.classes}], got {list(output.shape)} for N = 2; "
                "check classes="
            )
        modules = dict(leaves)
        for name in reversed(order):
            module = modules[name]
            if isinstance(module, nn.Linear) and module.out_features == output.shape[-1]:
                prefix = f"{name}." if name else ""
                bias = None if module.bias is None else f"{prefix}bias"
                return Classifier(f"{prefix}weight", bias), activations // 2
        return None, activations // 2


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, channels: int
) -> tuple[Tensor, Tensor] | None:
    if mean is None and std is None:
        return None
    if mean is None or std is None or len(mean) != channels or len(std) != channels:
        raise ParameterError(
            f"Task: mean and std must both have one value a channel ({channels}), got mean={mean}, std={std}"
        )
    if min(std) <= 0:
        raise ParameterError(f"Task: every std must be above 0, got {std}")
    return torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise InputError(
                f"Task: dropout {name!r} (p={module.p}) is active, so gradients would not be a function of the data; "
                "put it in eval mode or set p=0 before making the task"
            )


def _share_tensors(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _forget_running_statistics(module: nn.Module) -> None:
    forgotten = {"running_mean": None, "running_var": None, "num_batches_tracked": None, "track_running_stats": False}
    for name, value in forgotten.items():
        setattr(module, name, value)
