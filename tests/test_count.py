"""The script that counts modules which assume images."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "count.py"


@pytest.fixture(scope="module")
def count():
    spec = importlib.util.spec_from_file_location("count_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "code",
    [
        "def f(images): ...",
        "blind_psnr = 1",
        "class PixelMean: ...",
        "raise ValueError('the image is too small')",
        "f(tv=0.1)",
        "from torch.nn import Conv2d",
        "y = x / 255",
        "y = x.mul(255)",
        "a, b, c = x.shape[1:]",
        "_, b, c = task.input_shape",
        "x.ndim == 4",
        "len(task.input_shape) != 3",
        "guess = IMAGE.blind(x)",
    ],
)
def test_what_assumes_images_is_found(count, tmp_path, code):
    (tmp_path / "module.py").write_text(f'"""About nothing."""\n{code}\n', encoding="utf-8")
    assert count.image_evidence(tmp_path / "module.py").startswith("line 2: ")


@pytest.mark.parametrize(
    "code",
    [
        '"""About images."""',
        "x = 1  # pixels",
        'x: int = 0\n"""Of the image."""',
        "from gradveil.modality import IMAGE\ndef f(modality=IMAGE): ...",
        "class Split:\n    modality: Modality = IMAGE",
        "imagine(stv, channelled)",
        "mask = byte & 255",
        "a, b = x.shape",
        "a, b, c = thing",
        "x.ndim == 2",
    ],
)
def test_what_does_not_is_let_pass(count, tmp_path, code):
    (tmp_path / "module.py").write_text(code, encoding="utf-8")
    assert count.image_evidence(tmp_path / "module.py") is None


def test_code_lines_are_those_with_code(count, tmp_path):
    (tmp_path / "module.py").write_text(
        '"""About.\n\nMore."""\n\n# why\nx = (1,\n     2)\n\n\ndef f():\n    """What."""\n    return """a\n\nb"""\n',
        "utf-8",
    )
    assert count.code_lines(tmp_path / "module.py") == 6


def test_it_prints_a_table_of_this_checkout(count, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["count.py", "--modules"])
    count.main()
    said = capsys.readouterr().out
    assert "code lines of src" in said
    assert "modality/image.py: line" in said
