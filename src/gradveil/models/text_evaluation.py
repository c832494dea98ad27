"""The evaluation network for text, which estimates how many words of a text are random."""

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gradveil.core.digests import bytes_digest
from gradveil.core.errors import DataError, InputError
from gradveil.core.tensors import first_mismatch

COMMAND = "python scripts/train_text_evaluation.py"
_CHANNELS = 128


class TextEvaluationNetwork(nn.Module):
    r"""Predicts the share of random words in a text, from the word vectors ``[N, L, d]`` of one embedding.

    Two convolutions over three neighbouring words with 128 channels, the mean over all positions that are not padding,
    and one linear layer to a logit. It is trained on texts with a share r of their words replaced, and on blends
    :math:`(1-r)\,x + r\,v` with the vectors v of random words, to answer r in both cases.

    It belongs to one embedding: vectors of another mean other words. So none comes with gradveil;
    ``scripts/train_text_evaluation.py`` makes one from public texts (`text_evaluation.md` says how well it does).

    Args:
        table: the embedding's vectors ``[V, d]``, for their mean and spread.
        padding: the row that stands for padding.

    References:
        Fan, Chen, Wang, Li & Zhou, Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning. The
        paper does not describe its network for text; this one is ours.

    Example:
        >>> table = torch.randn(10, 4, generator=torch.manual_seed(0))
        >>> TextEvaluationNetwork(table, 0)(table[torch.tensor([[3, 4, 0], [5, 0, 0]])]).shape
        torch.Size([2])
    """

    mean: Tensor
    spread: Tensor
    padding: Tensor

    def __init__(self, table: Tensor, padding: int) -> None:
        super().__init__()
        self.register_buffer("mean", table.mean(0))
        self.register_buffer("spread", table.std(correction=0)[None])
        self.register_buffer("padding", table[padding].clone())
        self.first = nn.Conv1d(table.shape[1], _CHANNELS, kernel_size=3, padding=1)
        self.second = nn.Conv1d(_CHANNELS, _CHANNELS, kernel_size=3, padding=1)
        self.head = nn.Linear(_CHANNELS, 1)

    def logits(self, vectors: Tensor) -> Tensor:
        """The logits [N] of the shares of random words."""
        real = (vectors != self.padding).any(-1)[:, None].to(vectors.dtype)
        scaled = ((vectors - self.mean) / self.spread).transpose(1, 2)
        features = torch.relu(self.first(scaled * real)) * real
        features = torch.relu(self.second(features)) * real
        logits: Tensor = self.head(features.sum(2) / real.sum(2).clamp_min(1))
        return logits.squeeze(1)

    def forward(self, vectors: Tensor) -> Tensor:
        """The shares of random words [N]."""
        return torch.sigmoid(self.logits(vectors))


def table_digest(table: Tensor) -> str:
    """The digest by which an embedding is recognised.

    >>> table_digest(torch.zeros(2, 2))
    '374708fff7719dd5'
    """
    return bytes_digest(table.detach().float().cpu().contiguous().numpy().tobytes())


def _read(path: str) -> tuple[dict[str, Tensor], str | None]:
    """The tensors of a file, and the digest of the embedding that they are for."""
    try:
        with safe_open(path, framework="pt") as file:
            names, metadata = file.keys(), file.metadata() or {}
            return {name: file.get_tensor(name).float() for name in names}, metadata.get("table")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: expected the weights of an evaluation network for text, got: {error}; make them with {COMMAND}"
        ) from error


def text_evaluation_network(path: str, table: Tensor, padding: int) -> TextEvaluationNetwork:
    """The network in a file; refused if it was trained for another embedding.

    Args:
        path: a safetensors file that the script has written.
        table: the embedding's vectors ``[V, d]``.
        padding: the row that stands for padding.
    """
    values, trained_for = _read(path)
    if trained_for != (here := table_digest(table)):
        raise InputError(
            f"{path}: expected an evaluation network for the embedding {here}, got one for {trained_for}, which knows "
            f"other word vectors; make one with {COMMAND}"
        )
    network = TextEvaluationNetwork(table.float(), padding)
    if wrong := first_mismatch(network.state_dict(), values):
        name, expected, got = wrong
        raise DataError(f"{path}: expected for {name!r} {expected}, got {got}; make the file with {COMMAND}")
    network.load_state_dict(values)
    return network.requires_grad_(False).eval()
