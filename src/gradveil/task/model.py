"""A model as a function of its tensors: stateless replacements for modules with state, and a trace of its layers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter

from gradveil.core.errors import GradveilError, InputError
from gradveil.core.plugins import place_of

Gradients = dict[str, Tensor]

RELUS = (nn.ReLU, nn.LeakyReLU)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True)
class Classifier:
    """Names of the parameters of the last linear layer that computes the logits; `bias` is None if it has none."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class ModelTrace:
    """What was observed when a model ran.

    Args:
        outputs: its outputs for the batch it was tried on.
        classifier: the layer that computes the logits; None if that is not a linear layer.
        activations: how many numbers all modules together output for one input.
    """

    outputs: Tensor
    classifier: Classifier | None
    activations: int


class FunctionalModel:
    """Several views of one live model, each a function of the tensors that are passed in place of the model's own.

    In the view `stateless`, a batch norm in train mode uses the statistics of the batch and stores none; `tracking`
    writes them into the buffers it is given; `evaluating` is the model in evaluation mode. In the first two, a dropout
    in train mode multiplies by a mask that is passed like a buffer; without one it changes nothing.

    Example:
        >>> model = FunctionalModel(nn.BatchNorm1d(1))
        >>> model(model.stateless, dict(named_tensors(model.live)), torch.tensor([[1.0], [3.0]])).tolist()
        [[-0.999...], [0.999...]]
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_unusable(model)
        self.live = model
        self.tracking = _share_tensors(model)
        self.stateless = _share_tensors(model)
        self.evaluating = _share_tensors(model).eval()
        self.batch_norms: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            if module.training or module.running_mean is None:
                self.batch_norms.append(name)
                _remove_running_statistics(self.stateless.get_submodule(name))
            elif name:
                _replace(self.stateless, name, _FrozenBatchNorm(module))
        self.dropout_rates = {name: module.p for name, module in model.named_modules() if _is_active_dropout(module)}
        for name, rate in self.dropout_rates.items():
            by_channel = not isinstance(model.get_submodule(name), nn.Dropout)
            for view in (self.stateless, self.tracking):
                original, masked = view.get_submodule(name), _MaskedDropout(rate, by_channel)
                for other, module in list(view.named_modules(remove_duplicate=False)):
                    if module is original:  # one dropout may stand in several places
                        _replace(view, other, masked)
        self.mask_shapes: dict[str, tuple[int, ...]] = {}  # for one example, by the name of the mask
        self._name_tensors()

    def _name_tensors(self) -> None:
        self.stateless_names = {name for name, _ in named_tensors(self.stateless)}

    @torch.no_grad()
    def find_masks(self, tensors: Mapping[str, Tensor], probe: Callable[[int], Tensor]) -> None:
        """Run the model to find the shape of the mask in each call of an active dropout."""
        if not self.dropout_rates:
            return
        seen: list[dict[str, list[tuple[int, ...]]]] = []
        for examples in (2, 4):  # not 1, of which batch norm cannot take statistics
            self(self.stateless, tensors, probe(examples))
            seen.append({name: list(self._dropout(name).shapes) for name in self.dropout_rates})
        for name in self.dropout_rates:
            for call, (of_two, of_four) in enumerate(zip(seen[0][name], seen[1][name], strict=True)):
                if of_four != (2 * of_two[0], *of_two[1:]) or of_two[0] % 2:
                    raise InputError(
                        f"Task: dropout {name!r} acts on a tensor of shape {list(of_two)} for 2 inputs and "
                        f"{list(of_four)} for 4, expected the examples in the first dimension; reorder the dimensions, "
                        "or put it in eval mode (--dropout inference)"
                    )
                self.mask_shapes[f"{name}.mask{call}"] = (of_two[0] // 2, *of_two[1:])
        for view in (self.stateless, self.tracking):
            for name in self.mask_shapes:
                module, _, buffer = name.rpartition(".")
                view.get_submodule(module).register_buffer(buffer, torch.empty(0))
        self._name_tensors()

    def _dropout(self, name: str, view: nn.Module | None = None) -> "_MaskedDropout":
        module = (view or self.stateless).get_submodule(name)
        assert isinstance(module, _MaskedDropout)
        return module

    def __call__(self, view: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Run one of the views."""
        if view is self.stateless:  # this view has no running statistics
            tensors = {name: value for name, value in tensors.items() if name in self.stateless_names}
        if view is not self.evaluating:
            for name in self.dropout_rates:
                self._dropout(name, view).shapes.clear()
        try:
            # The fused attention kernels have neither forward-mode nor second derivatives.
            with sdpa_kernel(SDPBackend.MATH):
                output: Tensor = functional_call(view, dict(tensors), (inputs,))
        except ValueError as error:
            if "more than 1 value" not in str(error):
                raise
            raise InputError(
                f"Task: batch norm cannot take its statistics from a single value ({error}); use a larger "
                "batch (and leave no last batch of 1), put batch norm in eval mode, or use group norm"
            ) from error
        return output

    @torch.no_grad()
    def trace(self, parameters: Gradients, buffers: Gradients, probe: Tensor) -> ModelTrace:
        """Run the model on `probe`: check that it takes the inputs and is a pure function, and find its classifier."""
        layer_outputs: list[tuple[str, Tensor]] = []
        leaves = {n: m for n, m in self.stateless.named_modules() if not any(m.children())}

        def record(name: str, output: object) -> None:
            if isinstance(output, Tensor):
                layer_outputs.append((name, output))

        buffer_copies = {name: value.clone() for name, value in buffers.items()}
        with recording(leaves, record, outputs=True):
            try:
                outputs = self(self.stateless, {**parameters, **buffer_copies}, probe)
            except GradveilError:
                raise
            except Exception as error:
                where = f" ({place})" if (place := place_of(error)) else ""
                raise InputError(
                    f"Task: the model does not take inputs of shape {list(probe.shape)}{where}: {error}; "
                    "check input_shape and the model's code, or use larger inputs"
                ) from error
        if not isinstance(outputs, Tensor):
            raise InputError(f"Task: the model must return one tensor, got {type(outputs).__name__}; wrap the model")
        if outputs.is_floating_point() and not torch.isfinite(outputs).all():
            raise InputError(
                "Task: expected finite outputs for inputs in the range of the data, got NaN or Inf; check the model's "
                "weights, its normalisation (mean, std) and operations such as log or division"
            )
        for name, value in buffers.items():
            if name in self.stateless_names and not torch.equal(value, buffer_copies[name]):
                raise InputError(
                    f"Task: the model writes its buffer {name!r} while it computes, so data would leak from one "
                    "client to the next; put that module in eval mode, or switch off its running statistics"
                )
        if not torch.equal(outputs, self(self.stateless, {**parameters, **buffers}, probe)):
            raise InputError(
                "Task: the model gives different outputs for the same inputs, so gradients would not be a function of "
                "the data and of dropout masks; write its dropout as nn.Dropout modules, or put its random modules in "
                "eval mode (--dropout inference)"
            )
        first_names = {id(value): name for name, value in reversed(list(self.stateless.named_parameters()))}
        classifier = None
        for name, output in layer_outputs:
            module = leaves[name]
            if isinstance(module, nn.Linear) and outputs.ndim == 2 and torch.equal(output, outputs):
                bias = None if module.bias is None else first_names[id(module.bias)]
                classifier = Classifier(first_names[id(module.weight)], bias)
        return ModelTrace(outputs, classifier, sum(output.numel() for _, output in layer_outputs) // len(probe))

    @property
    def relus(self) -> dict[str, nn.Module]:
        """The ReLU modules by name."""
        return {name: module for name, module in self.stateless.named_modules() if isinstance(module, RELUS)}

    @torch.no_grad()
    def smoothed(self, sharpness: float, tensors: Mapping[str, Tensor], probe: Tensor) -> "FunctionalModel":
        """The same model with smoothed ReLUs, see `Task.smoothed`."""
        relus = self.relus
        squares: dict[str, list[Tensor]] = {name: [] for name in relus}
        with recording(relus, lambda name, value: squares[name].append(value.square().mean())):
            self(self.stateless, tensors, probe)
        other = copy.copy(self)
        other.stateless = _share_tensors(self.stateless)
        for name, relu in relus.items():
            typical = float(torch.stack(squares[name]).mean().sqrt()) if squares[name] else 1.0
            slope = relu.negative_slope if isinstance(relu, nn.LeakyReLU) else 0.0
            _replace(other.stateless, name, _SmoothReLU(sharpness / typical, slope))
        return other


@contextmanager
def recording(
    modules: Mapping[str, nn.Module], record: Callable[[str, Tensor], object], *, outputs: bool = False
) -> Iterator[None]:
    """Inside the context, call `record` with the name and the input (or the output) of each module that runs.

    >>> layer, seen = nn.Linear(2, 1), []
    >>> with recording({"layer": layer}, lambda name, value: seen.append((name, tuple(value.shape)))):
    ...     _ = layer(torch.zeros(3, 2))
    >>> seen
    [('layer', (3, 2))]
    """

    def hook_for(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> None:
            record(name, output[0] if output else inputs[0])

        return hook

    handles = [
        (module.register_forward_hook if outputs else module.register_forward_pre_hook)(hook_for(name))
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _FrozenBatchNorm(nn.Module):
    """Batch norm with running statistics as an affine map: under vmap, torch's own falls back to a loop."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, inputs: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        scale = (self.running_var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = -self.running_mean * scale
        shift = shift if self.bias is None else shift + self.bias
        return inputs * scale.view(shape) + shift.view(shape)


class _MaskedDropout(nn.Module):
    """Dropout that multiplies by given masks, one for each time it is called while the model runs once."""

    def __init__(self, rate: float, by_channel: bool) -> None:
        super().__init__()
        self.rate, self.by_channel = rate, by_channel
        self.shapes: list[tuple[int, ...]] = []  # of the masks in the calls so far

    def forward(self, inputs: Tensor) -> Tensor:
        shape = tuple(inputs.shape)
        if self.by_channel:
            shape = (*shape[:2], *[1] * (len(shape) - 2))
        mask = getattr(self, f"mask{len(self.shapes)}", None)
        self.shapes.append(shape)
        if mask is None or not mask.numel():
            return inputs
        if mask.shape[0] != shape[0]:
            raise InputError(
                f"Task: dropout masks were drawn for {mask.shape[0]} rows and used with {shape[0]}; draw masks for "
                "this batch with Task.with_masks, or take its part with Task.for_examples"
            )
        masked: Tensor = inputs * mask
        return masked


class _SmoothReLU(nn.Module):
    """A (leaky) ReLU whose kink is smoothed."""

    def __init__(self, beta: float, slope: float) -> None:
        super().__init__()
        self.beta, self.slope = beta, slope

    def forward(self, inputs: Tensor) -> Tensor:
        smooth = F.softplus(inputs, beta=self.beta)
        return smooth if self.slope == 0 else self.slope * inputs + (1 - self.slope) * smooth


def _refuse_unusable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"Task: parameter {name!r} has no shape yet; run the model once before making the task")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("Task: the model has no parameters to train, so there is no gradient; check requires_grad")
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.training and module.p > 0 and not isinstance(module, DROPOUTS):
            raise InputError(
                f"Task: expected an active dropout to be nn.Dropout or nn.Dropout1d to 3d, got "
                f"{type(module).__name__} {name!r}; use one of these, or put it in eval mode (--dropout inference)"
            )


def _is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, DROPOUTS) and module.training and module.p > 0


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _share_tensors(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    # With the tensors in the memo, a deep copy copies the structure only.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _remove_running_statistics(module: nn.Module) -> None:
    cleared = {"running_mean": None, "running_var": None, "num_batches_tracked": None, "track_running_stats": False}
    for name, value in cleared.items():
        setattr(module, name, value)
