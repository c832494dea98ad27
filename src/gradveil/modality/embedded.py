"""A model of token ids as a model of embedding vectors."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError, InputError
from gradveil.core.plugins import place_of

CHUNK = 8192
"""Rows of a table that are compared at once."""


def nearest_rows(vectors: Tensor, table: Tensor, padding: int) -> Tensor:
    r"""The number of the row of a table that is nearest to each vector.

    .. math:: id(x) = argmin_j |x - t_j|^2 = argmin_j |t_j|^2 - 2 x \cdot t_j

    A vector is padding only if it *equals* that row; otherwise the nearest of the others is taken, because rows of
    padding are often zero and would be nearest to anything small.

    Args:
        vectors: ``[..., d]``.
        table: ``[V, d]`` with V >= 2.
        padding: the number of the row that stands for padding.

    >>> table = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> nearest_rows(torch.tensor([[0.2, 0.1], [0.0, 0.9], [0.0, 0.0]]), table, padding=0)
    tensor([1, 2, 0])
    """
    wanted = vectors.detach().double()  # exact rows must be found among near twins
    best = torch.full_like(wanted[..., 0], torch.inf)
    found = torch.zeros_like(best, dtype=torch.int64)
    for first in range(0, len(table), CHUNK):
        rows = table[first : first + CHUNK].detach().double()
        distance = rows.square().sum(1) - 2 * (wanted @ rows.T)
        if first <= padding < first + len(rows):
            distance = torch.where(torch.arange(len(rows), device=rows.device) == padding - first, torch.inf, distance)
        nearest, place = distance.min(-1)
        found = torch.where(nearest < best, place + first, found)
        best = torch.where(nearest < best, nearest, best)
    return torch.where((vectors == table[padding].to(vectors)).all(-1), padding, found)


class EmbeddedInput(nn.Module):
    r"""A model that maps token ids ``[N, L]`` to outputs, as a function of embedding vectors ``[N, L, d]``.

    The model runs on placeholders for the ids (the padding id where a vector equals the padding row, another id
    elsewhere, so that it makes the same mask), and what its embedding gives out is replaced by

    .. math:: x \text{ if the embedding is withheld, } \quad E_{id(x)} + (x - E^0_{id(x)}) \text{ if it is shared}

    where E are its weights now, E^0 those it was built with and id(x) the nearest row of E^0. For the vectors of true
    tokens, that is E[ids] to the bit, also after training steps; its gradient reaches E as if the ids had been given.

    Args:
        model: any module that applies an `nn.Embedding` to the ids and uses them for nothing else but masks.
        length: L, the positions of an input.
        vocabulary: how many ids there are; the embedding may have more rows.
        padding: the id of padding.
        shared: leave the embedding trainable if it is, so that its gradient is part of the update; otherwise it is
            frozen here. The rows of that gradient that are not zero are the words of the batch.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
        >>> embedded = EmbeddedInput(model, length=3, vocabulary=5)
        >>> ids = torch.tensor([[4, 2, 0]])
        >>> torch.equal(embedded(embedded.table_now[ids]), model(ids))
        True
        >>> [name for name, value in embedded.named_parameters() if value.requires_grad]
        ['model.2.weight', 'model.2.bias']
    """

    table: Tensor

    def __init__(
        self, model: nn.Module, *, length: int, vocabulary: int, padding: int = 0, shared: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary, self.padding = vocabulary, padding
        probe = self._probe_ids(length)
        self.embedding_name, self.positions_name = _find_embeddings(model, probe)
        self.model = model
        _check_embedding(self.embedding_name, self.embedding, vocabulary)
        if not shared:
            self.embedding.weight.requires_grad_(False)
        self.shared = self.embedding.weight.requires_grad
        if self.shared:
            self.register_buffer("table", self.table_now.clone())
        self._check_ids_are_used_once(probe)

    @property
    def embedding_weight(self) -> str:
        """The name of the embedding's parameter."""
        weight = self.embedding.weight
        return next(name for name, parameter in self.named_parameters() if parameter is weight)  # it may be tied

    @property
    def positions_weight(self) -> str | None:
        """The name of the trained parameter with a row for each position, if the model embeds positions 0 to L - 1."""
        name = f"model.{self.positions_name}.weight"
        trained = self.positions_name is not None and self.get_parameter(name).requires_grad
        return name if trained else None

    @property
    def embedding(self) -> nn.Embedding:
        """The model's embedding of the ids."""
        module = self.model.get_submodule(self.embedding_name)
        assert isinstance(module, nn.Embedding)
        return module

    @property
    def table_now(self) -> Tensor:
        """The rows of the vocabulary at the weights that the model has now."""
        return self.embedding.weight.detach()[: self.vocabulary]

    def forward(self, vectors: Tensor) -> Tensor:
        """The outputs for embedding vectors ``[N, L, d]``."""
        table = self.table if self.shared else self.embedding.weight[: self.vocabulary]
        padded = (vectors == table[self.padding]).all(-1)
        placeholders = torch.where(padded, self.padding, self._token(0))

        def replace(module: nn.Embedding, ids: tuple[Tensor], output: Tensor) -> Tensor:
            if ids[0].shape != placeholders.shape:
                return output
            if not self.shared:
                return vectors
            tokens = nearest_rows(vectors, table, self.padding)
            return F.embedding(tokens, module.weight, module.padding_idx) + (vectors - table[tokens])

        handle = self.embedding.register_forward_hook(replace)
        try:
            outputs: Tensor = self.model(placeholders)
        finally:
            handle.remove()
        return outputs

    def _token(self, number: int) -> int:
        """The first or the second id that is not padding."""
        return number if number < self.padding else number + 1

    def _probe_ids(self, length: int) -> Tensor:
        """Two sentences of one repeated token each: never the numbers of the positions, which are embedded as well."""
        tokens = [self._token(number) if self._token(number) < self.vocabulary else self._token(0) for number in (0, 1)]
        return torch.tensor(tokens)[:, None].expand(2, length).contiguous()

    @torch.no_grad()
    def _check_ids_are_used_once(self, probe: Tensor) -> None:
        probe = probe.to(self.embedding.weight.device)
        with _evaluating(self.model):
            expected, got = self.model(probe), self(self.table_now[probe])
        if not isinstance(expected, Tensor) or not torch.allclose(expected, got, rtol=1e-4, atol=1e-6):
            raise InputError(
                f"text: expected a model that uses token ids only in its embedding {self.embedding_name!r} and for "
                "masks, got other outputs for the vectors of the same tokens; let it compute everything from the "
                "embedding's output"
            )


@torch.no_grad()
def _find_embeddings(model: nn.Module, probe: Tensor) -> tuple[str, str | None]:
    """The name of the embedding that is applied to the ids, and of the one applied to the positions, if there is."""
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    device = next((module.weight.device for module in embeddings.values()), torch.device("cpu"))
    watched, length = probe.to(device), probe.shape[1]
    found: list[str] = []
    positions: list[str] = []

    def watch(name: str) -> "torch.utils.hooks.RemovableHandle":
        def note(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if not inputs or not isinstance(inputs[0], Tensor):
                return
            if torch.equal(inputs[0], watched):
                found.append(name)
            elif inputs[0].shape[-1:] == (length,) and bool((inputs[0] == torch.arange(length, device=device)).all()):
                positions.append(name)

        return embeddings[name].register_forward_pre_hook(note)

    handles = [watch(name) for name in embeddings]
    try:
        with _evaluating(model):
            model(watched)
    except GradveilError:
        raise
    except Exception as error:
        if embeddings:
            where = f" ({place})" if (place := place_of(error)) else ""
            raise InputError(
                f"text: expected a model that takes token ids [N, {length}] (int64), got an error{where}: "
                f"{' '.join(str(error).split())}; check the model's length and its code"
            ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        others = f"; its embeddings {', '.join(embeddings)} get other inputs" if embeddings else ""
        raise InputError(
            f"text: expected a model with an nn.Embedding that is applied to the token ids, got none{others}; give it "
            "one, as the registered text models have, or use another model"
        )
    return found[0], positions[0] if positions else None


def _check_embedding(name: str, embedding: nn.Embedding, vocabulary: int) -> None:
    if embedding.num_embeddings < vocabulary:
        raise InputError(
            f"text: expected an embedding with a row for each of the {vocabulary:,} tokens of the data, got "
            f"{name!r} with {embedding.num_embeddings:,}; enlarge it, or use a smaller vocabulary"
        )
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise InputError(
            f"text: expected a plain embedding, got {name!r} with max_norm or scale_grad_by_freq, which change its "
            "rows or its gradient by the batch; build it without them"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards, every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
