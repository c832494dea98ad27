"""Damaged audit folders: resuming and reporting refuse them in one line, or end as if nothing had happened.

The default run makes a few folders; ``GRADVEIL_FUZZ=680 pytest tests/audit/test_fuzz.py`` makes 680, from fixed seeds.
The file also runs against older versions: it uses only public functions of gradveil.
"""

import json
import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil import report
from gradveil.audit import AuditConfig, run
from gradveil.core.errors import GradveilError
from gradveil.report.read import read

CASES = int(os.environ.get("GRADVEIL_FUZZ", "63"))
TIMES = {"seconds", "round_seconds", "digest"}  # these differ if a row runs again
VALUES = [None, True, -1, 0, 3, 1.5, "", "none", "\x1b[2J", [], {}, [None], [[]], 1e308, -1e308, 10**30, "9" * 300]


def audit_config(data: Path, **changes) -> AuditConfig:
    fields = {"model": "mlp", "defenses": ("none", "top-k:keep=0.1"), "attacks": ("idlg:iterations=3",), "victims": 2}
    small = {"rounds": 2, "clients": 2, "client_batch": 4, "candidates": 5, "games": 3}
    return AuditConfig(dataset=str(data), **{**fields, **small, **changes})


@pytest.fixture(scope="module")
def audits(tmp_path_factory) -> tuple[AuditConfig, Path, Path]:
    """The config of a small audit, its folder, and the folder of another that differs in seed, model and data."""
    root = tmp_path_factory.mktemp("audits")
    generator = np.random.default_rng(0)
    for name in ("ours", "theirs"):
        images = generator.integers(0, 256, (120, 12, 12), dtype=np.uint8)
        np.savez(
            root / f"{name}.npz", x_train=images, y_train=np.arange(120) % 2, x_test=images, y_test=np.arange(120) % 2
        )
    config = audit_config(root / "ours.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(config, root / "whole")
        run(audit_config(root / "theirs.npz", seed=1, model="mlp:activation=sigmoid"), root / "other")
    report.write(root / "whole")
    return config, root / "whole", root / "other"


# -- damage ------------------------------------------------------------------------------------------------------------


def edit_config(folder: Path, rng: random.Random, _other: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = rng.choice(sorted(config))
    kind = rng.choice(["value", "value", "remove", "add", "number", "list"])
    if kind == "value":
        config[key] = rng.choice(VALUES)
    elif kind == "remove":
        del config[key]
    elif kind == "add":
        config[rng.choice(["note", "Seed", "defences", ""])] = rng.choice(VALUES)
    elif kind == "number":
        key = rng.choice([name for name in config if type(config[name]) in (int, float)])
        config[key] = rng.choice([config[key] + 1, config[key] * 2, -config[key] - 1, 10**15])
    else:
        key = rng.choice([name for name in config if isinstance(config[name], list) and config[name]])
        config[key] = rng.choice([config[key][:-1], config[key] * 2, config[key][::-1] * 3, [*config[key], None]])
    path.write_text(json.dumps(config))


def edit_row(folder: Path, rng: random.Random, _other: Path) -> None:
    path, lines, place = some_row(folder, rng)
    row = json.loads(lines[place])
    key = rng.choice(sorted(row))
    kind = rng.choice(["value", "remove", "add", "number", "number", "swap", "nan"])
    numbers = [name for name in row if type(row[name]) in (int, float)]
    if kind == "value":
        row[key] = rng.choice(VALUES)
    elif kind == "remove":
        del row[key]
    elif kind == "add":
        row["note"] = rng.choice(VALUES)
    elif kind == "number":
        key = rng.choice(numbers)
        row[key] = rng.choice([row[key] + 1, row[key] * 0.9 + 0.01, -row[key] - 1, str(row[key])])
    elif kind == "nan":
        row[rng.choice(numbers)] = rng.choice([float("nan"), float("inf")])
    else:
        specs = json.loads((folder / "config.json").read_text())["defenses"]
        row["defense_spec"] = specs[row.get("defense_spec") == specs[0]]
    lines[place] = json.dumps(row)
    path.write_text("".join(f"{line}\n" for line in lines))


def claim_another(folder: Path, rng: random.Random, other: Path) -> None:
    """Give a row the other audit's seed, model or data set, and other figures."""
    path, lines, place = some_row(folder, rng, "results.jsonl")
    theirs = json.loads((other / "config.json").read_text())
    row = json.loads(lines[place])
    key = rng.choice(["seed", "model", "dataset"])
    lines[place] = json.dumps(row | {key: theirs[key], "psnr": 40.0, "leaked": True})
    path.write_text("".join(f"{line}\n" for line in lines))


def mix_rows(folder: Path, rng: random.Random, other: Path) -> None:
    path, lines, place = some_row(folder, rng)
    theirs = (other / path.name).read_text().splitlines()
    kind = rng.choice(["repeat", "replace", "append", "all"])
    if kind == "repeat":
        lines.append(lines[place])
    elif kind == "replace":
        lines[place] = theirs[place]
    elif kind == "append":
        lines.append(theirs[place])
    else:
        lines = theirs
    path.write_text("".join(f"{line}\n" for line in lines))


def cut(folder: Path, rng: random.Random, _other: Path) -> None:
    path = folder / rng.choice(["config.json", "results.jsonl", "results.jsonl", "utility.jsonl"])
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def cut_within(folder: Path, rng: random.Random, _other: Path) -> None:
    path, lines, place = some_row(folder, rng)
    lines[place] = lines[place][: rng.randrange(1, len(lines[place]))]
    path.write_text("".join(f"{line}\n" for line in lines))


def flip_bits(folder: Path, rng: random.Random, _other: Path) -> None:
    names = ["config.json", "results.jsonl", "utility.jsonl"]
    path = rng.choice([*(folder / name for name in names), *sorted((folder / "images").iterdir())])
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def harm_image(folder: Path, rng: random.Random, _other: Path) -> None:
    path = rng.choice(sorted((folder / "images").iterdir()))
    kind = rng.choice(["missing", "larger", "text", "postscript", "swap", "grey", "link", "folder"])
    if kind == "swap":
        swapped = rng.choice([image for image in sorted((folder / "images").iterdir()) if image != path])
        path.write_bytes(swapped.read_bytes())
        return
    path.unlink()
    if kind == "larger":
        Image.new("L", (3000, 3000), 128).save(path)
    elif kind == "grey":
        Image.new("L", (12, 12), 128).save(path)
    elif kind == "text":
        path.write_text("no image")
    elif kind == "postscript":
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\nshowpage\n")
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "folder":
        path.mkdir()


def point_image_elsewhere(folder: Path, rng: random.Random, _other: Path) -> None:
    path, lines, place = some_row(folder, rng, "results.jsonl")
    row = json.loads(lines[place])
    row["image"] = rng.choice(
        ["../secret.png", "/etc/hostname", "images/../../x.png", "images/original-v0.png", "config.json"]
    )
    lines[place] = json.dumps(row)
    path.write_text("".join(f"{line}\n" for line in lines))


def some_row(folder: Path, rng: random.Random, name: str | None = None) -> tuple[Path, list[str], int]:
    path = folder / (name or rng.choice(["results.jsonl", "results.jsonl", "utility.jsonl"]))
    lines = path.read_text().splitlines()
    return path, lines, rng.randrange(len(lines))


DAMAGES = (
    edit_config,
    edit_row,
    claim_another,
    mix_rows,
    cut,
    cut_within,
    flip_bits,
    harm_image,
    point_image_elsewhere,
)


# -- outcomes ----------------------------------------------------------------------------------------------------------


def outcome(folder: Path) -> object:
    """Everything that a reader learns from an audit, except for the times."""
    audit = read(folder)
    rows = [
        sorted(repr({key: value for key, value in vars(row).items() if key not in TIMES}) for row in group)
        for group in (audit.attempts, audit.blind, audit.utility.values())
    ]
    columns = [column.title for column in report.summary(folder).columns]
    figures = [
        [cell for title, cell in zip(columns, row, strict=True) if "time" not in title.lower()]
        for row in report.summary(folder).texts()
    ]
    return rows, report.verdict(folder), figures, sorted(audit.config.items())


def pictures(folder: Path) -> set[str]:
    """The images that the page shows."""
    page = (folder / "report.html").read_text()
    return {part.partition('"')[0] for part in page.split('src="data:image/png;base64,')[1:]}


def tried(action) -> tuple[str, str]:
    """How an action ended: "ended", "refused" (in one line) or "raw", with the message."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except GradveilError as error:
        return ("refused" if len(str(error).splitlines()) == 1 else "raw"), str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    return "ended", ""


def judged(config: AuditConfig, folder: Path, expected: object, shown: set[str]) -> tuple[str, str]:
    """How a damaged folder ends: "refused", "same", "raw" or "silent"; an audit that is unfinished is resumed."""
    (folder / "report.html").unlink(missing_ok=True)
    reported, message = tried(lambda: report.write(folder))
    if reported == "raw":
        return "raw", message
    if reported == "ended":
        audit = read(folder)
        unfinished = audit.missing_attempts() or audit.missing_utility() or audit.torn
        if not unfinished and outcome(folder) != expected:
            return "silent", "the report"
        if not pictures(folder) <= shown:
            return "silent", "an image of the report"
        if unfinished and not any("not complete" in line or "cut short" in line for line in report.verdict(folder)):
            return "silent", "an unfinished audit"
    resumed, message = tried(lambda: run(config, folder, resume=True))
    if resumed == "ended":
        again, message = tried(lambda: report.write(folder))
        if again == "ended":
            if outcome(folder) != expected or not pictures(folder) <= shown:
                return "silent", "what was resumed"
            return "same", ""
        resumed = again
    return resumed, message


def test_damage_is_refused_or_harmless(audits, tmp_path):
    config, whole, other = audits
    expected, shown = outcome(whole), pictures(whole)
    assert shown
    found: Counter[str] = Counter()
    failures = []
    for number in range(CASES):
        rng = random.Random(number)
        damage = DAMAGES[number % len(DAMAGES)]
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        damage(folder, rng, other)
        verdict, message = judged(config, folder, expected, shown)
        found[verdict] += 1
        if verdict in ("silent", "raw"):
            failures.append(f"{number} {damage.__name__}: {verdict}: {message[:200]}")
        shutil.rmtree(folder)
    print(f"{CASES} damaged folders: {dict(found)}")
    assert failures == []
    assert found["refused"] > CASES / 2
