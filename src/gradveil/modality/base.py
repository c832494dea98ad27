"""The contract of a modality: everything the rest of gradveil must know about what an input is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gradveil.core.errors import InputError
from gradveil.core.randomness import Source, derived_generator
from gradveil.core.registry import Registry
from gradveil.modality.written import Fragment, to_file


class Modality(ABC):
    """What an input is. The task and the split carry it; no other module knows.

    Subclasses are frozen dataclasses, registered by name in `MODALITIES`. They derive from `Drawn` if examples are
    shown as pictures and from `Written` if they are shown as text. An example is *stored* as the data set keeps it
    (images as bytes, text as token ids) and is an *input* as the task takes it (images as floats in [0, 1], text as
    embedding vectors, for which it is bound to a model first).

    A modality may have fields that depend on the data, such as the columns of a table, declared by `state`. `settings`
    has them as JSON and `with_settings` sets them; without them, a modality has at least its class attributes,
    `leak_rule` and the words that reports need.

    Example:
        >>> modality = MODALITIES.create("image")
        >>> modality.project(torch.tensor([-0.5, 0.5, 1.5]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    """What one example is called in text, such as "image"."""
    primary: ClassVar[str]
    """The metric by which attacks are ranked."""
    dimensions: ClassVar[int | None] = None
    """How many dimensions an input has; None if any number is allowed."""
    bounds: ClassVar[tuple[float, float] | None] = None
    """The range in which every value of an input lies; None if there is none that all values share."""
    guess: ClassVar[str] = "the public mean of the class"
    """A description of the blind guess."""
    rule: ClassVar[str]
    """When an example has leaked, phrased to follow "has a"."""
    threshold: ClassVar[float | None] = None
    """The value of the primary metric from which an example can be recognised, for charts."""
    margin: ClassVar[str | None] = None
    """By how much a leak must beat the blind guess, phrased to precede "that guess"."""

    withheld: ClassVar[str | None] = None
    """What an audit did not test if `disclosed` is empty, for reports; None: nothing is kept out of updates."""
    draws: ClassVar[int] = 0
    """How often public examples are drawn at random for a batch, as further blind guesses that a leak must beat.

    Among many examples of a batch, some resemble some of any other batch; that is no leak if examples are so alike.
    """
    ensembles: ClassVar[bool] = False
    """Whether the restarts of an attack that explain an update equally well are averaged, instead of choosing one."""
    shown_as: ClassVar[str]
    """The ending of the files in which examples are shown."""

    def __init_subclass__(cls) -> None:
        """Refuse a modality without the texts that reports need."""
        super().__init_subclass__()
        if ABC in cls.__bases__:
            return
        for required in ("unit", "primary", "rule"):
            if not isinstance(getattr(cls, required, None), str):
                raise TypeError(f"{cls.__name__}: a modality must define {required} as a string; add {required} = ...")

    @abstractmethod
    def check_stored(self, where: str, stored: Tensor) -> None:
        """Refuse examples of the wrong type or shape with a `DataError` whose message begins with `where`."""

    @abstractmethod
    def inputs_of(self, stored: Tensor) -> Tensor:
        """Convert stored examples to inputs of a task."""

    @abstractmethod
    def start(
        self, shape: Sequence[int], generator: torch.Generator, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Random inputs of `shape`, ``(..., *input_shape)``, from which a search starts."""

    def informed(self, start: Tensor, updates: Mapping[str, Tensor]) -> Tensor:
        """Starting points changed by what the updates tell at a glance about the inputs, such as how long a text is.

        Args:
            start: what `start` drew, ``[victims, ..., *input_shape]``.
            updates: the updates ``[victims, *parameter shape]`` by name.
        """
        return start

    @abstractmethod
    def project(self, inputs: Tensor) -> Tensor:
        """The allowed inputs nearest to these; NaN stays NaN."""

    @abstractmethod
    def leak_rule(self, scores: Mapping[str, float | None], blind: Mapping[str, float | None] | None) -> str | None:
        """The name of the rule by which an example has leaked, such as "pixels"; None if it has not.

        Args:
            scores: the scores of its reconstruction by metric; None for a metric that could not be computed.
            blind: those of the blind guess; None if there is no blind guess to beat.
        """

    @abstractmethod
    def show(self, examples: Tensor, originals: Tensor | None) -> bytes:
        """The content of a file that shows a batch of inputs to readers.

        Args:
            examples: the batch.
            originals: what an attack tried to recover, if `examples` are what it found.
        """

    @property
    def settings(self) -> Mapping[str, Any]:
        """The fields that depend on the data, as JSON."""
        return {}

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """This modality for the data that `settings` came from."""
        return self

    def input_shape(self, stored_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the input that a stored example of `stored_shape` becomes."""
        return tuple(stored_shape)

    def model_arguments(self, stored_shape: Sequence[int]) -> dict[str, Any]:
        """What a model must be told about the inputs when it is built."""
        return {"input_shape": self.input_shape(stored_shape)}

    def bind(
        self, model: nn.Module, stored_shape: Sequence[int], *, withhold: bool = True
    ) -> tuple[nn.Module, "Modality"]:
        """The model as a function of inputs, and this modality once the model is known.

        Args:
            model: the model as a user writes it.
            stored_shape: the shape of a stored example.
            withhold: keep the parameters that turn stored examples into inputs out of updates.
        """
        return model, self

    @property
    def disclosed(self) -> tuple[str, ...]:
        """What updates of the model it is bound to tell about the inputs without any attack, in sentences."""
        return ()

    def compared(self, inputs: Tensor) -> Tensor:
        """Valid inputs ``[N, *input_shape]`` in the form in which metrics compare them, ``[N, ...]``."""
        return inputs

    def distances(self, originals: Tensor, found: Tensor) -> Tensor:
        """How unlike each original is to each reconstruction, ``[N, M]``; they are matched by the least sum of these.

        By default, the squared Euclidean distance.
        """
        x, y = (examples.detach().double().flatten(1) for examples in (originals, found))
        # The faster mode of cdist, by matrix products, loses the small distances that matter here.
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()

    def noise(self, inputs: Tensor, source: Source) -> Tensor:
        """Inputs of the same shape that have nothing to do with these: by default uniform numbers in their range."""
        if self.bounds is None:
            raise InputError(f"{self.name} inputs: have no range to draw random ones from")
        low, high = self.bounds
        drawn = source.uniform(inputs)
        return drawn if self.bounds == (0.0, 1.0) else low + (high - low) * drawn

    @property
    def scale(self) -> float:
        """How far typical values of inputs are apart, where methods take steps of a given length."""
        return 1.0

    def prior(self, inputs: Tensor, *, rounding: float = 0.0) -> Tensor | None:
        """How unlikely a batch ``[N, *input_shape]`` looks, as a differentiable scalar; None without a prior.

        Args:
            inputs: the batch.
            rounding: how far kinks are rounded off, for optimisers that need a smooth cost.
        """
        return None

    def probe(self, count: int, input_shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` fixed inputs to try a model on."""
        generator = derived_generator(0, "probe")
        start = self.start((count, *input_shape), generator, dtype=torch.float32, device=generator.device)
        return start.to(device, dtype)

    def decode(self, found: Tensor) -> Tensor:
        """Convert the result of a search to examples."""
        return found

    def repaired(self, found: Tensor) -> Tensor:
        """Make the output of an attack finite and in range, so that it can be scored and shown."""
        return self.project(found.nan_to_num())

    def typical(self, stored: Tensor) -> Tensor:
        """The best guess at any of the stored examples, as an input: by default their mean."""
        return self.inputs_of(stored).mean(0)

    def blind(self, stored: Tensor, targets: Tensor, wanted: Tensor, classes: int | None) -> Tensor:
        """The blind guess: for each wanted class, what is typical of the public examples of that class.

        Scored like an attack, it tells how much the label and public data reveal without any gradient, which is a lot
        if the examples of a class look alike. If the targets are not classes, the guess is what is typical of all
        public examples.

        Args:
            stored: the public examples ``[M, ...]``.
            targets: their targets ``[M, ...]``.
            wanted: the victims' targets ``[N, ...]``.
            classes: how many classes there are; None if the targets are not classes.

        >>> public = torch.tensor([0, 255, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
        >>> image = MODALITIES.create("image")
        >>> image.blind(public, torch.tensor([0, 0, 1]), torch.tensor([1, 0]), classes=2).flatten()
        tensor([1.0000, 0.5000])
        """
        self.check_stored("blind guess: public", stored)
        if len(stored) != len(targets):
            raise InputError(
                f"blind guess: expected one target per public {self.unit}, got {len(targets)} for {len(stored)}"
            )
        if classes is None or targets.ndim != 1:
            guess = self.typical(stored)
            return guess.expand(len(wanted), *guess.shape)
        for owner, labels in (("public", targets), ("victims'", wanted)):
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
                raise InputError(
                    f"blind guess: {owner} labels must lie between 0 and {classes - 1}, "
                    f"got {int(labels.min())} to {int(labels.max())}"
                )
        guesses = {}
        for label in set(wanted.tolist()):
            members = stored[targets == label]  # only this class, so that there is never a second copy of all
            if len(members) == 0:
                raise InputError(
                    f"blind guess: no public {self.unit} has label {label}, so its class has no mean; "
                    f"give public {self.unit}s of every class"
                )
            guesses[label] = self.typical(members)
        return torch.stack([guesses[label] for label in wanted.tolist()])


class Drawn(Modality, ABC):
    """A modality whose examples are shown as pictures.

    Example:
        >>> isinstance(MODALITIES.create("image"), Drawn)
        True
    """

    shown_as = "png"

    @abstractmethod
    def render(self, examples: Tensor) -> bytes:
        """Render a batch of inputs as one PNG."""

    @abstractmethod
    def rendered_size(self, input_shape: Sequence[int], count: int) -> tuple[int, int]:
        """Width and height of the image that `render` makes of `count` inputs."""

    def show(self, examples: Tensor, originals: Tensor | None) -> bytes:
        """A PNG."""
        return self.render(examples)


class Written(Modality, ABC):
    """A modality whose examples are shown as text, in fragments of which those that were recovered are marked.

    Example:
        >>> isinstance(MODALITIES.create("image"), Written)
        False
    """

    shown_as = "json"

    @abstractmethod
    def write(self, examples: Tensor, originals: Tensor | None) -> list[list[Fragment]]:
        """The fragments of each example.

        Args:
            examples: valid inputs ``[N, *input_shape]``.
            originals: what they were recovered from, in the same order; None: nothing is to be marked.
        """

    def show(self, examples: Tensor, originals: Tensor | None) -> bytes:
        """A file that `gradveil.modality.written` reads."""
        return to_file(self.write(self.repaired(examples), originals))


MODALITIES: Registry[Modality] = Registry("modality", "gradveil.modalities")
