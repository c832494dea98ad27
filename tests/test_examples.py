"""The examples run and show what they say."""

import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_defended_training_loop_learns(capsys):
    runpy.run_path(str(EXAMPLES / "own_training_loop.py"))
    assert int(capsys.readouterr().out.rstrip().removesuffix("%").rsplit(" ", 1)[1]) >= 95


def test_ones_own_model_leaks_without_a_defense(capsys):
    threads = torch.get_num_threads()
    runpy.run_path(str(EXAMPLES / "attack_your_own_model.py"))
    torch.set_num_threads(threads)
    psnr = {
        tuple(line.split()[:2]): float(line.split("PSNR")[1].split("dB")[0])
        for line in capsys.readouterr().out.splitlines()
    }
    assert psnr["none", "plain"] > 25
    assert psnr["gaussian-noise:std=0.3", "plain"] < 15
    assert psnr["gaussian-noise:std=0.3", "adaptive"] < 15
    assert psnr["dual-pruning", "plain"] < 15
    assert psnr["dual-pruning", "adaptive"] > 25  # what it keeps is enough for who knows what it keeps


def test_an_audit_by_hand_goes_the_way_of_the_command(capsys):
    threads = torch.get_num_threads()
    runpy.run_path(str(EXAMPLES / "audit_as_a_library.py"))
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    psnr = {tuple(line.split()[:2]): float(line.split("PSNR")[1].split("dB")[0]) for line in lines}
    assert psnr["none", "plain"] > 20 > psnr["dual-pruning", "plain"]
    assert psnr["dual-pruning", "adaptive"] > 20
    assert max(value for (spec, _), value in psnr.items() if spec.startswith("gaussian")) < 15


def test_every_example_is_tested_here():
    known = {"own_training_loop.py", "attack_your_own_model.py", "audit_as_a_library.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == known
