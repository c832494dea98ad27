"""Audit two defenses by hand: the same way that `gradveil audit` goes, with every step in view.

python examples/audit_as_a_library.py
"""

import statistics

import torch

import gradveil
from gradveil import data
from gradveil.audit.cases import Case, attack_on, build_task, choose_victims, fit, observe, prepare, score
from gradveil.metrics import Scorer

torch.set_num_threads(1)  # small networks are slower on several
digits = data.load("mnist")
task = build_task(digits, "lenet:init=uniform")
victims = choose_victims(digits.test, 2)
public = digits.train.batch(range(100))  # nobody's: defenses may measure on it, attackers may learn from it
attack = gradveil.attack("idlg", iterations=120)

for spec in ("none", "dual-pruning", "gaussian-noise:std=0.3"):
    stage = prepare(task, gradveil.defense(spec), attack, public=public)
    for adaptive in (False, True):
        seen = observe(fit(Case(stage, attack, victims, adaptive=adaptive)))
        scores = score(seen, attack_on(seen), Scorer(task.modality))
        median = statistics.median(one.metrics["psnr"] for one in scores)
        print(f"{spec:24} {'adaptive' if adaptive else 'plain':9} PSNR {median:5.1f} dB, power {seen.power[0]:.2f}")
