"""The page as a browser gets it: nothing is loaded from outside, nothing is unescaped, everything is in place."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from gradveil import report
from gradveil.audit.store import command_line
from gradveil.core.errors import DataError, OutputError
from gradveil.report.flags import FLAGS
from gradveil.report.read import read

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}


class Page(HTMLParser):
    """Collects every start tag with its attributes and checks that tags nest."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.words = []
        self.inline = {"script": "", "style": ""}
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in self.inline:
            self.inline[self._open[-1]] += data
        else:
            self.words.append(data)

    def all(self, tag, **wanted):
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and all(attributes.get(key) == value for key, value in wanted.items())
        ]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(draft):
    return Page(report.write(draft.write()).read_text())


def test_write_leaves_the_page_the_sheet_and_the_tables_and_nothing_else(make_audit):
    folder = make_audit().write()
    before = set(os.listdir(folder))
    path = report.write(folder)
    assert path == folder / "report.html"
    assert set(os.listdir(folder)) - before == {
        "report.html",
        "overview.png",
        *(f"{name}.{ending}" for name in ("attacks", "evidence", "cost") for ending in ("csv", "tex")),
    }
    first = path.read_bytes()
    assert report.write(folder).read_bytes() == first


def test_a_failed_write_leaves_the_old_page_alone(make_audit):
    folder = make_audit().write()
    old = report.write(folder).read_bytes()
    (folder / "utility.jsonl").write_text("broken\n")
    with pytest.raises(DataError):
        report.write(folder)
    assert (folder / "report.html").read_bytes() == old
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_a_page_that_cannot_be_written_is_a_clear_error(make_audit):
    folder = make_audit().write()
    (folder / "report.html").mkdir()
    with pytest.raises(OutputError, match=r"report.html: expected a place that can be written to, got: Is a directory"):
        report.write(folder)
    assert not [name for name in os.listdir(folder) if name.startswith(".") or name.endswith(".part")]


def test_a_link_in_place_of_the_unfinished_page_is_not_followed(make_audit, tmp_path):
    folder = make_audit().write()
    (tmp_path / "mine").write_text("mine")
    (folder / "report.part").symlink_to(tmp_path / "mine")
    report.write(folder)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_nothing_comes_from_outside(make_audit):
    draft = make_audit()
    draft.config["dataset_source"] = "https://example.org/mnist"
    page = page_of(draft)
    for tag, attributes in page.tags:
        for key in ("src", "href", "srcset", "poster", "action", "data", "xlink:href"):
            assert re.match(r"(data:|#|$)", attributes.get(key) or ""), (tag, key, attributes[key])
        assert "url(" not in (attributes.get("style") or "")
    assert not re.search(
        r"url\(|@import|@font-face|fetch\(|XMLHttpRequest|https?:", page.inline["style"] + page.inline["script"]
    )
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")


def test_every_inner_link_has_its_target(make_audit):
    page = page_of(make_audit())
    targets = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = {attributes["href"] for tag, attributes in page.tags if tag in ("a", "use")}
    assert links <= {f"#{target}" for target in targets}


HOSTILE = "<script>alert('&quot;')</script>\"><img src=x onerror=alert(1)>`"


def test_hostile_names_are_text(make_audit):
    draft = make_audit(defenses=[("none", {}, 0.0), (HOSTILE.replace(":", ""), {}, 0.5)], attacks=[(HOSTILE, {}, 0.01)])
    draft.config.update(
        {
            "classes": [HOSTILE] * 10,
            "dataset": HOSTILE,
            "model": HOSTILE,
            "platform": HOSTILE,
            "dataset_source": HOSTILE,
        }
    )
    page = page_of(draft)
    assert len(page.all("script")) == 1
    assert "alert" not in page.inline["script"]
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert all(attributes["src"].startswith("data:image/png;base64,") for attributes in page.all("img"))
    assert HOSTILE in page.text


def test_the_picture_shows_every_image_unchanged(make_audit):
    draft = make_audit()
    page = page_of(draft)
    shown = {base64.b64decode(image["src"].partition(",")[2]) for image in page.all("img")}
    assert shown == {(draft.folder / name).read_bytes() for name in draft.images}
    assert all(image["alt"] for image in page.all("img"))


def test_a_leak_is_marked_by_more_than_colour(make_audit):
    draft = make_audit()
    page = page_of(draft)
    leaks = sum(row["leaked"] for row in draft.rows())
    cells = page.all("td", **{"class": "leaked"})
    assert len(cells) == leaks > 0
    assert all(", leaked" in cell["title"] for cell in cells)
    assert all(", not leaked" in cell["title"] for cell in page.all("td", **{"class": "safe"}))


def test_only_the_first_victims_are_shown_and_that_is_said(make_audit):
    page = page_of(make_audit(victims=15))
    assert "Only the first 12 of 15 victims are shown" in page.text
    assert "15 of 15" in page.text


def test_the_rule_the_command_and_the_facts_are_there(make_audit):
    draft = make_audit()
    text = page_of(draft).text
    assert "PSNR of at least 15 dB or SSIM of at least 0.5, and a PSNR at least 2 dB above the blind guess" in text
    assert command_line(draft.config) in text
    assert "input shape 1, 28, 28" in text
    assert "parameters 14,394" in text
    assert "lpips yes" in text
    assert "match none" in text


def test_headings_are_buttons_and_values_are_sortable(make_audit):
    draft = make_audit()
    for row in draft.rows("top-k"):
        row["lpips"] = None
    text = report.write(draft.write()).read_text()
    page = Page(text)
    headings = page.all("th", **{"aria-sort": "none"})
    assert len(headings) == len(page.all("button", type="button")) == 5 + 8 + 8 + 6  # attacks, evidence, cost, ranking
    values = [attributes["data-value"] for tag, attributes in page.tags if tag == "td" and "data-value" in attributes]
    assert "" in values
    assert any(re.fullmatch(r"\d+\.\d{6,}", value) for value in values), "sorting needs unrounded values"


def test_raised_flags_stand_above_the_verdict_and_lead_to_their_meaning(make_audit):
    page = page_of(make_audit(victims=4))
    text = page.text
    assert text.index("1 of 14 trust flags is raised") < text.index("Only 4 victims") < text.index("Without a defense,")
    links = {attributes["href"] for attributes in page.all("a")}
    assert "#few-victims" in links
    assert {flag.name for flag in FLAGS} <= {attributes.get("id") for attributes in page.all("div")}
    clear = page_of(make_audit(victims=8)).text
    assert clear.index("None of the 14 trust flags is raised") < clear.index("Without a defense,")


def test_adaptive_attackers_stand_below_the_plain_ones(make_audit):
    draft = make_audit()
    draft.results += [{**row, "adaptive": True} for row in draft.rows("top-k", "idlg")]
    page = page_of(draft)
    assert len(page.all("tr", **{"class": "adaptive"})) == 1
    assert re.search(r"top-k: keep=0.2 median .*? adaptive attacker median", page.text)
    assert any(image["alt"].startswith("top-k:keep=0.2, adaptive attacker, victim 0") for image in page.all("img"))
    assert len(page.all("table", **{"class": "shots"})) == 2


def test_matched_defenses_are_shown_with_their_price(make_audit):
    draft = make_audit()
    found = {"gaussian-noise:std=0.1": "gaussian-noise:std=0.3", "top-k:keep=0.2": None}
    for row in [*draft.results, *draft.utility]:
        row["defense_spec"] = found.get(row["defense_spec"], row["defense_spec"])
    draft.results = [row for row in draft.results if row["defense"] != "top-k"]
    draft.utility = [row for row in draft.utility if row["defense"] != "top-k"]
    draft.config["match"] = "accuracy=0.95"
    draft.matches = [
        {
            "asked": asked,
            "found": spec,
            "kind": "accuracy",
            "target": 0.95,
            "tolerance": 0.01,
            "cost": 0.948,
            "tries": 6,
            "reason": None,
        }
        for asked, spec in found.items()
    ]
    draft.matches[1]["reason"] = "top-k does not cost accuracy=0.95 at any strength"
    page = page_of(draft)
    assert "keeps 95 % of the undefended accuracy (PMM), to within 1 %" in page.text
    assert "Left out: top-k does not cost accuracy=0.95 at any strength." in page.text
    assert "not complete" not in page.text
    labels = {attributes["data-label"] for _, attributes in page.tags if "data-label" in attributes}
    assert "gaussian-noise:std=0.3" in labels
    assert "top-k:keep=0.2" not in labels


def test_strengths_of_one_defense_are_joined_and_what_is_beaten_is_grey(make_audit):
    noises = [("gaussian-noise", {"std": std}, strength) for std, strength in ((0.1, 0.3), (0.2, 0.6), (0.3, 0.9))]
    draft = make_audit(defenses=[("none", {}, 0.0), *noises, ("top-k", {"keep": 0.2}, 0.2)], victims=8)
    for row, pmm in zip(draft.utility, (1.0, 0.98, 0.95, 0.9, 0.7), strict=True):
        row["pmm"] = pmm
    page = page_of(draft)
    assert len(page.all("polyline", **{"class": "family"})) == 2  # one in each chart
    beaten = [a["data-label"] for _, a in page.tags if "dominated" in a.get("class", "").split()]
    assert beaten == ["top-k:keep=0.2"] * 2
    assert len(page.all("path", **{"class": "whisker"})) == 2 * 5


def test_every_defense_has_a_point_in_both_charts(make_audit):
    page = page_of(make_audit())
    labels = [attributes["data-label"] for _, attributes in page.tags if "data-label" in attributes]
    assert sorted(labels) == sorted(make_audit().config["defenses"] * 2)
    assert len(page.all("title")) == 1 + len(labels)


def test_games_have_a_chart_of_their_own(make_audit):
    draft = make_audit()
    draft.identify("none", 100, auc=1.0)
    draft.identify("gaussian-noise", 40)
    draft.identify("gaussian-noise", 60, adaptive=True)
    page = page_of(draft)
    details = [a["data-detail"] for _, a in page.tags if "candidates" in a.get("data-detail", "")]
    assert len(details) == 2 * 2  # a wide and a narrow chart
    assert "the client's image is named in 60 % of 100 updates (50 to 70 %), 200 candidates; accuracy" in details[1]
    assert "updates in which the client's image is named, %" in page.text
    assert re.search(r"because the games or the training is missing: .*top-k:keep=0.2", page.text)


def test_a_defense_without_cost_is_named_below_the_chart(make_audit):
    draft = make_audit()
    draft.utility = [row for row in draft.utility if row["defense"] != "top-k"]
    assert re.search(
        r"Not shown, because an attack or the training is missing: top-k:keep=0.2 ?\.", page_of(draft).text
    )


def test_an_audit_that_only_began_has_a_page(make_audit):
    folder = make_audit().write()
    for name in ("results.jsonl", "utility.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "images")
    text = Page(report.write(folder).read_text()).text
    assert "No attack has finished yet." in text
    assert "The audit is not complete: 48 of 48 attack runs" in text
    assert "nothing is known about the cost" in text
    assert "No defense has both a finished attack and a finished training yet." in text


@pytest.mark.parametrize("count", [1, 20])
def test_one_and_twenty_defenses_have_a_page(make_audit, many_defenses, count):
    page = page_of(make_audit(defenses=many_defenses[:count]))
    assert len(page.all("table", **{"class": "shots"})) == 2
    assert len([1 for _, attributes in page.tags if "data-label" in attributes]) == 2 * count


PROBE = """
<script>
const seen = [];
const table = document.querySelector("#attacks table");
const press = (title) => [...table.querySelectorAll("button")].find((b) => b.textContent.startsWith(title)).click();
const column = (title) => {
  const index = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.startsWith(title));
  return [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.value);
};
for (const title of ["vs. undefended", "vs. undefended", "PSNR", "Defense"]) {
  press(title);
  const sorted = table.querySelectorAll("[aria-sort=ascending], [aria-sort=descending]").length;
  seen.push({ values: column(title), sorted });
}
document.body.replaceChildren(JSON.stringify(seen));
</script>
"""


@pytest.mark.slow
def test_tables_sort_in_a_browser(make_audit, tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs the program chromium")
    path = report.write(make_audit().write())
    probe = tmp_path / "probe.html"
    probe.write_text(path.read_text().replace("</body>", f"{PROBE}</body>"))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    done = subprocess.run(
        [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    up, down, psnr, defense = json.loads(re.search(r"\[\{.*\}\]", done.stdout).group())
    numbers = [float(value) for value in up["values"][:-3]]  # neither the blind guess nor "none" has a difference
    assert up["values"][-3:] == down["values"][-3:] == [""] * 3
    assert numbers == sorted(numbers)
    assert [float(value) for value in down["values"][:-3]] == sorted(numbers, reverse=True)
    assert [float(value) for value in psnr["values"]] == sorted(float(value) for value in psnr["values"])
    assert defense["values"][-1] == ""
    assert defense["values"][:-1] == sorted(defense["values"][:-1])
    assert {step["sorted"] for step in (up, down, psnr, defense)} == {1}


def test_the_glossary_explains_every_heading_badge_and_metric(make_audit):
    draft = make_audit(victims=6)
    for row in draft.rows("top-k"):
        row["bound_mse"] = 0.01
        draft.results.append({**row, "adaptive": True})
    draft.config["adapted"] = [["top-k:keep=0.2", spec] for spec in draft.config["attacks"]]
    draft.identify("none", 90)
    draft.utility[1].update(privacy="(1.0, 1e-05)-DP", epsilon=1.0)
    text = report.write(draft.write()).read_text()
    glossary = text[text.index('id="glossary"') :]
    terms = {html.unescape(term) for term in re.findall(r"<dt>([^<]*)</dt>", glossary)}
    headings = {html.unescape(title) for title in re.findall(r'aria-hidden="true">([^<]+)</span></th>', text)}
    folded = {html.unescape(title) for title in re.findall(r'<span title="[^"]*"><b>([^<]*)</b>', text)}
    assert {"Bound", "Label", "Time", "SSIM"} <= folded
    assert {"PSNR dB", "vs. plain", "p leaks", "AUC", "Guarantee", "Rank"} <= headings
    badges = set(re.findall(r'class="badge">([^<]*)<', text))
    metrics = {metric.title for metric in read(draft.folder).metrics}
    used = {heading.removesuffix(" dB") for heading in headings} | folded | badges | metrics
    assert used - terms == set()


def test_the_page_says_what_an_attack_chose_and_at_which_stage(make_audit):
    draft = make_audit(victims=6)
    for row in draft.rows():
        row["found_by"] = "peel:iterations=9" if row["victim"] < 4 or row["defense"] == "none" else "lti:draws=1"
    draft.config["stage"] = 0.5
    text = page_of(draft).text.replace(" ,", ",").replace(" .", ".").replace(" ;", ";").replace(" )", ")")
    assert "untrained weights, after 50 % of an undefended training of" in text
    assert "chose among its portfolio by how each did on clients of its own: peel undefended; peel (4 of 6) and" in text


def test_the_page_says_what_was_attacked_and_what_was_not_tested(make_audit):
    draft = make_audit(victims=6)
    text = page_of(draft).text.replace(" ,", ",").replace(" .", ".")
    assert "14,394 parameters and its initial, untrained weights, with which it classifies 10 % of the test" in text
    assert "It has neither batch norm nor dropout." in text
    assert "6 victims from the test split of mnist, 1 image behind each; each client shares a single gradient." in text
    assert "sees one round of each victim, knows the model, and must find the labels itself." in text
    assert re.search(r"Run with gradveil 0\.1\.0, \d{4}-\d\d-\d\d \d\d:\d\d( to [-: \d]+)? UTC", text)
    for untested in (
        "trained weights",
        "batches: there is one image",
        "local steps",
        "a server that changes the model",
    ):
        assert untested in text
    draft.config |= {
        "weights": "mine.safetensors",
        "batch_size": 4,
        "local_epochs": 2,
        "local_batch": 2,
        "observed_rounds": 3,
        "labels": "known",
        "weights_accuracy": 0.91,
        "modes": {"batch norm": "train", "dropout": "inference"},
        "learned": draft.config["attacks"][:1],
    }
    text = page_of(draft).text.replace(" ,", ",").replace(" .", ".")
    assert "the weights in mine.safetensors, with which it classifies 91 % of the test images" in text
    assert "batch norm in train mode (statistics of the batch) and dropout that is switched off" in text
    assert "4 images behind each; each client shares its change after 2 local passes in steps on 2 examples" in text
    assert "sees 3 rounds of each victim on the same data, knows the model, and is given the labels" in text
    assert "idlg learned from 4,000 public images." in text
    for tested in ("trained weights:", "batches: there is one", "local steps: clients", "a client seen in several"):
        assert tested not in text


def test_columns_that_do_not_fit_are_folded_but_kept_in_files(make_audit):
    folder = make_audit(victims=6).write()
    text = report.write(folder).read_text()
    attacks = text[text.index('<section id="attacks">') : text.index("What shows that a defense")]
    assert len(re.findall('<th scope="col"', attacks)) == 5
    assert "SSIM" in (folder / "attacks.csv").read_text().splitlines()[0]
    assert "thead { display: table-header-group; }" in text


def test_which_rule_decided_is_shown(make_audit):
    draft = make_audit(victims=6)
    draft.rows("none", "idlg")[0]["leak_rule"] = "blur"
    text = report.write(draft.write()).read_text()
    assert "<small>1 by blur, 5 by pixels</small>" in text
    assert "victim 0: PSNR" in text
    assert ", leaked by blur" in text
