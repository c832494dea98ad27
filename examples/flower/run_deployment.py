"""Run the app as a real deployment on this machine: a SuperLink and three SuperNodes, with TLS and node authentication.

    python examples/flower/run_deployment.py              # train, print the results, stop everything
    python examples/flower/run_deployment.py --kill-one   # one SuperNode dies in the second round
    python examples/flower/run_deployment.py --simulation # the same app, its SuperNodes simulated on Ray

The SuperNodes run only this app: they are started with its hash (`gradveil.federation.supernode`).

Everything lives in a temporary folder and on free ports of the loopback interface, and is stopped at the end, after at
most `--minutes`. In a real deployment, make each key on the machine it belongs to, and let the SuperNodes connect from
other machines.
"""

import argparse
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gradveil.federation.supernode import app_hash

APP = Path(__file__).parent
NODES = 3
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def make_certificates(folder: Path) -> None:
    """Make a certificate authority, ``ca.pem``, and a certificate for 127.0.0.1 signed by it, ``server.pem``."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject, key, issuer, issuer_key, *extensions):
        builder = x509.CertificateBuilder(
            issuer_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
            subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=5),
            not_valid_after=now + datetime.timedelta(days=1),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    key_id = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    authority_key_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)
    may_sign = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    (folder / "ca.pem").write_bytes(
        certificate(
            "example CA",
            authority,
            "example CA",
            authority,
            (x509.BasicConstraints(True, 0), True),
            (key_id, False),
            (may_sign, True),
        )
    )
    (folder / "server.pem").write_bytes(
        certificate(
            "SuperLink",
            server,
            "example CA",
            authority,
            (x509.BasicConstraints(False, None), True),
            (names, False),
            (authority_key_id, False),
        )
    )
    pem = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(folder / "server.key", pem)


def make_node_key(folder: Path, name: str) -> Path:
    """Make a key pair with which a SuperNode proves its identity: ``name`` and ``name.pub``."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_private(folder / name, private)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


class Deployment:
    """A SuperLink and its SuperNodes; leaving the context stops them all.

    Args:
        folder: an empty folder for keys, configuration and logs.
        seconds: the time limit for everything together.
        simulation: whether the SuperLink simulates the SuperNodes; then there are none to authenticate.
    """

    def __init__(self, folder: Path, seconds: float, *, simulation: bool = False) -> None:
        self.folder, self.deadline, self.simulation = folder, time.monotonic() + seconds, simulation
        self.address = f"127.0.0.1:{free_port()}"
        self.accepted = app_hash(APP)  # a node's owner uses the hash of the file that they have read
        self.processes: dict[str, subprocess.Popen] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        make_certificates(folder)
        (folder / "config.toml").write_text(
            '[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\n'
            f'address = "{self.address}"\nroot-certificates = "{folder / "ca.pem"}"\n'
        )

    def __enter__(self) -> "Deployment":
        certificates = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.pem"}
        host, port = self.address.split(":")
        options = [f"--ssl-{name}={self.folder / file}" for name, file in certificates.items()]
        try:
            self.start(
                "superlink",
                "flower-superlink",
                f"--host={host}",
                f"--port={port}",
                "--simulation" if self.simulation else "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
                *options,
            )
            while not _is_listening(self.address):
                self.check("superlink", "to listen")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self, name: str, *command: str) -> subprocess.Popen:
        """Start a process that writes to ``name.log``."""
        with open(self.log(name), "w") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,  # so that its child processes can be stopped with it
            )
        return self.processes[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def check(self, name: str, what: str) -> None:
        """Wait a little for `what`; raise if the process has ended or time is up."""
        ended = self.processes[name].poll() is not None
        if ended or self.left() < 0:
            tail = self.log(name).read_text()[-2000:]
            raise RuntimeError(f"expected {name} {what}, but {'it ended' if ended else 'time is up'}:\n{tail}")
        time.sleep(0.2)

    def flwr(self, *arguments: str) -> str:
        finished = subprocess.run(
            [BIN / "flwr", *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            timeout=max(1.0, self.left()),
        )
        if finished.returncode:
            raise RuntimeError(f"flwr {arguments[0]} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
        return finished.stdout

    def register(self, key: Path) -> int:
        """Register a SuperNode's public key with the SuperLink, and return the id of the node."""
        return int(json.loads(self.flwr("supernode", "register", f"{key}.pub", "--format", "json"))["node-id"])

    def start_node(self, name: str, key: Path | None, partition: int) -> subprocess.Popen:
        return self.start(
            name,
            sys.executable,
            "-m",
            "gradveil.federation.supernode",
            f"--accept={self.accepted}",
            f"--superlink={self.address}",
            f"--root-certificates={self.folder / 'ca.pem'}",
            f"--port={free_port()}",
            f"--node-config=partition-id={partition} num-partitions={NODES}",
            "--max-wait-time=60",
            *([] if key is None else [f"--auth-supernode-private-key={key}"]),
        )

    def kill(self, name: str) -> None:
        """Kill a process and its children without warning."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def run(self, *config: str, app: Path = APP) -> "Run":
        return Run(self, *config, app=app)

    def stop(self) -> None:
        """Terminate all processes, the SuperLink last; what is still running ten seconds later is killed."""
        running = [process for process in reversed(self.processes.values()) if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + 10
        for process in running:
            # Not `wait`, which would free the process id, and with it the group of its children.
            while not _has_ended(process) and time.monotonic() < deadline:
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _has_ended(process: subprocess.Popen) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Run:
    """A training run, started with ``flwr run``; iterating over it yields the lines of its log as they appear."""

    def __init__(self, deployment: Deployment, *config: str, app: Path = APP) -> None:
        self.lines: list[str] = []
        command = ["flwr", "run", str(app), "deployment", "--stream"]
        if deployment.simulation:
            command.append(f"--federation-config=num-supernodes={NODES}")
        self.deployment = deployment
        self.process = deployment.start("run", *command, *(f"--run-config={item}" for item in config))

    def __iter__(self):
        with open(self.deployment.log("run")) as log:
            partial = ""
            while True:
                partial += log.readline()
                if partial.endswith("\n"):
                    line, partial = re.sub(r"\x1b\[\d*m", "", partial).rstrip(), ""
                    self.lines.append(line)
                    yield line
                elif self.process.poll() is not None and not partial:
                    return
                elif self.deployment.left() < 0:
                    raise RuntimeError("expected the training to end, but time is up:\n" + "\n".join(self.lines[-30:]))
                else:
                    time.sleep(0.2)


def _is_listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kill-one", action="store_true", help="kill a SuperNode in the second round")
    parser.add_argument("--simulation", action="store_true", help="simulate the SuperNodes on Ray")
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    if options.kill_one and options.simulation:
        parser.error("there is no SuperNode to kill in a simulation")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Deployment(Path(folder), 60 * options.minutes, simulation=options.simulation) as deployment,
    ):
        for index in range(0 if options.simulation else NODES):
            name = f"node{index}"
            key = make_node_key(Path(folder), name)
            print(f"{name} is {deployment.register(key)}")
            deployment.start_node(name, key, index)
        for line in deployment.run(f"rounds={options.rounds}", f"nodes={NODES}", "round-timeout=90.0"):
            print(line)
            if options.kill_one and "[ROUND 2/" in line:
                deployment.kill(name)
                print(f"killed {name}")


if __name__ == "__main__":
    main()
