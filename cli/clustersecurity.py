"""Who may come into a local cluster, and that nobody listens: API keys for users, TLS by an authority that is made for it, and
a secret that its processes prove to each other that they know, made anew at each start.

    cluster_security(…) ──▶ SecurityOptions: what each process's command line says, and how this one reaches them

With keys or TLS, workers announce themselves at a port of their own on this machine, so that users do not reach it. Between
the processes TLS is mutual; users are shown a certificate and need none. Does not know how processes are started.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.ports import WILDCARDS, KeptPort
from contracts.errors import ConfigError
from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period, write_identity
from rpc.secret_file import write_new_secret
from rpc.tls import TlsConfig

_DAYS = 30.0
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class SecurityOptions:
    """`tls` is a folder with the cluster's certificate, its key and the authority's certificate; None is without TLS. `secret`
    is the file with the cluster's secret; None is without one.
    """

    api_keys: Path | None = None
    protect_metrics: bool = False
    tls: Path | None = None
    log_prompts: bool = False
    secret: Path | None = None

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
    with tempfile.TemporaryDirectory(prefix="diptych-secrets-") as own:
        secret = Path(own) / "cluster-secret"
        write_new_secret(secret)
        if not tls:
            yield SecurityOptions(api_keys, protect_metrics, secret=secret)
            return
        folder = (tls_dir if tls_dir is not None else Path(own)).absolute()
        period = Period.of_days(_DAYS)
        authority = Authority.new("Diptych local cluster", period)
        write_identity(folder, authority, authority.issue(_names(host), period))
        yield SecurityOptions(api_keys, protect_metrics, folder, secret=secret)


def _names(host: str) -> tuple[str, ...]:
    own = () if host in WILDCARDS else (host,)
    return tuple(dict.fromkeys((*_LOCAL, socket.gethostname(), *own)))
