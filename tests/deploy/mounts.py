"""What pods find in /etc/diptych, as files of a folder."""

import secrets
from pathlib import Path

from rpc.authority import Authority, Period

PASSWORD = "hush-hush"
KEYS = "keys/keys.json"


def write_mounts(folder: Path) -> Path:
    """Every secret that the chart may name; returns the folder. One authority has made all certificates."""
    period = Period.of_days(1)
    authority = Authority.new("test", period)
    issued = authority.issue(["diptych.internal"], period)
    for name in ("tls", "user-tls", "redis-ca"):
        (folder / name).mkdir()
        (folder / name / "tls.crt").write_bytes(issued.cert)
        (folder / name / "tls.key").write_bytes(issued.key)
        (folder / name / "ca.crt").write_bytes(authority.pem)
    for name, text in {
        "cluster/secret": secrets.token_hex(32),
        "redis/password": PASSWORD,
        KEYS: '{"keys": []}',
    }.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
        (folder / name).chmod(0o440)
    return folder
