"""Certificates for tests, made by the authority that `diptych up --tls` uses."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from rpc.authority import CA_FILE, CERT_FILE, KEY_FILE, Authority, Period, write_identity
from rpc.tls import TlsConfig

DAY = Period.of_days(1)
LOCAL = ("localhost", "127.0.0.1")
NOW = datetime.datetime.now(datetime.UTC)
EXPIRED = Period(NOW - datetime.timedelta(days=2), NOW - datetime.timedelta(seconds=1))
FUTURE = Period(NOW + datetime.timedelta(days=1), NOW + datetime.timedelta(days=2))


@dataclass
class Identities:
    """One authority and the folders of those whom it vouches for."""

    folder: Path
    authority: Authority = field(default_factory=lambda: Authority.new("test", DAY))

    def issue(self, who: str, names: tuple[str, ...] = LOCAL, period: Period = DAY) -> Path:
        """Write, or renew, the folder of `who`."""
        write_identity(self.folder / who, self.authority, self.authority.issue(names, period))
        return self.folder / who

    def config(self, who: str, *, demand: bool = False, server_name: str = "", **issued) -> TlsConfig:
        """`demand`: whoever connects must show a certificate."""
        folder = self.issue(who, **issued)
        ca = folder / CA_FILE
        return TlsConfig(
            cert=folder / CERT_FILE,
            key=folder / KEY_FILE,
            ca=ca,
            client_ca=ca if demand else None,
            server_name=server_name,
        )
