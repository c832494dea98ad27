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


def caveats(draft):
    return " ".join(judge(read(draft.write())).caveats)


def flagged(draft):
    return " ".join(found.text for found in judge(read(draft.write())).flags)


def headline(draft):
    return [sentence.text for sentence in judge(read(draft.write())).headline]


def test_a_leak_and_a_defense_that_stops_it(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    draft.utility[1]["pmm"] = 0.934
    first, second = headline(draft)
    assert first.startswith("Without a defense, `idlg` recovers 6 of 6 images (median 34.")
    assert "and `inverting-gradients` 6 of 6 (median 22." in first
    assert second == (
        "`gaussian-noise:std=0.1` stops both attacks, even when adapted to it; it keeps 93 % of the accuracy."
    )
    assert "`gaussian-noise:std=0.1`: only the attacks named here were tried; attackers who learn" in caveats(draft)


def test_attackers_who_learned_are_said_to_have_public_data(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
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
    add_adaptive_rows(draft, "gaussian-noise")
    draft.utility[1].update(pmm=pmm, accuracy=0.11)
    assert headline(draft)[1] == f"`gaussian-noise:std=0.1` stops the attack, even when adapted to it{words}"


def test_a_cost_that_was_not_measured_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    draft.utility.pop()
    assert headline(draft)[1].endswith("even when adapted to it; its cost in accuracy was not measured.")
    assert "the cost in accuracy of `gaussian-noise:std=0.1` is missing" in caveats(draft)


def test_a_defense_that_does_not_help(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    assert headline(draft)[1] == (
        "`top-k:keep=0.2` does not help: 4 of 4 images are recovered, not significantly fewer than without a defense."
    )


def test_a_defense_that_only_weakens(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K], victims=8)
    set_leaks(draft.rows("top-k", "idlg"), 1)
    set_leaks(draft.rows("top-k", "inverting-gradients"), 3)
    audit = read(draft.write())
    assert outcome(audit, "top-k:keep=0.2") is Outcome.WEAKENS
    assert headline(draft)[1] == ("`top-k:keep=0.2` is not enough: `inverting-gradients` still recovers 3 of 8 images.")


def test_a_difference_that_may_be_chance_is_not_called_a_weakening(make_audit):
    """Four victims fewer of eight have a probability of 1 in 16, whichever attack gets the other four."""
    draft = make_audit(defenses=[NONE, TOP_K, NOISE], victims=8)
    set_leaks(draft.rows("top-k"), 0)
    set_leaks(draft.rows("top-k", "idlg"), 4)
    set_leaks(draft.rows("gaussian-noise", "idlg"), 3)
    draft.rows("gaussian-noise", "inverting-gradients")[7]["leaked"] = True
    assert headline(draft)[1:] == [
        "`top-k:keep=0.2` and `gaussian-noise:std=0.1` do not help: 4 of 8 and 3 of 8 images are recovered, not "
        "significantly fewer than without a defense."
    ]


def test_batches_are_called_batches(make_audit):
    draft = make_audit(defenses=[NONE, TOP_K])
    draft.config["batch_size"] = 8
    first, second = headline(draft)
    assert "`idlg` recovers 4 of 4 batches of 8 images" in first
    assert "4 of 4 batches are recovered" in second


def test_without_a_working_attack_nothing_follows(make_audit):
    draft = make_audit()
    set_leaks(draft.rows(), 0)
    verdict = judge(read(draft.write()))
    assert [sentence.outcome for sentence in verdict.headline] == [Outcome.UNKNOWN, Outcome.NOT_SHOWN]
    assert "the best one recovers none of 4, and at least half are needed" in verdict.headline[1].text
    assert "`idlg` recovers none of 4 images" in verdict.headline[0].text
    assert "this audit says nothing about the defenses" in flagged(draft)
    assert "stops" not in " ".join(verdict.lines())


def test_an_attack_that_fails_undefended_proves_nothing(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    set_leaks(draft.rows(attack="inverting-gradients"), 0)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops `idlg`, even when adapted to it;")
    assert "`inverting-gradients` recovers nothing even without a defense" in flagged(draft)


def test_a_weak_attack_is_called_weak(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    set_leaks(draft.rows("none", "inverting-gradients"), 1)
    assert "`inverting-gradients` is weak here: without a defense it recovers only 1 of 4" in flagged(draft)


def test_a_leak_by_an_attack_that_fails_undefended_still_counts(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
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


def test_without_an_attacker_adapted_to_it_no_defense_stops_anything(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.NOT_SHOWN
    assert headline(draft)[1] == (
        "`gaussian-noise:std=0.1`: protection is not shown. Nothing is recovered, but that proves nothing yet. What "
        "would show it: an attack that works here and has a form adapted to this defense."
    )
    draft.config["adaptive"] = False
    assert "What would show it: an attacker who knows the defense: only plain ones were tried" in headline(draft)[1]
    draft.config["adaptive"] = None
    add_adaptive_rows(draft, "gaussian-noise")
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops both attacks, even when adapted to it; ")
    assert "adapted to the defense" not in caveats(draft)


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
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1`: protection is not shown.")
    assert headline(draft)[1].endswith("an attack that works here and has a form adapted to this defense.")


def test_a_defense_that_stops_attackers_by_wrong_labels_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    assert "inferred wrongly" not in caveats(draft)
    for row in draft.rows("gaussian-noise"):
        row["label_correct"] = 0.0
    assert "`gaussian-noise:std=0.1`: most labels were inferred wrongly" in caveats(draft)


def test_what_only_an_adaptive_attacker_recovers_is_said(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=8)
    add_adaptive_rows(draft, "gaussian-noise", leaks=3)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.WEAKENS
    (sentence,) = headline(draft)[1:]
    assert re.fullmatch(
        r"`gaussian-noise:std=0.1` is not enough: `.* \(adaptive\)` still recovers 3 of 8 images; "
        "attackers who do not know the defense recover none.",
        sentence,
    )


def test_a_defense_is_not_judged_before_the_adaptive_attackers_are_done(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    add_adaptive_rows(draft, "gaussian-noise")
    draft.results.pop()
    assert headline(draft)[-1] == "`gaussian-noise:std=0.1` is not judged yet: some attacks have not finished."
    assert "1 of 24 attack runs are missing" in caveats(draft)


def test_among_many_that_stop_those_that_met_every_attack_adapted_are_named(make_audit):
    draft = make_audit(defenses=[NONE, *(("gaussian-noise", {"std": std}, 0.9) for std in (1, 2, 3, 4))], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    assert "stop both attacks, even when adapted to them; of these" in headline(draft)[1]
    idlg, inverting = draft.config["attacks"]
    draft.results = [
        row
        for row in draft.results
        if not (row["adaptive"] and row["attack_spec"] == inverting and row["defense_params"]["std"] > 1)
    ]
    draft.config["adapted"] = [pair for pair in draft.config["adapted"] if pair[1] == idlg or pair[0].endswith("=1")]
    assert "stop both attacks (`gaussian-noise:std=1` even when adapted); of these" in headline(draft)[1]


def test_a_torn_file_is_said(make_audit):
    folder = make_audit().write()
    with (folder / "utility.jsonl").open("a") as file:
        file.write('{"defen')
    assert "The last line of `utility.jsonl` was cut short and is not counted." in judge(read(folder)).caveats


def test_many_defenses_fit_into_a_few_sentences(make_audit, many_defenses):
    draft = make_audit(defenses=many_defenses, victims=10)
    for name in ("gaussian-noise", "top-k", "dual-pruning"):
        add_adaptive_rows(draft, name)
    draft.config["adapted"] = [
        [spec, attack] for spec in draft.config["defenses"][1:] for attack in draft.config["attacks"]
    ]
    sentences = headline(draft)
    assert len(sentences) <= 6
    assert any("of the defenses stop both attacks, even when adapted to them; of these `" in text for text in sentences)


def test_four_defenses_that_stop_are_all_named_with_the_best_and_the_least(make_audit):
    draft = make_audit(defenses=[NONE, *(("gaussian-noise", {"std": std}, 0.9) for std in (1, 2, 3, 4))], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
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
    assert len(lines) == sum(map(len, (verdict.flags, verdict.headline, verdict.labels, verdict.caveats)))
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


@pytest.mark.parametrize(
    ("leaking", "victims", "expected"),
    [
        (1, 8, "a stronger attack (`--budget thorough`): without a defense the best one recovers only 1 of 8, and at"),
        (3, 8, "recovers only 3 of 8"),
        (4, 8, "more victims: at least 10 (`--victims 10`)"),
        (5, 8, None),
        (4, 4, "more victims: at least 5 (`--victims 5`)"),
        (5, 5, None),
        (9, 20, "recovers only 9 of 20"),  # more than chance, but an attack that mostly fails anyway
        (10, 20, None),
    ],
)
def test_a_defense_stops_only_what_works_well_enough_without_it(make_audit, leaking, victims, expected):
    draft = make_audit(defenses=[NONE, NOISE], victims=victims)
    add_adaptive_rows(draft, "gaussian-noise")
    for attack in ("idlg", "inverting-gradients"):
        set_leaks(draft.rows("none", attack), leaking)
    found, sentence = outcome(read(draft.write()), "gaussian-noise:std=0.1"), headline(draft)[1]
    if expected is None:
        assert found is Outcome.STOPS
        assert sentence.startswith("`gaussian-noise:std=0.1` stops both attacks")
    else:
        assert found is Outcome.NOT_SHOWN
        assert sentence.startswith("`gaussian-noise:std=0.1`: protection is not shown. Nothing is recovered, but")
        assert expected in sentence
        assert "stops" not in " ".join(headline(draft))


def test_a_score_that_does_not_fall_shows_nothing(make_audit):
    """Leaks end just below the threshold: the verdict says no, but the attacker comes as close as without it."""
    draft = make_audit(defenses=[NONE, NOISE], victims=8)
    add_adaptive_rows(draft, "gaussian-noise")
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.STOPS
    for row in draft.rows("gaussian-noise"):
        plain = next(other for other in draft.rows("none", row["attack"]) if other["victim"] == row["victim"])
        row["psnr"] = plain["psnr"] - 0.1
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.NOT_SHOWN
    assert "a clearer difference" in headline(draft)[1]


def test_an_own_network_on_which_the_attacks_hardly_work_gets_no_green_verdict(make_audit):
    """The trial that must not happen again: a CNN with batch norm and dropout, of which the attack recovers 1 of 8."""
    defenses = [NONE, NOISE, ("dual-pruning", {"k1": 0.05, "k2": 0.75}, 0.7), ("precode", {}, 0.8)]
    draft = make_audit(defenses=defenses, victims=8)
    for name, *_ in defenses[1:]:
        add_adaptive_rows(draft, name)
    draft.config |= {"model": "mine.py@build", "model_file_digest": "f" * 16, "modes": {"batch norm": "train"}}
    draft.config["adapted"] = [
        [spec, attack] for spec in draft.config["defenses"][1:] for attack in draft.config["attacks"]
    ]
    set_leaks(draft.rows(), 0)
    set_leaks(draft.rows("none", "idlg"), 1)
    audit = read(draft.write())
    verdict = judge(audit)
    outcomes = [outcome(audit, defense) for defense in audit.real_defenses]
    assert outcomes == [Outcome.NOT_SHOWN] * 3
    assert Outcome.STOPS not in [sentence.outcome for sentence in (*verdict.headline, *verdict.identification)]
    assert "without a defense the best one recovers only 1 of 8" in verdict.headline[1].text
    assert not any("stops" in line or "stop both" in line for line in verdict.lines())
    page = report.write(audit).read_text()
    assert 'class="stops"' not in page
    assert page.count('<li class="not shown">') == 1


def test_only_attacks_that_work_well_enough_are_said_to_be_stopped(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=8)
    add_adaptive_rows(draft, "gaussian-noise")
    set_leaks(draft.rows("none", "inverting-gradients"), 1)
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops `idlg`, even when adapted to it;")


def test_the_generic_adaptive_attacker_shows_nothing(make_audit):
    """Every defense can be attacked by averaging over simulated draws; nobody has adapted to this one."""
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    draft.config["generic"] = ["gaussian-noise:std=0.1"]
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.NOT_SHOWN
    assert "only the generic adaptive attacker was tried" in headline(draft)[1]


def test_an_attacker_who_learned_from_the_defense_itself_is_adapted_if_it_works_undefended(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=6)
    add_adaptive_rows(draft, "gaussian-noise")
    draft.config["generic"] = ["gaussian-noise:std=0.1"]
    draft.config["simulating"] = draft.config["attacks"][:1]
    assert headline(draft)[1].startswith("`gaussian-noise:std=0.1` stops both attacks, `idlg` even when adapted to it;")
    assert "only the generic adaptive attacker was tried" in caveats(draft)
    set_leaks(draft.rows("none", "idlg"), 2)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.NOT_SHOWN


def test_a_leak_counts_even_if_nothing_leaks_undefended(make_audit):
    draft = make_audit(defenses=[NONE, NOISE])
    set_leaks(draft.rows(), 0)
    set_leaks(draft.rows("gaussian-noise", "idlg"), 1)
    assert outcome(read(draft.write()), "gaussian-noise:std=0.1") is Outcome.FAILS


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
    add_adaptive_rows(draft, "gaussian-noise")
    assert second_verdict(draft) == []
    assert "attackers who only want to know whose data it was are not among them" in caveats(draft)


def test_of_a_batch_one_image_is_among_the_candidates(make_audit):
    draft = make_audit(defenses=[NONE], victims=6)
    draft.config["batch_size"] = 16
    draft.identify("none", 61, auc=0.9)
    assert "the client trained on, one of the 16 behind the update, in 61 % of" in second_verdict(draft)[0][0]


# -- the third verdict -------------------------------------------------------------------------------------------------


def third_verdict(draft):
    return [(sentence.text, sentence.outcome) for sentence in judge(read(draft.write())).labels]


def set_labels(rows, right):
    for index, row in enumerate(rows):
        row["label_correct"] = float(index < right)


def test_labels_that_are_read_off_are_a_leak_of_their_own(make_audit):
    draft = make_audit(defenses=[NONE, NOISE, TOP_K, ("precode", {}, 0.9)], attacks=[IDLG], victims=8)
    set_labels(draft.rows("gaussian-noise"), 1)
    set_labels(draft.rows("top-k"), 5)
    assert third_verdict(draft) == [
        (
            "Every label is read off: 8 of 8 labels inferred from the updates without a defense (chance 10 %).",
            Outcome.FAILS,
        ),
        (
            "`gaussian-noise:std=0.1`: not shown to hide labels: 1 of 8 labels inferred from the updates, no more than "
            "by chance, by a rule not made for the defense.",
            Outcome.NOT_SHOWN,
        ),
        ("`top-k:keep=0.2`: labels are read off: 5 of 8 labels inferred from the updates.", Outcome.FAILS),
        ("`precode`: every label is read off: 8 of 8 labels inferred from the updates.", Outcome.FAILS),
    ]


def test_labels_are_counted_in_batches_by_the_attacker_who_finds_most(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], victims=10)
    draft.config["batch_size"] = 4
    for row in draft.rows("gaussian-noise", "idlg"):
        row["label_correct"] = 0.5
    for row in draft.rows("gaussian-noise", "inverting-gradients"):
        row["label_correct"] = 0.25
    text, kind = third_verdict(draft)[1]
    assert "labels are read off: 20 of 40 labels inferred" in text
    assert kind is Outcome.WEAKENS


def test_a_class_that_most_have_is_read_off_by_chance(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], attacks=[IDLG], victims=8)
    draft.config["largest_class"] = 0.8
    assert third_verdict(draft)[0] == (
        "Labels: 8 of 8 labels inferred from the updates without a defense (chance 80 %).",
        Outcome.UNKNOWN,
    )
    assert third_verdict(draft)[1][1] is Outcome.NOT_SHOWN


@pytest.mark.parametrize("change", [{"labels": "known"}, {"largest_class": None}])
def test_labels_that_were_given_or_are_no_classes_are_not_judged(make_audit, change):
    draft = make_audit(defenses=[NONE, NOISE])
    draft.config |= change
    assert third_verdict(draft) == []
