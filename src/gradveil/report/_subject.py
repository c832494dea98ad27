"""What an audit attacked, in words, and what it did not test; all of it from its config."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

from gradveil.audit.store import CONFIG, RESULTS
from gradveil.report._text import join, names, percent, plural
from gradveil.report.read import Audit

MODES = {
    ("batch norm", "train"): "batch norm in train mode (statistics of the batch)",
    ("batch norm", "inference"): "batch norm in inference mode (running statistics)",
    ("dropout", "train"): "active dropout",
    ("dropout", "inference"): "dropout that is switched off",
}


def attacked(audit: Audit) -> list[str]:
    """What was attacked, when, and what the attacker had, as sentences."""
    config, unit = audit.config, audit.modality.unit
    weights = f"the weights in `{config['weights']}`" if config["weights"] else "its initial, untrained weights"
    if config["stage"]:
        weights += f", after {percent(config['stage'])} of an undefended training of {config['rounds']} rounds"
    accuracy = config["weights_accuracy"]
    known = (
        f", with which it classifies {percent(accuracy)} of the test {unit}s correctly" if accuracy is not None else ""
    )
    modes = [MODES.get(mode, f"{mode[0]} in some modules active, in others not") for mode in config["modes"].items()]
    layers = f" It has {join(modes)}." if modes else " It has neither batch norm nor dropout."
    return [
        f"The network `{config['model']}` with {config['parameters']:,} parameters and {weights}{known}.{layers}",
        f"{plural(audit.victims, 'victim')} from the test split of `{config['dataset']}`, {_behind(audit)}.",
        f"The attacker {_seen(audit)}, knows the model, and {_labels(audit)}. {_public(audit)}",
        *_choices(audit),
        _when(audit),
    ]


def _behind(audit: Audit) -> str:
    config, unit = audit.config, audit.modality.unit
    size = plural(config["batch_size"], unit)
    groups = f"{config['aggregated']} clients with {size} each" if config["aggregated"] > 1 else f"{size} behind each"
    if config["local_epochs"] is None:
        return f"{groups}; each client shares a single gradient"
    batch = "all examples" if config["local_batch"] is None else plural(config["local_batch"], "example")
    passes = plural(config["local_epochs"], "local pass")
    return (
        f"{groups}; each client shares its change after {passes} in steps on {batch} with learning rate "
        f"{config['local_lr']:g}"
    )


def _seen(audit: Audit) -> str:
    rounds = audit.config["observed_rounds"]
    return "sees one round of each victim" if rounds == 1 else f"sees {rounds} rounds of each victim on the same data"


def _labels(audit: Audit) -> str:
    return "is given the labels" if audit.config["labels"] == "known" else "must find the labels itself"


def _public(audit: Audit) -> str:
    if not audit.learned:
        return "No attack learned from public data."
    learners = names([name.partition(":")[0] for name in audit.learned])
    return f"{learners} learned from {audit.config['public_examples']:,} public {audit.modality.unit}s."


def _choices(audit: Audit) -> Iterator[str]:
    """What attacks that choose among others attacked with, by the victims that they chose it for."""
    chosen: dict[str, dict[str, Counter[str]]] = {}
    for row in audit.attempts:
        if row.found_by is not None:
            where = "undefended" if row.defense_spec == "none" else f"under {row.defense}"
            setting = f"{where}, adaptive" if row.adaptive else where
            by = chosen.setdefault(row.attack, {}).setdefault(setting, Counter())
            by[row.found_by.partition(":")[0]] += 1
    for attack, settings in chosen.items():
        words = [f"{_counted(by)} {setting}" for setting, by in settings.items()]
        yield f"`{attack}` chose among its portfolio by how each did on clients of its own: {'; '.join(words)}."


def _counted(by: Counter[str]) -> str:
    shares = [f"`{name}`" + f" ({count} of {by.total()})" * (len(by) > 1) for name, count in by.most_common()]
    return join(shares)


def _when(audit: Audit) -> str:
    """The times of the folder's files: config.json is written first, and a row whenever one is finished."""
    paths = [path for name in (CONFIG, RESULTS) if (path := audit.folder / name).is_file()]
    times = [datetime.fromtimestamp(path.stat().st_mtime, UTC) for path in paths]
    first, last = (f"{time:%Y-%m-%d %H:%M}" for time in (min(times), max(times)))
    when = first if first == last else f"{first} to {last}"
    return f"Run with gradveil {audit.config['gradveil']}, {when} UTC by the times of the folder's files."


def untested(audit: Audit) -> list[str]:
    """What the audit did not test, so what its verdicts say nothing about."""
    return list(_untested(audit))


def _untested(audit: Audit) -> Iterator[str]:
    config, unit = audit.config, audit.modality.unit
    if config["weights"] is None and not config["stage"]:
        yield "trained weights: gradients shrink as a model learns, and attacks change with them (`--weights`)"
    else:
        yield "other stages of training: these weights stand for one moment of it"
    if audit.modality.withheld and not config["disclosed"]:
        yield audit.modality.withheld
    if config["batch_size"] == 1:
        yield f"batches: there is one {unit} behind each update, the easiest case for an attacker (`--batch-size`)"
    else:
        yield f"smaller and larger batches than {config['batch_size']} (`--batch-size`)"
    if config["local_epochs"] is None:
        yield "local steps: clients share a single gradient (`--local-epochs`)"
    else:
        yield "other local steps, and attackers who do not know the clients' steps"
    if config["observed_rounds"] == 1:
        yield "a client seen in several rounds (`--observed-rounds`)"
    if not any(row.server == "active" for row in audit.attempts):
        yield "a server that changes the model to read more (`--attack robbing-the-fed`, `loki`, where they apply)"
    if not audit.learned:
        yield f"attackers who learn from public {unit}s (`--attack lti`)"
    if not audit.identified:
        yield f"whose {unit} it was (`--games`)"
    if config["labels"] == "infer":
        yield "attackers who know the labels (`--labels known`)"
    else:
        yield "whether labels leak: the attackers were given them (`--labels infer`)"
    if config["adaptive"] is False:
        yield "attackers who know the defense (leave out `--plain`)"
    if config["aggregated"] == 1:
        yield "several clients behind what the server sees (`--aggregated`)"
    yield f"other networks, other data and other seeds; anything but {unit}s"
    yield "clients or servers that deviate in other ways; leaks outside the update (timing, metadata, the final model)"
