"""Creates audit folders that look like real ones: digits, noisy copies, and metrics computed from both."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from gradveil import metrics
from gradveil.audit import AuditConfig
from gradveil.audit.rows import VERSION
from gradveil.audit.schema import sealed
from gradveil.audit.store import command_line
from gradveil.core.digests import bytes_digest
from gradveil.core.folders import write_json
from gradveil.core.registry import format_spec
from gradveil.modality import IMAGE

Method = tuple[str, dict[str, Any], float]  # name, parameters, strength from 0 to 1

SIX_DEFENSES: list[Method] = [
    ("none", {}, 0.0),
    ("gaussian-noise", {"std": 0.1}, 0.9),
    ("laplace-noise", {"std": 0.01}, 0.25),
    ("top-k", {"keep": 0.2}, 0.05),
    ("dual-pruning", {"k1": 0.05, "k2": 0.75}, 0.7),
    ("gradient-dropout", {"keep": 0.8, "std": 0.005}, 0.8),
]
TWO_ATTACKS: list[Method] = [
    ("idlg", {"iterations": 100}, 0.02),
    ("inverting-gradients", {"iterations": 300, "tv": 0.01}, 0.08),
]


class AuditFolder:
    """The draft of an audit folder: a test may change its config and rows before it is written."""

    def __init__(
        self, folder: Path, defenses: Sequence[Method], attacks: Sequence[Method], victims: int, seed: int
    ) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {
            **AuditConfig().to_json(),
            "gradveil": "0.1.0",
            "version": VERSION,
            "games": 0,
            "learned": [],
            "simulating": [],
            "largest_class": 0.1,
            "modes": {},
            "public_examples": 4000,
            "public_overlap": 0,
            "dataset_source": "embedded digits",
            "modality": "image",
            "metrics": {metric.name: True for metric in metrics.of(IMAGE)},
            "input_shape": [1, 28, 28],
            "classes": [str(digit) for digit in range(10)],
            "parameters": 14394,
            "defenses": [format_spec(name, parameters) for name, parameters, _ in defenses],
            "attacks": [format_spec(name, parameters) for name, parameters, _ in attacks],
            "victims": victims,
            "seed": seed,
            "data_digest": "d" * 16,
            "dropout_rates": {},
            "disclosed": [],
            "weights_accuracy": 0.1,
            "weights_digest": "e" * 16,
            "model_file_digest": None,
            "plugin_files": {},
            "plugin_packages": {},
            "torch": "2.13.0",
            "threads": 1,
            "platform": "Linux x86_64, Python 3.11",
        }
        self.results: list[dict[str, Any]] = []
        self.identifications: list[dict[str, Any]] = []
        self.utility: list[dict[str, Any]] = []
        self.matches: list[dict[str, Any]] = []
        self.images: dict[str, np.ndarray] = {}
        self._generator = np.random.default_rng(seed)
        self._fill(defenses, attacks, victims)

    def _fill(self, defenses: Sequence[Method], attacks: Sequence[Method], victims: int) -> None:
        digits = [_digit(victim * 3 % 10) for victim in range(victims)]
        blind = []
        for victim, digit in enumerate(digits):
            self.images[f"images/original-v{victim}.png"] = digit
            mean = np.mean([_digit(other) for other in range(10)], axis=0)
            blind.append(self._row(None, {}, "blind-guess", {}, victim, digit, mean, 0.0))
        for name, parameters, strength in defenses:
            for attack, attack_parameters, weakness in attacks:
                for victim, digit in enumerate(digits):
                    share = min(1.0, strength + weakness * (1 + victim / 4))
                    copy = (1 - share) * digit + share * self._generator.random(digit.shape)
                    guess = blind[victim]["psnr"]
                    self._row(name, parameters, attack, attack_parameters, victim, digit, copy, guess)
            pmm = 1 - 0.12 * strength**2 + 0.004 * self._generator.standard_normal()
            self.utility.append(
                {
                    "defense": name,
                    "defense_params": parameters,
                    "defense_spec": format_spec(name, parameters),
                    "accuracy": 0.91 * pmm,
                    "baseline_accuracy": 0.91,
                    "pmm": pmm,
                    "loss": 0.31 / pmm,
                    "round_seconds": 0.042 * (1 + strength),
                    "upload_bytes": int(57_576 * (1 - 0.7 * strength)),
                    "download_bytes": 57_576,
                    "history": [min(1.0, 0.91 * pmm * (1 - math.exp(-step))) for step in range(10)],
                    "diverged": None,
                    "privacy": None,
                    "epsilon": None,
                }
            )

    def _row(
        self,
        defense: str | None,
        parameters: dict[str, Any],
        attack: str,
        attack_parameters: dict[str, Any],
        victim: int,
        digit: np.ndarray,
        copy: np.ndarray,
        guess: float,
    ) -> dict[str, Any]:
        mse = max(float(np.mean((digit - copy) ** 2)), 1e-10)
        psnr = -10 * math.log10(mse)
        image = f"images/{len(self.results)}.png"
        self.images[image] = copy
        row = {
            "defense": defense,
            "defense_params": parameters,
            "defense_spec": None if defense is None else format_spec(defense, parameters),
            "attack": attack,
            "attack_params": attack_parameters,
            "attack_spec": format_spec(attack, attack_parameters),
            "adaptive": False,
            "server": "passive",
            "victim": victim,
            "mse": mse,
            "psnr": psnr,
            "ssim": max(0.0, min(1.0, (psnr - 5) / 35)),
            "psnr_blurred": psnr,
            "ssim_blurred": max(0.0, min(1.0, (psnr - 5) / 35)),
            "lpips": min(0.6, mse * 2),
            "noise_ratio": None,
            "label_correct": None if defense is None else 1.0,
            "leaked": defense is not None and psnr >= 15 and psnr >= guess + 2,
            "power": None,
            "bound_mse": None,
            "trained_on": None,
            "loss": mse,
            "loss_start": None,
            "loss_late": None,
            "loss_restarts": None,
            "iterations": 100,
            "seconds": 1.5 + victim / 10,
            "image": image,
        }
        self.results.append(row)
        return row

    def rows(self, defense: str | None = None, attack: str | None = None) -> list[dict[str, Any]]:
        """The rows of real attacks that match, to be changed in place."""
        return [
            row
            for row in self.results
            if row["attack"] != "blind-guess" and defense in (None, row["defense"]) and attack in (None, row["attack"])
        ]

    def identify(self, defense: str, named: int, games: int = 100, *, adaptive: bool = False, auc: float = 0.5) -> None:
        """Add a row of identification games with 200 candidates, under a defense of the audit."""
        spec = next(spec for spec in self.config["defenses"] if spec.partition(":")[0] == defense)
        share = metrics.identification.proportion(named, games)
        self.config["games"] = games
        self.identifications.append(
            {
                "defense": defense,
                "defense_params": {},
                "defense_spec": spec,
                "attack_spec": "identification:form=ridge",
                "adaptive": adaptive,
                "candidates": 200,
                "games": games,
                "named": named,
                "named_low": share.low,
                "named_high": share.high,
                "auc": auc,
                "auc_low": max(0.0, auc - 0.02),
                "auc_high": min(1.0, auc + 0.02),
                "tpr": named / games,
                "tpr_low": share.low,
                "tpr_high": share.high,
                "bits": 7.6 * named / games,
                "bits_low": 7.6 * share.low,
                "seconds": 1.0,
            }
        )

    def write(self) -> Path:
        """Write everything as an audit does, with all derived values, and return the folder."""
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        examples = self.config["batch_size"] * self.config["aggregated"]
        for name, pixels in self.images.items():
            strip = np.tile(pixels, (1, examples)) if pixels.shape == (28, 28) else pixels
            Image.fromarray(np.uint8(np.round(255 * np.clip(strip, 0, 1)))).save(self.folder / name)
        config = self.complete_config()
        write_json(self.folder / "config.json", config)
        for name, rows in (
            ("results.jsonl", self.results),
            ("identification.jsonl", self.identifications),
            ("utility.jsonl", self.utility),
            ("match.jsonl", self.matches),
        ):
            path = self.folder / name
            path.write_text("".join(json.dumps(self._complete(row, name, config)) + "\n" for row in rows))
        return self.folder

    def complete_config(self) -> dict[str, Any]:
        """The config with its command, its adapted pairs, its victims' labels and its digest."""
        config = dict(self.config)
        pairs = [[row["defense_spec"], row["attack_spec"]] for row in self.results if row["adaptive"]]
        config.setdefault("generic", [])
        config.setdefault("caveats", {})
        config.setdefault("adapted", [pair for index, pair in enumerate(pairs) if pair not in pairs[:index]])
        if isinstance(config["victims"], int):
            images = config["batch_size"] * config["aggregated"]
            config.setdefault("victim_labels", [[victim * 3 % 10] * images for victim in range(config["victims"])])
        config.setdefault("command", command_line(config))
        return sealed(config)

    def _complete(self, row: dict[str, Any], name: str, config: dict[str, Any]) -> dict[str, Any]:
        """The row as this audit writes it; values that a test has set are kept."""
        derived = {"audit": config["digest"]}
        if name == "results.jsonl":
            derived["leak_rule"] = "pixels" if row["leaked"] else None
            derived |= {key: config[key] for key in ("dataset", "model", "seed", "batch_size", "aggregated")}
            blind = row["attack"] == "blind-guess"
            derived |= {
                "image_digest": self._digest(row["image"]),
                "original_digest": self._digest(f"images/original-v{row['victim']}.png") if blind else None,
            }
        return sealed({**derived, **row})

    def _digest(self, name: Any) -> str | None:
        path = self.folder / str(name)
        return bytes_digest(path.read_bytes()) if path.is_file() else None


def _digit(value: int) -> np.ndarray:
    """A white digit on black, 28 x 28, in [0, 1]."""
    image = Image.new("L", (28, 28))
    ImageDraw.Draw(image).text((14, 14), str(value), fill=255, font=ImageFont.load_default(size=24), anchor="mm")
    return np.asarray(image, dtype=np.float64) / 255


def twenty_defenses() -> list[Method]:
    """No defense and nineteen defenses, several of them close together."""
    noises = [
        ("gaussian-noise", {"std": float(f"{10 ** (-index / 2):.1g}")}, max(0.0, 1 - index / 6)) for index in range(7)
    ]
    prunings = [("top-k", {"keep": round(0.1 * index, 1)}, 0.5 - 0.05 * index) for index in range(1, 8)]
    bands = [
        ("dual-pruning", {"k1": 0.05, "k2": round(0.5 + 0.1 * index, 1)}, 0.6 + 0.05 * index) for index in range(5)
    ]
    return [("none", {}, 0.0), *noises, *prunings, *bands]


@pytest.fixture
def make_audit(tmp_path: Path) -> Callable[..., AuditFolder]:
    """`make_audit(defenses=..., attacks=..., victims=...)` returns the draft of a folder, not written yet."""

    def make(
        defenses: Sequence[Method] | None = None,
        attacks: Sequence[Method] | None = None,
        victims: int = 4,
        seed: int = 0,
    ) -> AuditFolder:
        return AuditFolder(tmp_path / "audit", defenses or SIX_DEFENSES, attacks or TWO_ATTACKS, victims, seed)

    return make


@pytest.fixture
def many_defenses() -> list[Method]:
    """Twenty of them."""
    return twenty_defenses()
