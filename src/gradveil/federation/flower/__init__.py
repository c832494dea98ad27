"""Defenses in Flower (flwr): a client mod, a strategy wrapper, and the local engine's training on Flower's simulation.

One line in an existing client::

    app = ClientApp(mods=[gradveil.flower.defense_mod("dual-pruning+error-feedback", lr=0.1)])

and one line on the server::

    strategy = gradveil.flower.GradveilStrategy(FedAvg(), "dual-pruning+error-feedback", lr=0.1)

**Whom the mod protects from.** The mod is part of the app, and whoever starts a run ships the app. So it protects
clients only from a server that sends the app which the client's owner has accepted: nodes must run only accepted apps,
which `gradveil.federation.supernode` enforces.

**What is sent.** The server's train message has up to two more records: ``gradveil`` (round, learning rate, defense,
and the round in which the client's update was last used) and, if a client announced locations, ``gradveil.locations``.
The reply has ``gradveil.update``, the bytes of `update.wire`, in place of the trained arrays; Flower chunks and carries
them like any array. The reply also holds ``num-examples`` and the metrics that the client lists, exactly as the app
made them: nothing protects those.

**Which arrays are defended.** All floating-point ones, except for the statistics that the client names, which are sent
as they are. Other arrays (whole numbers) must come back unchanged.
"""

from gradveil.core.errors import MissingPackageError
from gradveil.federation.faults import Fault

try:
    from gradveil.federation.flower._context import answer_once, memory
    from gradveil.federation.flower._messages import announced, reply
    from gradveil.federation.flower.mod import defense_mod
    from gradveil.federation.flower.simulation import simulate
    from gradveil.federation.flower.strategy import GradveilStrategy
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.partition(".")[0] != "flwr":
        raise
    raise MissingPackageError(
        "gradveil.flower needs Flower, which is not installed: pip install 'gradveil[flower]'"
    ) from missing

__all__ = ["Fault", "GradveilStrategy", "announced", "answer_once", "defense_mod", "memory", "reply", "simulate"]
