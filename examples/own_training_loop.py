"""A defense in your own training loop: three lines, marked below.

Run it with: python examples/own_training_loop.py
"""

import torch
from torch import nn

import gradveil

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
defense = gradveil.defense("dual-pruning+error-feedback")  # 1: choose a defense
memories = [{} for _ in range(4)]  # 2: one memory per client, kept through all rounds

# Two classes of 8 x 8 images: bright at the top, or bright at the bottom.
labels = torch.arange(64) % 2
images = torch.rand(64, 1, 8, 8)
images[labels == 0, :, :4] += 0.5
images[labels == 1, :, 4:] += 0.5

for _ in range(40):
    updates = []
    for client, memory in enumerate(memories):
        batch = slice(client * 16, client * 16 + 16)
        model.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        updates.append(defense.perturb(gradients, memory=memory))  # 3: what leaves the client
    for name, parameter in model.named_parameters():
        parameter.grad = torch.stack([update[name] for update in updates]).mean(0)
    optimiser.step()

accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"accuracy under {defense}: {accuracy:.0%}")
