"""Flower's simulation on Ray, with the telemetry of both switched off."""

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from gradveil.core.errors import InputError, MissingPackageError

TELEMETRY = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")

Work = Callable[[Any, Message, Context], Message]

logger = logging.getLogger("flwr")


def run_on_ray(job: Any, work: Work, server: ServerApp, *, clients: int, actors: int | None) -> None:
    """Run a server app with simulated clients.

    Args:
        job: what all clients need; every worker process gets it once.
        work: computes a client's reply to a message.
        server: the server app.
        clients: the number of clients.
        actors: worker processes, one CPU each; None: Flower's default, two CPUs each.
    """
    try:
        import ray
        from flwr.simulation.run_simulation import _run_simulation
        from flwr.supercore.telemetry import EventType
    except ImportError as error:
        raise MissingPackageError(
            "gradveil.flower.simulate needs the simulation of Flower 1.41: pip install 'gradveil[flower]'"
        ) from error
    if ray.is_initialized():
        raise InputError(
            "flower: Ray is running in this process, and Flower would shut it down; call ray.shutdown() first"
        )
    # Ray will do this by default in a later version, and warns until then.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with _no_telemetry():
        ray.init(num_cpus=actors, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            # Flower hands the client app to Ray with every message, so it holds a reference to the data, not the data.
            _run_simulation(
                num_supernodes=clients,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=_client_app(ray.put(job), work),
                server_app=server,
                backend_config={} if actors is None else {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
            )
        finally:
            ray.shutdown()
            logger.setLevel(level)


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """Keep Flower and Ray from reporting to their makers, in this process and in those that it starts."""
    module = importlib.import_module("flwr.simulation.run_simulation")  # a function of the same name hides it
    before, event = {name: os.environ.get(name) for name in TELEMETRY}, module.event
    os.environ.update(dict.fromkeys(TELEMETRY, "0"))
    # Flower read the environment when it was imported, and it reports from threads that may outlive this block.
    module.event = lambda *_args, **_details: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.event = event  # type: ignore[attr-defined]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_jobs: dict[str, Any] = {}  # in a worker process: the current job, by its reference


def _job(reference: Any) -> Any:
    import ray

    key = reference.hex()
    if key not in _jobs:
        _jobs.clear()
        _jobs[key] = ray.get(reference)
    return _jobs[key]


def _client_app(reference: Any, work: Work) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return work(_job(reference), message, context)

    return app
