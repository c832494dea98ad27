"""What clients and server agree on: the model, the data, and the defense."""

import torch
from torch import nn

from gradveil import data

DEFENSE = "dual-pruning:k1=0.05,k2=0.75+error-feedback"
LR = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))


def load_share(client: int, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images and labels that one client holds."""
    train = data.load("mnist").train
    return train.batch(data.partition(train.targets, clients=clients, scheme="iid", seed=0)[client])


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> float:
    """Make one pass over the client's images with plain SGD, and return the mean loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for batch in torch.randperm(len(images)).split(batch_size):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    test = data.load("mnist").test
    images, labels = test.batch(range(len(test)))
    return (model(images).argmax(1) == labels).float().mean().item()
