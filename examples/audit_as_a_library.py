"""Audit two defenses by hand: the same steps that `gradveil audit` takes, one by one.

Run it with: python examples/audit_as_a_library.py
"""

import statistics

import torch

import gradveil
from gradveil import data
from gradveil.audit.cases import Case, attack_on, build_task, choose_victims, fit, observe, prepare, score
from gradveil.metrics import Scorer

torch.set_num_threads(1)  # small networks are faster on one thread
digits = data.load("mnist")
task = build_task(digits, "lenet:init=uniform")
victims = choose_victims(digits.test, 2)
public = digits.train.batch(range(100))  # not a victim's: defenses may measure on it, attackers may learn from it
attack = gradveil.attack("idlg", iterations=120)

for spec in ("none", "dual-pruning", "gaussian-noise:std=0.3"):
    prepared = prepare(task, gradveil.defense(spec), attack, public=public)
    for adaptive in (False, True):
        observation = observe(fit(Case(prepared, attack, victims, adaptive=adaptive)))
        scores = score(observation, attack_on(observation), Scorer(task.modality))
        psnr = statistics.median(victim.metrics["psnr"] for victim in scores)
        power = observation.power[0]  # how much the defense changed the first victim's gradient
        print(f"{spec:24} {'adaptive' if adaptive else 'plain':9} PSNR {psnr:5.1f} dB, power {power:.2f}")
