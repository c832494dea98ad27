"""What runs a training run: engines by name, and what each of them can do."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from gradveil.core.errors import InputError, ParameterError
from gradveil.core.registry import Registry
from gradveil.data import Dataset
from gradveil.defenses import Defense
from gradveil.federation.local import train
from gradveil.federation.training import RoundRecord, Training, TrainingResult
from gradveil.task import Task

ENGINES: Registry["Engine"] = Registry("engine")

# The optional arguments of `Engine.run`, and the capability that an engine must declare to be given each of them.
_OPTIONS = {"checkpoint": "checkpoints", "resume": "checkpoints", "execution": "executions", "transport": "faults"}


class Engine(ABC):
    """Something that runs the rounds of training; a new one is a class registered with ``@ENGINES.register(name)``.

    It implements `run`, and declares what it can do by class attributes:

    - `title`: its name as it appears in a sentence.
    - `devices`: the types of devices that it trains on; empty: all.
    - `checkpoints`: it takes `checkpoint`, a folder in which it keeps a file called `checkpoint.FILE`, and `resume`.
    - `executions`: it takes `execution`, see `gradveil.federation._clients`.
    - `faults`: it takes `transport`, which decides what happens to messages on their way.

    Example:
        >>> {name: ENGINES.create(name).checkpoints for name in ENGINES.names()}
        {'flower': False, 'local': True}
    """

    name: ClassVar[str]
    title: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    checkpoints: ClassVar[bool] = False
    executions: ClassVar[bool] = False
    faults: ClassVar[bool] = False

    def train(self, task: Task, *job: Any, **options: Any) -> TrainingResult:
        """Call `run` if this engine can do what is asked, and raise otherwise."""
        for option in options:
            if option in _OPTIONS and not getattr(self, _OPTIONS[option]):
                raise ParameterError(f"train: {self.title} takes no {option}; leave it out or use the engine 'local'")
        if self.devices and task.device.type not in self.devices:
            raise InputError(
                f"train: {self.title} trains on {' or '.join(self.devices)}, got a task on {task.device}; move the "
                "task or use the engine 'local'"
            )
        return self.run(task, *job, **options)

    @abstractmethod
    def run(
        self,
        task: Task,
        dataset: Dataset,
        defense: Defense,
        training: Training,
        *,
        progress: Callable[[int, int], None] | None = None,
        watch: Callable[[RoundRecord], None] | None = None,
        **options: Any,
    ) -> TrainingResult:
        """Train; the given task is not changed.

        Args:
            task: model and loss at the initial weights.
            dataset: training examples are dealt out to the clients, test examples measure accuracy.
            defense: what the clients do to their updates.
            training: rounds, clients, rates.
            progress: called with (rounds done, rounds in all).
            watch: called with the record of each round.
            options: those that the engine declares.
        """


@ENGINES.register("local")
class LocalEngine(Engine):
    """All clients and the server in this process, see `gradveil.federation.train`."""

    title = "the local engine"
    devices = ()
    checkpoints = executions = faults = True

    def run(self, *args: Any, **options: Any) -> TrainingResult:
        """Call `train`."""
        return train(*args, **options)


@ENGINES.register("flower")
class FlowerEngine(Engine):
    """One simulated node per client on Flower's simulation, see `gradveil.flower.simulate`."""

    title = "Flower's simulation"

    def run(self, *args: Any, **options: Any) -> TrainingResult:
        """Call `simulate`."""
        from gradveil.federation.flower import simulate  # Flower is optional and takes a second to import

        return simulate(*args, **options)
