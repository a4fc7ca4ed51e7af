"""Who may come into a local cluster, and that nobody listens: API keys for users, TLS by an authority that is made for it, and
a secret that its processes prove to each other that they know, made anew at each start.

    cluster_security(…) ──▶ SecurityOptions: what each process's command line says, and how this one reaches them

With keys or TLS, workers announce themselves at a port of their own on this machine, so that users do not reach it. Between
the processes TLS is mutual; users are shown a certificate and need none; it is renewed while the cluster runs. What a cluster
that was killed has left on the disk, the next one takes away. Does not know how processes are started.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.ports import WILDCARDS, KeptPort
from contracts.clock import Clock
from contracts.errors import ConfigError
from observability.log import get_logger
from router.keys import read_key_file
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period, write_identity
from rpc.secret_file import write_new_secret
from rpc.tls import TlsConfig

log = get_logger(__name__)
_DAYS, _AUTHORITY_DAYS = 30.0, 3650.0  # the authority's key is in this process only, and ends with it
_RENEW_S, _AGAIN_S = _DAYS / 3 * 86_400, 3600.0
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PREFIX, _LOCK_FILE = "diptych-secrets-", "lock"


@dataclass(frozen=True, slots=True)
class Certificates:
    """A cluster's certificate in `folder`, by an authority that only this process has."""

    folder: Path
    authority: Authority
    names: Sequence[str]

    def write(self) -> None:
        """A new one, good for a month from now on. Raises ConfigError when it cannot be written."""
        write_identity(self.folder, self.authority, self.authority.issue(self.names, Period.of_days(_DAYS)))

    async def keep(self, clock: Clock) -> None:
        """Renew it long before it ends, until cancelled; every process takes the new one by itself."""
        pause_s = _RENEW_S
        while True:
            await clock.sleep(pause_s)
            try:
                await asyncio.to_thread(self.write)
                pause_s = _RENEW_S
            except ConfigError as error:
                pause_s = _AGAIN_S
                log.error("the certificates could not be renewed", error, again_in_s=pause_s)


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """`tls` is a folder with the cluster's certificate, its key and the authority's certificate; None is without TLS. `secret`
    is the file with the cluster's secret; None is without one. `renewed` are certificates that somebody must keep.
    """

    api_keys: Path | None = None
    protect_metrics: bool = False
    tls: Path | None = None
    log_prompts: bool = False
    secret: Path | None = None
    renewed: Certificates | None = None

    @property
    def apart(self) -> bool:
        """Whether workers announce themselves at a port of their own."""
        return self.api_keys is not None or self.tls is not None

    @property
    def scheme(self) -> str:
        """Of the router's HTTP address."""
        return "http" if self.tls is None else "https"

    @property
    def identity(self) -> TlsConfig | None:
        """As whom this process reaches the others."""
        if self.tls is None:
            return None
        return TlsConfig(cert=self.tls / CERT_FILE, key=self.tls / KEY_FILE, ca=self.tls / CA_FILE)

    def router_argv(self, workers: KeptPort | None) -> list[str]:
        """What the router's command line says of it; `workers` is the workers' own."""
        argv = self.process_argv()
        if workers is not None:
            argv += ["--worker-host", workers.host, "--worker-port", str(workers.port)]
        if self.api_keys is not None:
            argv += ["--api-keys", str(self.api_keys)]
        if self.protect_metrics:
            argv += ["--protect-metrics"]
        return argv

    def process_argv(self) -> list[str]:
        """What every process's command line says."""
        argv = ["--log-prompts"] if self.log_prompts else []
        argv += [] if self.secret is None else ["--cluster-secret-file", str(self.secret)]
        if self.tls is None:
            return argv
        cert, key, ca = (str(self.tls / name) for name in (CERT_FILE, KEY_FILE, CA_FILE))
        return [*argv, "--tls-cert", cert, "--tls-key", key, "--tls-ca", ca, "--tls-client-ca", ca]

    def lines(self) -> list[str]:
        """What a person should know of it."""
        said = [] if self.tls is None else [f"  TLS         clients know it by {self.tls / CA_FILE}"]
        return said if self.api_keys is None else [*said, f"  API keys    {self.api_keys}"]


@contextmanager
def cluster_security(
    host: str, api_keys: Path | None, *, protect_metrics: bool, tls: bool, tls_dir: Path | None
) -> Iterator[SecurityOptions]:
    """Keys and TLS of a cluster that listens on `host`; with `tls`, an authority and a certificate that live no longer than it,
    in `tls_dir` (where they stay) or a folder of this process's own. Raises ConfigError.
    """
    if protect_metrics and api_keys is None:
        raise ConfigError("--protect-metrics: needs --api-keys beside it")
    if not tls and tls_dir is not None:
        raise ConfigError("--tls-dir: needs --tls beside it")
    if api_keys is not None:
        read_key_file(api_keys)
    with _own_folder() as own:
        secret = own / "cluster-secret"
        write_new_secret(secret)
        if not tls:
            yield SecurityOptions(api_keys, protect_metrics, secret=secret)
            return
        folder = (tls_dir if tls_dir is not None else own).absolute()
        authority = Authority.new("Diptych local cluster", Period.of_days(_AUTHORITY_DAYS))
        certificates = Certificates(folder, authority, _names(host))
        certificates.write()
        yield SecurityOptions(api_keys, protect_metrics, folder, secret=secret, renewed=certificates)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """For secrets of this process, for its user's eyes only. Locked while it lives: whose lock is free, its owner was killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_left(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        own = Path(name)
        fresh = own / f".{_LOCK_FILE}"
        with fresh.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fresh.rename(own / _LOCK_FILE)  # nobody finds it before it is locked
            yield own


def _remove_left(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid():
            return
        with (folder / _LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except (BlockingIOError, FileNotFoundError):
        return  # of a cluster that runs, or that is about to begin or to end
    except OSError as error:
        log.info("what another cluster has left stays", folder=str(folder), reason=error)


def _names(host: str) -> tuple[str, ...]:
    own = () if host in WILDCARDS else (host,)
    return tuple(dict.fromkeys((*_LOCAL, socket.gethostname(), *own)))
