"""DAGER: which tokens, and which sentences, lie in the span of an attention block's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks._labels import infer_labels
from gradveil.attacks._sentences import Search, Sentence
from gradveil.attacks._span import RowSpace, completed_row_space, noisy_row_space, row_space
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.parameters import integer, number
from gradveil.defenses.knowledge import Evidence
from gradveil.modality import EmbeddedInput, Text
from gradveil.models.attention import AttentionBlock, DeclaresAttention
from gradveil.task import Gradients, NextToken, Task
from gradveil.update import Update

_SAMPLE = 32  # sentences of random tokens


@ATTACKS.register("dager")
@dataclass(frozen=True, repr=False)
class Dager(Attack):
    r"""Find the tokens, then the sentences, whose vectors lie in the span of the gradients of two attention blocks.

    A projection W of a block that is fed the vectors x_1, ..., x_T of all positions of a batch has the gradient

    .. math:: \partial L / \partial W = \sum_t \delta_t x_t^T

    so every row of the gradients of the query, key and value projections is a combination of the x_t. While there are
    fewer of these than values in one, hardly any other vector lies in their span. In the first block x_t depends on one
    token (and its position), so that the whole vocabulary is tried: the tokens that lie in the span are those of the
    batch. In the second block x_t depends on the tokens up to t (with a causal mask), so sentences are found token by
    token: a prefix is continued by every token found whose vector lies in the span. A prefix without continuation is a
    whole sentence. In an encoder x_t depends on all tokens of its sentence; there the positions that the first block
    adds say which tokens stand where, and choices of them are improved one exchange at a time until all their vectors
    lie in the span.

    Under rotary positions, a sentence that begins with the same token twice looks like one that begins with it once:
    repetitions of the first token are only kept if another token follows. Among more sentences than the batch has,
    those are kept that together explain most of the span; if there are fewer, or they use less than half of the tokens
    that were found, the nearest other tokens stand in each missing sentence, which is not marked as `certain`.

    The plain form takes the gradients for exact. The adaptive one, which is ours, cuts the span at the edge of the
    singular values of a random matrix with the defense's noise, and compares the distance of a vector from it with the
    distance that this noise explains, vector by vector. Where a defense withholds or coarsens values, the gradients are
    first completed to a low rank, as far as the defense's `Knowledge` says, and the noise is estimated. Clipping leaves
    the span alone. Only sentences in an exact span are `certain`; that is tried first. Works for one step and a single
    round.

    Args:
        tolerance: distance from the span, of a vector of length 1, that rounding explains; 1e-3 of that for the
            smallest singular value that counts, relative to the largest.
        beam: the most prefixes with the same first token that are continued.

    References:
        Petrov et al., DAGER: Exact Gradient Inversion for Large Language Models, NeurIPS 2024.

    Example:
        >>> import gradveil
        >>> from gradveil.modality.words import Words
        >>> from gradveil.models.smollm2 import Decoder, Size
        >>> words = Words(tuple("the film is good but long".split()))
        >>> _ = torch.manual_seed(0)
        >>> decoder = Decoder(Size(words.size, width=32, hidden=48, blocks=2, heads=4, groups=2), padding=0)
        >>> model, text = Text(words).bind(decoder, (4,))
        >>> task = gradveil.Task(model, NextToken(ignored=1), input_shape=(4, 32), classes=words.size, modality=text)
        >>> tokens = torch.tensor([words.encode("the film is long")])
        >>> update = gradveil.defense("none").share(task, text.inputs_of(tokens), task.loss_function.labels(tokens, 0))
        >>> found = Dager().reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(0))
        >>> text.sentences(found.inputs[0]), found.certain.tolist()
        (['the film is long'], [[True]])
    """

    paper = "Petrov et al., NeurIPS 2024"
    adapts = True
    finds_labels = True

    tolerance: float = number(1e-3, above=0, below=1)
    beam: int = integer(8, low=1)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse local steps, several rounds, and models that declare no attention blocks that are shared."""
        super().check_threat(task, threat)
        if threat.local is not None or threat.rounds > 1:
            raise ThreatModelError(
                f"{self.name}: needs the gradient of one step in one round, got local={threat.local} and "
                f"rounds={threat.rounds}; use ThreatModel(local=None, rounds=1)"
            )
        self._blocks(task)

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Attack the victims one after the other."""
        text, blocks = _text_of(self.name, problem.task), self._blocks(problem.task)
        found = [self._sentences(problem, blocks, victim) for victim in range(problem.victims)]
        tokens, distances, certain = (torch.stack(part) for part in zip(*found, strict=True))
        return Reconstruction(
            text.inputs_of(tokens).to(problem.task.device, problem.task.dtype),
            self._labels(problem, tokens),
            distances.mean(1),
            torch.zeros(problem.victims, dtype=torch.long),
            certain=certain,
        )

    def _blocks(self, task: Task) -> tuple[AttentionBlock, AttentionBlock]:
        """What the model declares, at the weights of the task."""
        model = task.copy_model()
        if not isinstance(model, EmbeddedInput):
            raise InputError(f"{self.name}: needs a model of text, got a task on {task.modality.name}s")
        if not isinstance(model.model, DeclaresAttention) or len(blocks := model.model.attention_blocks()) < 2:
            raise InputError(
                f"{self.name}: needs a model that declares its first two attention blocks, got "
                f"{type(model.model).__name__}; give it a method attention_blocks (see models.attention)"
            )
        named = [
            AttentionBlock(tuple(f"model.{name}" for name in block.projections), block.inputs, block.causal)
            for block in blocks[:2]
        ]
        if withheld := [name for block in named for name in block.projections if name not in task.parameters]:
            raise InputError(
                f"{self.name}: needs the gradients of the first two attention blocks, got a task that does not share "
                f"{withheld[0]!r}; share it, or use another attack"
            )
        return named[0], named[1]

    def _sentences(
        self, problem: Problem, blocks: tuple[AttentionBlock, AttentionBlock], victim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens ``[examples, L]`` of one victim, their mean distances from the span, and which are certain."""
        task, text = problem.task, _text_of(self.name, problem.task)
        update = {name: value[victim] for name, value in problem.updates.items()}
        assert text.table is not None  # the modality of a task is bound
        table = text.table.to(task.device, task.dtype)
        for noise in self._assumptions(problem):
            first, second = (self._space(problem, update, block, noise) for block in blocks)
            size = text.padding, task.input_shape[0]
            search = Search(table, *size, blocks, (first, second), self.tolerance, noise, self.beam)
            found = self._found_by(search, problem)
            if bool(found[2].all()):
                break
        return found

    def _assumptions(self, problem: Problem) -> tuple[str, ...]:
        """What to take the noise on the gradients for, until all sentences are certain; see `Search`."""
        knowledge = problem.knowledge
        if knowledge is None:
            return ("none",)
        return ("none", "known" if knowledge.variance and knowledge.read is None else "estimated")

    def _found_by(self, search: Search, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        examples = problem.examples
        if search.is_hopeless:
            return _filled([], [], search, examples)
        allowed = search.tokens()
        if search.blocks[1].causal:
            sentences = search.by_prefix(allowed)
        else:
            sentences = search.by_position(allowed, examples, problem.generator)
        chosen, tokens = search.chosen(sentences, examples), list(dict.fromkeys(torch.cat(allowed).tolist()))
        used = {token for sentence in chosen for token in sentence.tokens}
        if len(used) < len(tokens) / 2:
            chosen = []
        return _filled(chosen, tokens, search, examples)

    def _space(self, problem: Problem, update: Gradients, block: AttentionBlock, noise: str) -> RowSpace:
        """The span of a block's gradients under an assumption about their noise."""
        shared, knowledge = {name: update[name].double() for name in block.projections}, problem.knowledge
        if knowledge is None or noise == "none":
            return row_space(torch.cat(list(shared.values())), 1e-3 * self.tolerance)
        if noise == "known":
            variance = knowledge.variance(update) if callable(knowledge.variance) else knowledge.variance
            return noisy_row_space(list(shared.values()), float(variance))
        return completed_row_space(shared, knowledge.read or _believe, self._scale(problem, block))

    def _scale(self, problem: Problem, block: AttentionBlock) -> Tensor:
        """The size of each value that enters a block, for sentences of random tokens."""
        table = _text_of(self.name, problem.task).table
        assert table is not None
        shape = (_SAMPLE, problem.task.input_shape[0])
        tokens = torch.randint(len(table), shape, generator=problem.generator, device=problem.generator.device)
        vectors = table.to(problem.task.device, problem.task.dtype)[tokens.to(problem.task.device)]
        return block.inputs(vectors, 0).double().square().mean((0, 1)).sqrt().clamp_min(1e-12)

    def _labels(self, problem: Problem, tokens: Tensor) -> Tensor:
        """The labels that follow from the tokens, or those that are known or inferred."""
        task, threat = problem.task, problem.threat
        if isinstance(task.loss_function, NextToken):
            return task.loss_function.labels(tokens, _text_of(self.name, task).padding)
        if threat.labels == "known" or task.classifier is None or task.loss_name != "cross-entropy":
            return problem.labels
        updates = [Update({name: value[v] for name, value in problem.updates.items()}) for v in range(problem.victims)]
        return torch.stack([infer_labels(task, update, threat.batch_size).labels for update in updates])


def _text_of(owner: str, task: Task) -> Text:
    if not isinstance(task.modality, Text):
        raise InputError(f"{owner}: needs a task on text, got one on {task.modality.name}s; use another attack")
    return task.modality


def _believe(_expected: Gradients, update: Gradients) -> Evidence:
    """Take the update for the gradient: a `read` for defenses about which nothing is known."""
    return Evidence(update)


def _filled(
    sentences: Sequence[Sentence], tokens: Sequence[int], search: Search, examples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens ``[examples, L]``, mean distances and certainty; if sentences are missing, the unused tokens."""
    found = torch.full((examples, search.length), search.padding)
    distances, certain = torch.ones(examples, dtype=torch.float64), torch.zeros(examples, dtype=torch.bool)
    for place, sentence in enumerate(sentences):
        found[place, : len(sentence.tokens)] = torch.tensor(sentence.tokens)
        distances[place], certain[place] = sum(sentence.distances) / len(sentence.tokens), search.noise == "none"
    used = {token for sentence in sentences for token in sentence.tokens}
    # A sentence has at least one token; if none is left, any will do.
    rest = [token for token in tokens if token not in used] or [0 if search.padding else 1]
    # Any of these tokens may be in any of the missing sentences, so each gets the nearest.
    nearest = torch.tensor(rest[: search.length])
    found[len(sentences) :, : len(nearest)] = nearest
    return found, distances, certain
