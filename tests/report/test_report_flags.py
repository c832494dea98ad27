"""Every flag is raised by an audit that deserves it, and not by others."""

from pathlib import Path

import pytest

from gradveil.report.flags import FLAGS, documentation, raised
from gradveil.report.read import read

NONE = ("none", {}, 0.0)
NOISE = ("gaussian-noise", {"std": 0.1}, 0.9)
TOP_K = ("top-k", {"keep": 0.2}, 0.05)
IDLG = ("idlg", {"iterations": 100, "restarts": 3}, 0.02)


@pytest.fixture
def good(make_audit):
    """An audit with every figure that a flag looks at and no problem: plain and adaptive attackers, eight victims."""
    draft = make_audit(defenses=[NONE, NOISE, TOP_K], attacks=[IDLG], victims=8)
    blind = {row["victim"]: row for row in draft.results if row["attack"] == "blind-guess"}
    for row in blind.values():
        row["psnr"] = 2.0  # below all attackers
    for row in draft.rows():
        row["power"] = 0.0 if row["defense"] == "none" else 0.4
        row["lpips"] = (0.3 if row["leaked"] else 0.9) * blind[row["victim"]]["lpips"]
        row.update(loss=0.1, loss_late=0.104, loss_start=5.0, loss_restarts=[0.1, 0.2, 0.12])
    draft.results += [
        {**row, "adaptive": True, "psnr": row["psnr"] + 1} for row in draft.rows() if row["defense"] != "none"
    ]
    draft.config["adapted"] = [[spec, draft.config["attacks"][0]] for spec in draft.config["defenses"][1:]]
    return draft


def names(draft):
    return [found.flag.name for found in raised(read(draft.write()))]


def text_of(draft, name):
    (found,) = [found.text for found in raised(read(draft.write())) if found.flag.name == name]
    return found


def test_a_good_evaluation_raises_none(good):
    assert names(good) == []


def test_plain_attackers_alone_raise_none(good):
    good.results = [row for row in good.results if not row["adaptive"]]
    good.config.update(adapted=[], adaptive=False)
    assert names(good) == []


def test_attacks_that_tell_nothing_of_their_search_raise_none(good):
    """A closed form has no losses, and a defense that changes the model has no power."""
    for row in good.results:
        row.update(dict.fromkeys(("power", "loss_late", "loss_start", "loss_restarts")))
    good.results = [row for row in good.results if not row["adaptive"]]
    good.config.update(adapted=[], adaptive=False)
    assert names(good) == []


def test_an_audit_that_only_began_raises_none(good):
    good.results.clear()
    good.utility.clear()
    assert names(good) == []


# -- attack-fails-undefended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaks", "words"),
    [(0, "No attack recovers undefended data here"), (3, "without a defense it recovers only 3 of 8")],
)
def test_an_attack_that_fails_undefended(good, leaks, words):
    for row in good.rows("none"):
        row.update(leaked=row["victim"] < leaks, lpips=0.0 if row["victim"] < leaks else 0.9)
    assert names(good) == ["attack-fails-undefended"]
    assert words in text_of(good, "attack-fails-undefended")


def test_no_undefended_run_at_all(good):
    good.results = [row for row in good.results if row["defense"] != "none"]
    assert "attack-fails-undefended" in names(good)


# -- not-converged ---------------------------------------------------------------------------------------------------


def test_a_loss_that_was_still_falling(good):
    for row in good.rows("gaussian-noise")[6:10]:  # two victims of the plain attacker and two of the adaptive one
        row["loss_late"] = 0.12
    assert names(good) == ["not-converged"]
    # The verdict rests on the adaptive attacker, who is the stronger one here.
    assert text_of(good, "not-converged").endswith(": `idlg (adaptive)` under `gaussian-noise:std=0.1`.")


def test_a_loss_that_reached_zero_had_converged(good):
    """A thousandfold decrease in the last tenth is still a negligible part of the total."""
    for row in good.rows("gaussian-noise"):
        row.update(loss=1e-9, loss_late=1e-6, loss_restarts=[1e-9, 1e-6, 1e-8])
    assert names(good) == []


def test_a_slow_search_that_recovers_the_image_is_no_failure(good):
    for row in good.rows("none"):
        assert row["leaked"]
        row.update(loss_late=0.5, loss_restarts=[0.1, 2.0, 3.0])
    assert names(good) == []


def test_one_slow_victim_or_the_weaker_attacker_raises_nothing(good):
    rows = good.rows("gaussian-noise")
    for row in (rows[8], *(row for row in rows if not row["adaptive"])):
        row["loss_late"] = 0.5
    assert names(good) == []


# -- attackers who learn ---------------------------------------------------------------------------------------------


def test_a_learned_attack_that_does_no_better_than_the_blind_guess(good):
    good.config["learned"] = good.config["attacks"]
    assert names(good) == []
    for row in good.results:
        if row["attack"] == "blind-guess":
            row["psnr"] = 60.0 if row["victim"] < 4 else 2.0
    assert "learned-nothing" in names(good)
    assert "Without a defense `idlg` is not shown to do better" in text_of(good, "learned-nothing")
    good.config["learned"] = []
    assert "learned-nothing" not in names(good)


def test_victims_among_the_public_data(good):
    good.config["public_overlap"] = 3
    assert names(good) == []  # nothing learned from it
    good.config["learned"] = good.config["attacks"]
    assert names(good) == ["victims-are-public"]
    assert "3 of the 8 victim images are also among the 4,000 public ones" in text_of(good, "victims-are-public")


# -- restarts-disagree -----------------------------------------------------------------------------------------------


def test_updates_that_give_inputs_away(good):
    good.config["disclosed"] = ["Its zeros tell the words."]
    assert names(good) == ["updates-disclose"]
    assert text_of(good, "updates-disclose") == "Its zeros tell the words."


def test_restarts_that_end_at_different_losses(good):
    for row in good.rows("gaussian-noise"):
        row["loss_restarts"] = [0.1, 0.2, 0.3]
    assert names(good) == ["restarts-disagree"]
    assert "`gaussian-noise:std=0.1`" in text_of(good, "restarts-disagree")


def test_one_bad_restart_of_three_raises_nothing(good):
    for row in good.rows("gaussian-noise"):
        row["loss_restarts"] = [0.1, 0.11, 4.0]
    assert names(good) == []


def test_a_single_start_cannot_disagree(good):
    for row in good.rows():
        row["loss_restarts"] = [row["loss"]]
    assert names(good) == []


# -- stronger-does-worse ---------------------------------------------------------------------------------------------


def test_an_adaptive_attacker_that_does_worse(good):
    for row in good.rows("top-k"):
        row["psnr"] -= 4 * row["adaptive"] + 0.1 * row["victim"] * row["adaptive"]
    assert names(good) == ["stronger-does-worse"]
    assert "Against `top-k:keep=0.2`, `idlg (adaptive)` is 3." in text_of(good, "stronger-does-worse")


def test_worse_by_chance_or_by_a_hair_raises_nothing(good):
    for row in good.rows("top-k"):
        row["psnr"] -= row["adaptive"] * (1 + 6 * (-1) ** row["victim"])  # some far up, some far down
    for row in good.rows("gaussian-noise"):
        row["psnr"] -= 1.2 * row["adaptive"]
    assert names(good) == []


def test_an_attack_that_does_better_under_a_defense_than_without(good):
    for row in good.rows("top-k"):
        row["psnr"] += 20
    assert names(good) == ["stronger-does-worse"]
    assert "`idlg` recovers more under `top-k:keep=0.2` than without a defense" in text_of(good, "stronger-does-worse")


# -- defense-changed-nothing -----------------------------------------------------------------------------------------


def test_a_defense_that_changes_nothing(good):
    for row in good.rows("top-k"):
        row["power"] = 1e-14
    assert names(good) == ["defense-changed-nothing"]
    assert text_of(good, "defense-changed-nothing") == "`top-k:keep=0.2` left the updates unchanged."


def test_a_defense_that_acts_on_some_victims_or_changes_the_model_raises_nothing(good):
    for row in good.rows("top-k"):
        row["power"] = 0.4 * (row["victim"] == 3)
    for row in good.rows("gaussian-noise"):
        row["power"] = None
    assert names(good) == []


# -- metrics-disagree ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "share"),
    [("none", 1.1), ("gaussian-noise", 0.4)],  # leaked but far, not leaked but near
)
def test_metrics_that_disagree(good, defense, share):
    blind = {row["victim"]: row for row in good.results if row["attack"] == "blind-guess"}
    for row in good.rows(defense)[:2]:
        row["lpips"] = share * blind[row["victim"]]["lpips"]
    assert names(good) == ["metrics-disagree"]


def test_one_victim_of_eight_or_no_lpips_raises_nothing(good):
    good.rows("gaussian-noise")[0]["lpips"] = 0.0
    assert names(good) == []
    for row in good.results:
        row["lpips"] = None
    assert names(good) == []


# -- few-victims -----------------------------------------------------------------------------------------------------


def test_too_few_victims(make_audit):
    draft = make_audit(defenses=[NONE, NOISE], attacks=[IDLG], victims=5)
    assert "few-victims" in names(draft)
    assert "Even if none of 5 is recovered, the true share may be as high as 45 %" in text_of(draft, "few-victims")


def test_victims_that_are_not_finished_do_not_count(good):
    good.results = [row for row in good.results if row["defense"] != "top-k" or row["victim"] < 3]
    assert names(good) == ["few-victims"]


# -- few-games -------------------------------------------------------------------------------------------------------


def test_too_few_games(good):
    good.identify("none", 30, 30, auc=1.0)
    for defense in good.config["defenses"][1:]:
        good.identify(defense.partition(":")[0], 0, 30)
    assert names(good) == ["few-games"]
    assert "the true share may be as high as 10 % (at 95 % confidence)" in text_of(good, "few-games")


# -- training-too-short ----------------------------------------------------------------------------------------------


def test_a_model_near_chance(good):
    for row in good.utility:
        row.update(pmm=None, baseline_accuracy=0.12)
    assert names(good) == ["training-too-short"]
    assert "near chance (12 % accuracy)" in text_of(good, "training-too-short")
    assert "train longer" in text_of(good, "training-too-short")
    good.utility[0]["diverged"] = 33
    assert "diverged in round 33; train with a lower rate" in text_of(good, "training-too-short")


def test_a_model_that_was_still_learning(good):
    good.utility[1]["history"] = [0.1 * step for step in range(10)]
    assert names(good) == ["training-too-short"]
    assert "`gaussian-noise:std=0.1` were still learning: they gained up to 20.0 points" in text_of(
        good, "training-too-short"
    )


def test_a_flat_curve_that_jumps_was_not_still_learning(good):
    good.utility[1]["history"] = [0.5, 0.8, 0.9, 0.92, 0.93, 0.92, 0.935, 0.921, 0.93, 0.944]
    assert names(good) == []


def test_a_few_evaluations_or_none_tell_nothing(good):
    good.utility[1]["history"] = [0.1, 0.9]
    good.utility[2]["history"] = []
    assert names(good) == []


# -- the documentation -----------------------------------------------------------------------------------------------


def test_the_documentation_is_the_page_in_docs():
    page = Path(__file__).parents[2] / "docs" / "flags.md"
    assert page.read_text() == documentation(), "write it again: documentation() > docs/flags.md"
    for flag in FLAGS:
        assert f"\n## {flag.name}\n" in page.read_text()
        assert f"(#{flag.name})" in page.read_text()


def test_an_adaptive_attacker_below_the_blind_guess_is_flagged(make_audit):
    draft = make_audit(defenses=[("none", {}, 0.0), ("gaussian-noise", {"std": 0.1}, 0.9)], victims=8)
    for row in draft.rows("gaussian-noise"):
        draft.results.append({**row, "adaptive": True})
    draft.config["adapted"] = [[draft.config["defenses"][1], attack] for attack in draft.config["attacks"]]
    blind = [row for row in draft.results if row["attack"] == "blind-guess"]
    for row in blind:
        row["psnr"] = 40.0
    assert "adaptive-below-blind" in {found.flag.name for found in raised(read(draft.write()))}
    for row in blind:
        row["psnr"] = 1.0
    assert "adaptive-below-blind" not in {found.flag.name for found in raised(read(draft.write()))}
