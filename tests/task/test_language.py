"""The loss of language models."""

import torch

import gradveil
from gradveil.task import NextToken

LOSS = NextToken(ignored=1)
TOKENS = torch.tensor([[5, 6, 7, 0], [4, 0, 0, 0]])


def test_labels_are_the_next_tokens_and_the_end():
    assert LOSS.labels(TOKENS, padding=0).tolist() == [[6, 7, 0, 1], [0, 1, 1, 1]]


def test_it_is_the_mean_over_texts_of_the_mean_over_tokens():
    outputs = torch.randn(2, 8, 4, dtype=torch.float64)
    chances = outputs.log_softmax(1)
    first = -(chances[0, 6, 0] + chances[0, 7, 1] + chances[0, 0, 2]) / 3
    second = -chances[1, 0, 0]
    torch.testing.assert_close(LOSS(outputs, LOSS.labels(TOKENS, 0)), (first + second) / 2)


def test_the_gradient_of_a_batch_is_the_mean_of_its_texts_gradients():
    model = torch.nn.Conv1d(3, 8, 1).double()
    task = gradveil.Task(model, LOSS, input_shape=(3, 4), classes=8)
    inputs, labels = torch.rand(2, 3, 4, dtype=torch.float64), LOSS.labels(TOKENS, 0)
    each = task.per_example_gradients(inputs, labels)
    for name, value in task.gradients(inputs, labels).items():
        torch.testing.assert_close(value, each[name].mean(0))
    assert task.loss_function is LOSS
