"""The words of the verdict, case by case."""

import re

import pytest

from gradveil import report
from gradveil.defenses import create
from gradveil.report.judgement import Outcome, judge, outcome
from gradveil.report.read import read

NONE = ("none", {}, 0.0)
NOISE = ("gaussian-noise", {"std": 0.1}, 0.9)
TOP_K = ("top-k", {"keep": 0.2}, 0.05)
IDLG = ("idlg", {"iterations": 100}, 0.02)


def set_leaks(rows, count):
    """Mark the first `count` rows as leaked and the others as not leaked."""
    for index, row in enumerate(rows):
        row["leaked"] = index < count


def caveats(draft):
    return " ".join(judge(read(draft.write())).caveats)


def flagged(draft):
    return " ".join(found.text for found in judge(read(draft.write())).flags)


def headline(draft):
    return [sentence.text for sentence in judge(read(draft.write())).headline]


def test_a_leak_and_a_defense_that_stops_it(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    draft.utility[1]["pmm"] = 0.934
    first, second = headline(draft)
    assert first.startswith("Without a defense, `idlg` recovers 6 of 6 images (median 34.")
    assert "and `inverting-gradients` 6 of 6 (median 22." in first
    assert second == "`gaussian-noise:std=0.1` stops both attacks; it keeps 93 % of the accuracy."
    assert "`gaussian-noise:std=0.1`: only the attacks named here were tried; attackers who learn" in caveats(draft)


def test_attackers_who_learned_are_said_to_have_public_data(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    draft.config["learned"] = draft.config["attacks"][:1]
    text = caveats(draft)
    assert "`idlg`: an attacker with 4,000 public images of the same kind as the victims'" in text
    assert "only the attacks named here were tried; attackers who only want to know whose data it was are not" in text


@pytest.mark.parametrize(
    ("pmm", "words"),
    [
        (0.42, "; it keeps only 42 % of the accuracy."),
        (1.01, "; it costs no accuracy."),
        (None, "; the model trained with it reaches 11 % accuracy."),
    ],
)
def test_what_a_defense_costs_is_said(make_audit, pmm, words):
    draft = make_audit(defenses=[NONE, NOISE], attacks=[IDLG], victims=6)
    draft.utility[1].update(pmm=pmm, accuracy=0.11)
    assert headline(draft)[1] == f"`gaussian-noise:std=0.1` stops the attack{words}"


def test_a_cost_that_was_not_measured_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    draft.utility.pop()
    assert headline(draft)[1].endswith("stops both attacks; its cost in accuracy was not measured.")
    assert "the cost in accuracy of `gaussian-noise:std=0.1` is missing" in caveats(draft)


def test_a_defense_that_does_not_help(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    assert headline(draft)[1] == (
        "`top-k:keep=0.2` does not help: at least as large a share of the images is recovered as without a defense."
    )


def test_a_defense_that_only_weakens(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    set_leaks(draft.rows("top-k", "idlg"), 1)
    set_leaks(draft.rows("top-k", "inverting-gradients"), 3)
    audit = read(draft.write())
    assert outcome(audit, "top-k:keep=0.2") is Outcome.WEAKENS
    assert headline(draft)[1] == ("`top-k:keep=0.2` is not enough: `inverting-gradients` still recovers 3 of 4 images.")


def test_batches_are_called_batches(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    draft.config["batch_size"] = 8
    first, second = headline(draft)
    assert "`idlg` recovers 4 of 4 batches of 8 images" in first
    assert "share of the batches" in second


def test_without_a_working_attack_nothing_follows(make_audit):
    draft = make_audit()
    set_leaks(draft.rows(), 0)
    verdict = judge(read(draft.write()))
    assert len(verdict.headline) == 1
    assert verdict.headline[0].outcome is Outcome.UNKNOWN
    assert "`idlg` recovers none of 4 images" in verdict.headline[0].text
    assert "this audit says nothing about the defenses" in flagged(draft)
    assert "stops" not in " ".join(verdict.lines())


def test_an_attack_that_fails_undefended_proves_nothing(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    set_leaks(draft.rows(attack="inverting-gradients"), 0)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops `idlg`;")
    assert "`inverting-gradients` recovers nothing even without a defense" in flagged(draft)


def test_a_weak_attack_is_called_weak(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    set_leaks(draft.rows("none", "inverting-gradients"), 1)
    assert "`inverting-gradients` is weak here: without a defense it recovers only 1 of 4" in flagged(draft)


def test_a_leak_by_an_attack_that_fails_undefended_still_counts(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    set_leaks(draft.rows("none", "inverting-gradients"), 0)
    set_leaks(draft.rows("gaussian-noise", "inverting-gradients"), 1)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.WEAKENS


def test_without_an_undefended_run_nothing_follows(make_audit):
    draft = make_audit(defenses=[NOISE])
    assert headline(draft) == ["No attack was run without a defense (`none`)."]
    assert "this audit says nothing about the defenses: add `--defense none`" in flagged(draft)


def test_no_defense_but_none_is_a_report_too(make_audit):
    draft = make_audit(defenses=[NONE])
    assert len(headline(draft)) == 1
    assert "adapted" not in caveats(draft)


def test_an_unfinished_defense_is_not_judged(make_audit):
    draft = make_audit(defenses=[NONE, NOISE, TOP_K])
    for row in draft.rows("gaussian-noise", "idlg")[1:]:
        draft.results.remove(row)
    assert headline(draft)[-1] == "`gaussian-noise:std=0.1` is not judged yet: some attacks have not finished."
    words = caveats(draft)
    assert "not complete: 3 of 24 attack runs are missing" in words
    assert f"`gradveil audit --resume --out {draft.folder}` runs what is missing" in words


def test_a_leak_found_in_an_unfinished_defense_is_a_leak(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    draft.results.remove(draft.rows("top-k", "idlg")[0])
    assert outcome(read(draft.write()), "top-k:keep=0.2") is Outcome.FAILS


def test_nothing_finished_yet(make_audit):
    draft = make_audit()
    draft.results.clear()
    draft.utility.clear()
    assert headline(draft) == ["No attack has finished yet."]
    assert "48 of 48 attack runs" in caveats(draft)


def test_undefended_not_finished_yet(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    for row in draft.rows("none"):
        draft.results.remove(row)
    assert headline(draft) == ["The attacks without a defense have not finished yet."]
    assert "this audit says nothing about the defenses" in flagged(draft)


def test_a_blind_guess_that_reaches_the_threshold_is_said(make_audit):
    draft = make_audit()
    blind = [row for row in draft.results if row["attack"] == "blind-guess"]
    for row in blind:
        row.update(psnr=9.0, ssim=0.1)
    assert "blind guess alone" not in caveats(draft)
    blind[0]["ssim"] = 0.6
    blind[1]["psnr"] = 15.0
    assert "reaches the threshold for 2 of 4 images" in caveats(draft)


def test_missing_blind_guesses_are_said(make_audit):
    draft = make_audit()
    draft.results = draft.rows()
    assert "blind-guess rows are missing" in caveats(draft)


def test_missing_lpips_names_the_command(make_audit):
    draft = make_audit()
    assert "LPIPS" not in caveats(draft)
    for row in draft.results:
        row["lpips"] = None
    assert "LPIPS is missing in 48 of 48 rows" in caveats(draft)
    assert "`gradveil data get lpips-alex`" in caveats(draft)


def add_adaptive_rows(draft, name, leaks=None):
    """Add an adaptive attacker for every row of a defense; it recovers the first `leaks` victims."""
    for row in draft.rows(name):
        recovered = row["leaked"] if leaks is None else row["victim"] < leaks
        draft.results.append({**row, "adaptive": True, "leaked": recovered})
    draft.config["adapted"] = [
        [spec, attack]
        for spec in draft.config["defenses"]
        if spec.startswith(name)
        for attack in draft.config["attacks"]
    ]


def test_attackers_that_were_not_adapted_are_said_only_where_a_defense_stops_them(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    assert "`gaussian-noise:std=0.1`: no attack that works here was adapted to the defense" in caveats(draft)
    add_adaptive_rows(draft, "gaussian-noise")
    assert "was adapted to the defense" not in caveats(draft)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops both attacks, even when adapted to it; ")
    assert "was adapted to the defense" not in caveats(make_audit(defenses=[NONE, TOP_K]))


def test_of_the_attacks_that_a_defense_stops_those_that_were_adapted_are_named(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    idlg, inverting = draft.config["attacks"]
    draft.results = [row for row in draft.results if not (row["adaptive"] and row["attack_spec"] == inverting)]
    draft.config["adapted"] = [["gaussian-noise:std=0.1", idlg]]
    assert headline(draft)[1].startswith(
        "`gaussian-noise:std=0.1` stops both attacks, `idlg` even when adapted to it; "
    )
    assert "`gaussian-noise:std=0.1`: only `idlg` was adapted to the defense" in caveats(draft)
    # The adapted attack finds nothing undefended, so its failure under the defense shows nothing.
    set_leaks(draft.rows("none", "idlg"), 0)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops `inverting-gradients`; ")
    assert "`gaussian-noise:std=0.1`: no attack that works here was adapted to the defense" in caveats(draft)


def test_a_defense_that_stops_attackers_by_wrong_labels_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    assert "inferred wrongly" not in caveats(draft)
    for row in draft.rows("gaussian-noise"):
        row["label_correct"] = 0.0
    assert "`gaussian-noise:std=0.1`: most labels were inferred wrongly" in caveats(draft)


def test_what_only_an_adaptive_attacker_recovers_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    add_adaptive_rows(draft, "gaussian-noise", leaks=3)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.WEAKENS
    (sentence,) = headline(draft)[1:]
    assert re.fullmatch(
        r"`gaussian-noise:std=0.1` is not enough: `.* \(adaptive\)` still recovers 3 of 4 images; "
        "attackers who do not know the defense recover none.",
        sentence,
    )


def test_a_defense_is_not_judged_before_the_adaptive_attackers_are_done(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    add_adaptive_rows(draft, "gaussian-noise")
    draft.results.pop()
    assert headline(draft)[-1] == "`gaussian-noise:std=0.1` is not judged yet: some attacks have not finished."
    assert "1 of 24 attack runs are missing" in caveats(draft)


def test_among_many_that_stop_those_that_met_adaptive_attackers_are_named(make_audit):
    draft = make_audit(defenses=[NONE, *(("gaussian-noise", {"std": std}, 0.9) for std in (1, 2, 3, 4))], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    assert "stop both attacks, even when adapted to them; of these" in headline(draft)[1]
    draft.results = [row for row in draft.results if not (row["adaptive"] and row["defense_params"]["std"] > 1)]
    draft.config["adapted"] = draft.config["adapted"][:2]
    assert "stop both attacks (`gaussian-noise:std=1` even when adapted); of these" in headline(draft)[1]


def test_a_torn_file_is_said(make_audit):
    folder = make_audit().write()
    with (folder / "utility.jsonl").open("a") as file:
        file.write('{"defen')
    assert "The last line of `utility.jsonl` was cut short and is not counted." in judge(read(folder)).caveats


def test_many_defenses_fit_into_a_few_sentences(make_audit, many_defenses):
    draft = make_audit(defenses=many_defenses, victims=10)
    sentences = headline(draft)
    assert len(sentences) <= 6
    assert any("of the defenses stop both attacks; of these `" in sentence for sentence in sentences)


def test_four_defenses_that_stop_are_all_named_with_the_best_and_the_least(make_audit):
    draft = make_audit(defenses=[NONE, *(("gaussian-noise", {"std": std}, 0.9) for std in (1, 2, 3, 4))], victims=6)
    for row, pmm in zip(draft.utility, (1, 0.5, 0.7, 0.9, 0.8), strict=True):
        row["pmm"] = pmm
    (sentence,) = headline(draft)[1:]
    assert all(f"`gaussian-noise:std={std}`" in sentence for std in (1, 2, 3, 4))
    assert "`gaussian-noise:std=3` keeps the most accuracy (90 %" in sentence
    assert "`gaussian-noise:std=1` the least (50 %)" in sentence


def test_the_terminal_gets_the_same_sentences_without_marks(make_audit):
    folder = make_audit().write()
    verdict = judge(read(folder))
    lines = report.verdict(folder)
    assert len(lines) == len(verdict.flags) + len(verdict.headline) + len(verdict.caveats)
    assert lines[0].startswith("Flag few-victims: Only 4 victims")
    assert lines[1] == verdict.headline[0].text.replace("`", "")
    assert lines[-1].startswith("Note: ")
    assert "`" not in "".join(lines)


def test_optimal_dp_sgd_is_said_to_have_no_epsilon(make_audit):
    defenses = [("none", {}, 0.0), ("optimal-dp-sgd", {"clip": 1.0}, 0.9)]
    draft = make_audit(defenses=defenses)
    draft.config["caveats"] = {"optimal-dp-sgd:clip=1.0": list(create("optimal-dp-sgd").caveats)}
    caveats = judge(read(draft.write())).caveats
    assert any("`optimal-dp-sgd:clip=1.0`" in text and "no (epsilon, delta)" in text for text in caveats)
    assert not any("epsilon" in text for text in judge(read(make_audit().write())).caveats)


def test_caveats_come_from_the_methods_themselves(make_audit):
    """Whatever the methods are called. A caveat that several declare is printed once; attacks have caveats too."""
    defenses = [NONE, NOISE, TOP_K, ("sign-flip", {"rate": 0.1}, 0.9)]
    draft = make_audit(defenses=defenses)
    draft.config["caveats"] = {
        "gaussian-noise:std=0.1": ["it is loud."],
        "sign-flip:rate=0.1": ["it is loud.", "it is `new`."],
        "idlg:iterations=100": ["it is old."],
    }
    found = judge(read(draft.write())).caveats
    assert "`gaussian-noise:std=0.1` and `sign-flip:rate=0.1`: it is loud." in found
    assert "`sign-flip:rate=0.1`: it is `new`." in found
    assert "`idlg:iterations=100`: it is old." in found


def test_methods_made_of_others_have_their_caveats_too():
    feedback, named = create("top-k+error-feedback").caveats, create("optimal-dp-sgd").caveats
    assert len(feedback) == len(named) == 1
    assert create("optimal-dp-sgd+top-k").caveats == named
    assert create("optimal-dp-sgd+top-k+gaussian-noise").caveats == named
    assert create("top-k+error-feedback+top-k+error-feedback").caveats == feedback
    assert create("top-k").caveats == ()


@pytest.mark.parametrize(("leaking", "expected"), [(1, Outcome.NOT_SHOWN), (4, Outcome.NOT_SHOWN), (5, Outcome.STOPS)])
def test_a_defense_stops_only_what_works_well_enough_without_it(make_audit, leaking, expected):
    """One of eight images recovered without a defense and none with it may be luck."""
    draft = make_audit(defenses=[NONE, NOISE], victims=8)
    for attack in ("idlg", "inverting-gradients"):
        set_leaks(draft.rows("none", attack), leaking)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is expected
    sentence = headline(draft)[1]
    if expected is Outcome.STOPS:
        assert sentence.startswith("`gaussian-noise:std=0.1` stops both attacks")
    else:
        assert sentence.startswith(
            "`gaussian-noise:std=0.1`: protection is not shown. Nothing is recovered, but even without a defense the"
        )
        assert f"recovers only {leaking} of 8 images, and 5 are needed to tell protection from luck" in sentence
        assert "stops" not in " ".join(headline(draft))


def test_only_attacks_that_work_well_enough_are_said_to_be_stopped(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=8)
    set_leaks(draft.rows("none", "inverting-gradients"), 1)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops `idlg`;")


def test_the_generic_adaptive_attacker_is_called_that(make_audit):
    """Every defense can be attacked by averaging over simulated draws; nobody has adapted to this one."""
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    draft.config["generic"] = ["gaussian-noise:std=0.1"]
    assert "even when adapted" not in headline(draft)[1]
    words = caveats(draft)
    assert "`gaussian-noise:std=0.1`: of adaptive attackers, only the generic one was tried" in words
    assert "no attack that works here was adapted" not in words


# -- the second verdict ------------------------------------------------------------------------------------------------


def second_verdict(draft):
    return [(sentence.text, sentence.outcome) for sentence in judge(read(draft.write())).identification]


def test_whose_data_it_was_is_a_verdict_of_its_own(make_audit):
    draft = make_audit(defenses=[NONE, NOISE, TOP_K], victims=6)
    draft.identify("none", 100, auc=1.0)
    draft.identify("gaussian-noise", 40, auc=0.9)
    draft.identify("gaussian-noise", 88, adaptive=True, auc=0.97)
    draft.identify("top-k", 99, auc=1.0)
    assert second_verdict(draft) == [
        (
            "Shown 200 candidate images, the server names the one that the client trained on in 100 % of the updates "
            "without a defense (chance 0.5 %).",
            Outcome.FAILS,
        ),
        ("`gaussian-noise:std=0.1` is not enough: 88 % are still named.", Outcome.WEAKENS),
        (
            "`top-k:keep=0.2` does not hide the client's image: 99 % are named, not significantly fewer.",
            Outcome.FAILS,
        ),
    ]
    assert "whose data it was" not in caveats(draft)
    lines = report.verdict(draft.folder)
    assert lines.index("gaussian-noise:std=0.1 is not enough: 88 % are still named.") > 1


def test_hiding_is_shown_only_by_games_that_are_won_without_the_defense(make_audit):
    draft = make_audit(defenses=[NONE, NOISE, TOP_K], victims=6)
    draft.identify("none", 90, auc=0.99)
    draft.identify("gaussian-noise", 0)
    draft.identify("top-k", 0, auc=0.6)
    text = dict(second_verdict(draft)[1:])
    hidden = "`gaussian-noise:std=0.1` hides the client's image: 0 % are named, no more than by chance."
    assert text[hidden] is Outcome.STOPS
    # Nobody is named, but members score higher than others: that is not nothing.
    assert text["`top-k:keep=0.2` is not enough: 0 % are still named."] is Outcome.WEAKENS
    draft.identifications[0].update(named=2, named_low=0.002, named_high=0.07)
    text = dict(second_verdict(draft)[1:])
    assert Outcome.NOT_SHOWN in text.values()
    assert Outcome.STOPS not in text.values()


def test_games_that_are_missing_are_named(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    draft.identify("none", 100, auc=1.0)
    assert "the identification games under `gaussian-noise:std=0.1` are missing" in caveats(draft)
    assert second_verdict(draft)[1] == ("`gaussian-noise:std=0.1`: not played yet.", Outcome.UNKNOWN)


def test_without_games_there_is_no_second_verdict(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    assert second_verdict(draft) == []
    assert "attackers who only want to know whose data it was are not among them" in caveats(draft)


def test_of_a_batch_one_image_is_among_the_candidates(make_audit):
    draft = make_audit(defenses=[NONE], victims=6)
    draft.config["batch_size"] = 16
    draft.identify("none", 61, auc=0.9)
    assert "the client trained on, one of the 16 behind the update, in 61 % of" in second_verdict(draft)[0][0]
