"""Defenses in Flower (flwr): a client mod, a strategy wrapper, and the local engine's training on Flower's simulation.

On a client that exists already, one line::

    app = ClientApp(mods=[gradveil.flower.defense_mod("dual-pruning+error-feedback", lr=0.1)])

and on the server one line::

    strategy = gradveil.flower.GradveilStrategy(FedAvg(), "dual-pruning+error-feedback", lr=0.1)

**Whom the mod protects from.** The mod is part of the app, and whoever starts a run ships the app. It protects from a
server that keeps to the app which the client's owner has accepted: nodes must run accepted apps only, which
`gradveil.federation.supernode` sees to.

**What travels.** The server's train message has two records more: ``gradveil`` (round, learning rate, defense) and,
where a client announced locations, ``gradveil.locations``. The reply has ``gradveil.update``, the bytes of
`update.wire`, in the place of the trained arrays; Flower chunks and carries them like any array. Beside it leave
``num-examples`` and those metrics that the client lists, as the app made them: nothing protects those.

**Which arrays are defended.** All floating-point ones, but for the statistics that the client names; those travel as
they are. Other arrays (whole numbers) must come back as they went.
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
