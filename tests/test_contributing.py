"""The example in CONTRIBUTING.md is a working defense."""

import re
from pathlib import Path

import torch

import gradveil
from gradveil.defenses import DEFENSES


def test_the_example_defense_works_as_printed(monkeypatch):
    # Without the name, for whoever tries the page out has the file in place.
    monkeypatch.setattr(DEFENSES, "_factories", {n: f for n, f in DEFENSES._factories.items() if n != "sign-flip"})
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    module, row = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(module, "CONTRIBUTING.md", "exec"), {"__name__": "example"})
    assert "sign-flip" in gradveil.list_defenses()
    flipped = gradveil.defense("sign-flip", rate=1.0).perturb({"w": torch.tensor([1.0, -2.0])})["w"]
    assert flipped.tolist() == [-1.0, 2.0]
    cases = eval(f"[{row}]", {"Case": lambda *arguments, **keywords: (arguments, keywords)})
    assert cases[0][0][0] == "sign-flip"
