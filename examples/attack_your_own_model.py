"""What does one update of your own model give away, without a defense and under defenses that the attacker may know?

Run it with: python examples/attack_your_own_model.py
"""

import torch
from torch import nn

import gradveil
from gradveil import data, metrics

torch.manual_seed(0)
torch.set_num_threads(1)  # small networks are faster on one thread
model = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2, stride=2),
    nn.Sigmoid(),
    nn.Conv2d(8, 8, 5, padding=2),
    nn.Sigmoid(),
    nn.Flatten(),
    nn.Linear(8 * 14 * 14, 10),
)
for parameter in model.parameters():
    nn.init.uniform_(parameter, -0.5, 0.5)
task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
images, labels = data.load("mnist").test.batch([0, 1, 2, 3])
attack = gradveil.attack("idlg", iterations=150)

for spec in ("none", "gaussian-noise:std=0.3", "dual-pruning"):
    defense = gradveil.defense(spec)
    updates = [defense.share(task, images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]
    for adaptive in (False, True) if spec != "none" else (False,):
        found = attack.reconstruct(task, updates, gradveil.ThreatModel(defense=defense, adaptive=adaptive))
        psnr = metrics.psnr(images, found.inputs[:, 0].clamp(0, 1))
        attacker = "adaptive" if adaptive else "plain"
        labels_found = found.labels.flatten().tolist()
        print(f"{spec:24} {attacker:8} attacker: median PSNR {psnr.median():5.1f} dB, labels {labels_found}")
