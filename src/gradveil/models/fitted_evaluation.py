"""Evaluation networks made for one embedding or one table, which estimate how much of a text or row is random."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError, InputError
from gradveil.core.tensors import first_mismatch
from gradveil.modality import Column, Modality, Table, Text

COMMAND = "python scripts/train_refiner_network.py"
_CHANNELS = 128
_HIDDEN = 128
_DIGEST = "table"


class FittedEvaluation(nn.Module, ABC):
    r"""Predicts the share r of an input that is random, for the inputs of one embedding or one table.

    It is trained on inputs with a share r of their parts (words or cells) replaced by random ones, and on blends
    :math:`(1-r)\,x + r\,v` with random inputs v, to answer r in both cases. The same values mean something else in
    another embedding or table. So none comes with gradveil; ``scripts/train_refiner_network.py`` makes one from public
    examples (`fitted_evaluation.md` says how well it does), and a file is refused where it does not belong.

    References:
        Fan, Chen, Wang, Li & Zhou, Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning. The
        paper does not describe its network for text and has none for tables; these are ours.

    Example:
        >>> issubclass(TextEvaluationNetwork, FittedEvaluation), issubclass(TableEvaluationNetwork, FittedEvaluation)
        (True, True)
    """

    modality: ClassVar[type[Modality]]
    """What it sees."""
    sees: ClassVar[str]
    """The name of that, phrased to follow "an evaluation network for"."""
    belongs_to: ClassVar[str]
    """What it is made for."""
    knows: ClassVar[str]
    """What is different in another embedding or table."""

    digest: str
    """By which the embedding or table is recognised."""

    def __init__(self, modality: Modality) -> None:
        super().__init__()

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [N] of the shares that are random."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The shares that are random [N]."""
        return torch.sigmoid(self.logits(inputs))


class TextEvaluationNetwork(FittedEvaluation):
    """Predicts the share of random words in a text, from the word vectors ``[N, L, d]`` of one embedding.

    Two convolutions over three neighbouring words with 128 channels, the mean over all positions that are not padding,
    and one linear layer to a logit.

    Args:
        text: the modality, bound to a model.

    Example:
        >>> from gradveil.modality import Words
        >>> text = Text(Words(("good", "film")), torch.randn(4, 8, generator=torch.manual_seed(0)))
        >>> TextEvaluationNetwork(text)(text.inputs_of(torch.tensor([[2, 3, 0], [3, 0, 0]]))).shape
        torch.Size([2])
    """

    modality = Text
    sees, belongs_to, knows = "text", "embedding", "word vectors"

    mean: Tensor
    spread: Tensor
    padding: Tensor

    def __init__(self, text: Text) -> None:
        super().__init__(text)
        vectors = text.vectors.float()
        self.digest = embedding_digest(vectors)
        self.register_buffer("mean", vectors.mean(0))
        self.register_buffer("spread", vectors.std(correction=0)[None])
        self.register_buffer("padding", vectors[text.padding].clone())
        self.first = nn.Conv1d(vectors.shape[1], _CHANNELS, kernel_size=3, padding=1)
        self.second = nn.Conv1d(_CHANNELS, _CHANNELS, kernel_size=3, padding=1)
        self.head = nn.Linear(_CHANNELS, 1)

    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [N] of the shares of random words."""
        real = (inputs != self.padding).any(-1)[:, None].to(inputs.dtype)
        scaled = ((inputs - self.mean) / self.spread).transpose(1, 2)
        features = torch.relu(self.first(scaled * real)) * real
        features = torch.relu(self.second(features)) * real
        logits: Tensor = self.head(features.sum(2) / real.sum(2).clamp_min(1))
        return logits.squeeze(1)


class TableEvaluationNetwork(FittedEvaluation):
    """Predicts the share of random cells in a row, from the encoded rows ``[N, values]`` of one table.

    A perceptron with two hidden layers of 128 units. It sees numbers scaled to [0, 1] and blocks of categories.

    Args:
        table: the modality, with its columns.

    Example:
        >>> table = Table(columns=(Column("age", 17, 90), Column("sex", categories=("female", "male"))))
        >>> TableEvaluationNetwork(table)(torch.tensor([[0.5, 0.0, 1.0], [0.2, 0.5, 0.5]])).shape
        torch.Size([2])
    """

    modality = Table
    sees, belongs_to, knows = "tables", "table", "columns"

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.digest = columns_digest(table.columns)
        self.layers = nn.Sequential(
            nn.Linear(sum(column.width for column in table.columns), _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, 1),
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [N] of the shares of random cells."""
        logits: Tensor = self.layers(inputs)
        return logits.squeeze(1)


def embedding_digest(vectors: Tensor) -> str:
    """The digest by which an embedding is recognised.

    >>> embedding_digest(torch.zeros(2, 2))
    '374708fff7719dd5'
    """
    return bytes_digest(vectors.detach().float().cpu().contiguous().numpy().tobytes())


def columns_digest(columns: Sequence[Column]) -> str:
    """The digest by which a table's encoding is recognised: the names, ranges and categories of its columns.

    What else is known about the columns, such as how frequent a category is, does not change the encoding.

    >>> age = Column("age", 17, 90)
    >>> columns_digest([age]) == columns_digest([Column("age", 17, 90, middle=0.3)])
    True
    >>> columns_digest([age]) == columns_digest([Column("age", 17, 91)])
    False
    """
    encoding = [[column.name, float(column.low), float(column.high), column.categories] for column in columns]
    return bytes_digest(json.dumps(encoding).encode())


def fitted_kind(modality: Modality) -> type[FittedEvaluation] | None:
    """The kind of network that sees these inputs; None if it need not be fitted to an embedding or a table.

    >>> from gradveil.modality import IMAGE
    >>> fitted_kind(Table()), fitted_kind(IMAGE)
    (<class 'gradveil.models.fitted_evaluation.TableEvaluationNetwork'>, None)
    """
    kinds = (TextEvaluationNetwork, TableEvaluationNetwork)
    return next((kind for kind in kinds if isinstance(modality, kind.modality)), None)


def write_network(network: FittedEvaluation, path: Path, settings: Mapping[str, Any]) -> None:
    """Write a network, what it was made for, and the settings of its training."""
    metadata = {"training": json.dumps(dict(settings)), _DIGEST: network.digest}
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path, metadata)


def fitted_network(path: str, modality: Modality) -> FittedEvaluation:
    """The network in a file; refused if it was made for another embedding or table.

    Args:
        path: a safetensors file that the script has written.
        modality: what it is to see, of a kind for which there is such a network.
    """
    kind = fitted_kind(modality)
    if kind is None:
        raise InputError(f"{path}: evaluation networks are made for text and tables, got {modality.name} inputs")
    # Built without storage, so that no initial weights are drawn; those of the file take their place.
    with torch.device("meta"):
        network = kind(modality)
    values, made_for = _read(path, network.sees)
    if made_for != network.digest:
        raise InputError(
            f"{path}: expected an evaluation network for the {network.belongs_to} {network.digest}, got one for "
            f"{made_for}, which knows other {network.knows}; make one with {COMMAND}"
        )
    if wrong := first_mismatch(network.state_dict(), values):
        name, expected, got = wrong
        raise DataError(f"{path}: expected for {name!r} {expected}, got {got}; make the file with {COMMAND}")
    network.load_state_dict(values, assign=True)
    return network.requires_grad_(False).eval()


def _read(path: str, sees: str) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a file, and the digest of what they are made for."""
    try:
        with safe_open(path, framework="pt") as file:
            names, metadata = file.keys(), file.metadata() or {}
            return {name: file.get_tensor(name).float() for name in names}, metadata.get(_DIGEST)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: expected the weights of an evaluation network for {sees}, got: {error}; make them with {COMMAND}"
        ) from error
