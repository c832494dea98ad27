"""Tables from CSV files: inferred types, and one line for each thing that can be wrong with a file."""

import random

import numpy as np
import pytest
import torch

from gradveil import data
from gradveil.core.errors import DataError, UnknownNameError

HEADER = ["age", "job", "pay", "sex", "income"]


def rows_of(count, seed=0):
    draw = random.Random(seed)
    for number in range(count):
        yield [
            str(draw.randint(18, 80)),
            draw.choice(["baker", "clerk, retired", "pilot"]),
            f"{draw.gauss(0, 1):.3f}",
            str(draw.randint(0, 1)),
            ("low", "high")[number % 2],
        ]


def write(path, rows, header=HEADER, delimiter=",", encoding="utf-8"):
    def quoted(cell):
        return f'"{cell}"' if delimiter in cell else cell

    lines = [delimiter.join(map(quoted, row)) for row in [header, *rows]]
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


class TestCsv:
    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_types_are_inferred_and_stated(self, tmp_path, delimiter):
        path = write(tmp_path / "people.csv", rows_of(100), delimiter=delimiter)
        dataset = data.load(path, target="income")
        assert dataset.source == "people.csv (numeric: age, pay; categorical: job, sex; target: income)"
        assert dataset.classes == ("high", "low")
        assert (len(dataset.train), len(dataset.test)) == (80, 20)
        age, job, pay, sex = dataset.train.modality.columns
        assert (age.whole, pay.whole) == (True, False)
        assert job.categories == ("baker", "clerk, retired", "pilot")
        assert sex.categories == ("0", "1")
        assert dataset.train.input_shape == (1 + 3 + 1 + 2,)

    def test_cells_come_back_as_they_were(self, tmp_path):
        rows = list(rows_of(60))
        dataset = data.load(write(tmp_path / "people.csv", rows), target="income")
        modality, read = dataset.train.modality, []
        for split in (dataset.train, dataset.test):
            inputs, targets = split.batch(range(len(split)))
            texts = [[cell.text for cell in row] for row in modality.write(inputs, None)]
            read += [[*row, dataset.classes[target]] for row, target in zip(texts, targets.tolist(), strict=True)]
        numbers = [row[2] for row in rows]
        low, high = min(map(float, numbers)), max(map(float, numbers))

        def key(row):
            # The test rows may lie outside the range of the training rows, and numbers are shown with four digits.
            return [row[0], row[1], f"{min(max(float(row[2]), low), high):.2f}", *row[3:]]

        inside = [row for row in rows if modality.columns[2].low <= float(row[2]) <= modality.columns[2].high]
        shown = sorted(map(key, read))
        assert sum(row in shown for row in map(key, inside)) >= 0.95 * len(inside)

    def test_ranges_and_frequencies_are_those_of_the_training_rows(self, tmp_path):
        dataset = data.load(write(tmp_path / "people.csv", rows_of(100)), target="income")
        stored, (age, job, _, _) = dataset.train.inputs, dataset.train.modality.columns
        assert (age.low, age.high) == (stored[:, 0].min(), stored[:, 0].max())
        np.testing.assert_allclose(job.shares, stored[:, 1].long().bincount(minlength=3) / len(stored), rtol=1e-6)
        scaled = (stored[:, 0] - age.low) / (age.high - age.low)
        assert age.middle == pytest.approx(np.median(scaled.numpy()), abs=1e-6)
        assert age.spread == pytest.approx((scaled - age.middle).abs().mean().item(), abs=1e-6)

    def test_any_column_may_be_the_target(self, tmp_path):
        dataset = data.load(write(tmp_path / "people.csv", rows_of(100)), target="sex")
        assert dataset.classes == ("0", "1")
        assert [column.name for column in dataset.train.modality.columns] == ["age", "job", "pay", "income"]

    def test_a_target_called_by_a_number(self, tmp_path):
        path = write(tmp_path / "people.csv", rows_of(100), header=[*HEADER[:4], "2020"])
        assert data.load(path, target=2020).classes == ("high", "low")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"target": "incom"}, "people.csv: expected a column called 'incom', got none; did you mean income?"),
            ({"target": None}, "the column to predict, got none; use --target with one of age, job, pay, sex, income"),
            ({"target": "constant"}, "from 2 to 1,000 different values in the target column 'constant', got 1;"),
            ({"target": "name"}, "in the target column 'name', got 1,200; choose another column or group"),
            ({"cell": ""}, "line 4: expected a value in column 'job', got an empty cell; fill it in or remove the row"),
            ({"cell": " NaN"}, "line 4: expected a value in column 'job', got 'NaN'; fill it in or remove the row"),
            ({"cell": "a,b"}, "line 4: expected 7 cells, got 8; fix the line"),
            ({"cell": '"a"b'}, "line 4: expected a line of a CSV file, got .*; fix it"),
            ({"drop": "name"}, "different values in column 'constant', got 'x' in every row; remove the column"),
            ({"drop": "constant"}, "at most 1,000 categories in column 'name', got 1,200 different texts; group them"),
            ({"rows": 4}, "people.csv: expected at least 10 rows, got 4; add some"),
            ({"header": "age"}, "the names of at least two columns, each once, got 'age', 'job', 'pay', 'sex', 'age'"),
            ({"encoding": "latin-1"}, "expected a CSV file in UTF-8, got the byte 0xe9 at position .*; save it as"),
            ({"number": "inf"}, "expected finite numbers in column 'age', got infinity; remove those rows"),
            ({"number": "1e300"}, "that float32 can hold, in the training rows of column 'age'"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:overflow encountered in cast")
    def test_one_line_for_what_is_wrong(self, tmp_path, change, message):
        header = [*HEADER[:4], change.get("header", "income"), "constant", "name"]
        rows = [[*row, "x", f"Zoé {number}"] for number, row in enumerate(rows_of(change.get("rows", 1200)))]
        if "cell" in change:
            rows[2][1] = change["cell"]
        for row in rows[:40]:
            row[0] = change.get("number", row[0])
        lines = [header, *([cell.replace("clerk, retired", "clerk") for cell in row] for row in rows)]
        if "drop" in change:
            place = header.index(change["drop"])
            lines = [row[:place] + row[place + 1 :] for row in lines]
        path = tmp_path / "people.csv"
        path.write_bytes("\n".join(map(",".join, lines)).encode(change.get("encoding", "utf-8")))
        with pytest.raises(DataError, match=message) as error:
            data.load(path, target=change.get("target", "income"))
        assert "\n" not in str(error.value)

    def test_one_row_of_a_class(self, tmp_path):
        rows = list(rows_of(20))
        rows[0][-1] = "middle"
        with pytest.raises(DataError, match="has one row, but train and test need one each; add rows"):
            data.load(write(tmp_path / "people.csv", rows), target="income")

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"age\n1\n"])
    def test_no_table(self, tmp_path, content):
        (tmp_path / "people.csv").write_bytes(content)
        with pytest.raises(DataError, match="expected a first line with the names of at least two columns"):
            data.load(tmp_path / "people.csv", target="income")

    def test_a_mark_at_the_beginning_of_the_file_is_not_part_of_the_name(self, tmp_path):
        path = write(tmp_path / "people.csv", rows_of(40), encoding="utf-8-sig")
        assert data.load(path, target="income").train.modality.columns[0].name == "age"

    def test_only_what_applies_is_taken(self, tmp_path):
        path = write(tmp_path / "people.csv", rows_of(40))
        with pytest.raises(UnknownNameError, match="unknown parameter 'size'; it takes: target"):
            data.load(path, size=3, target="income")
        with pytest.raises(UnknownNameError, match="mnist: unknown parameter 'target'; it takes: size"):
            data.load("mnist", target="income")


def write_adult(folder, train, test):
    arrays = {}
    for name, rows in (("csv_train", train), ("csv_test", test)):
        text = "\n".join(",".join(row) for row in [HEADER, *rows]).replace("clerk, retired", "clerk")
        arrays[name] = np.frombuffer(text.encode(), np.uint8)
    folder.mkdir(exist_ok=True, parents=True)
    np.savez(folder / "adult.npz", **arrays)


def test_adult_has_its_own_splits_and_target(user_folder):
    train, test = list(rows_of(50)), list(rows_of(12, seed=1))
    test[0][0], test[1][1] = "99", "judge"  # neither is among the training rows
    write_adult(user_folder, train, test)
    adult = data.load("adult")
    assert (len(adult.train), len(adult.test), adult.classes) == (50, 12, ("high", "low"))
    assert adult.source.startswith("adult.npz (numeric: age, pay;")
    columns = adult.train.modality.columns
    assert columns[0].high < 99
    assert adult.test.batch([0])[0][0, 0] == 1  # as far as the training rows go
    assert columns[1].categories == ("baker", "clerk", "judge", "pilot")
    assert columns[1].shares[2] == 0
    assert data.load("adult", target="sex").classes == ("0", "1")
    assert torch.equal(adult.train.targets, torch.tensor([row[-1] == "low" for row in train]).long())


def test_a_broken_adult_is_refused(user_folder):
    np.savez(user_folder / "adult.npz", csv_train=np.zeros(3, np.float32), csv_test=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="adult.npz: expected a table in two arrays of bytes"):
        data.load("adult")
    np.savez(user_folder / "adult.npz", csv_train=np.zeros(0, np.uint8))
    with pytest.raises(DataError, match="adult.npz: expected a table in two arrays of bytes"):
        data.load("adult")
