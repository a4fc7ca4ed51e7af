"""Generates contracts/pb from proto/, or with --check says whether what is committed is what would be generated.

Runs in its own environment (tools/requirements-proto.txt), because the code generator pins an older protobuf than the
runtime. Proto files import each other as diptych/v1/…; the Python package is contracts.pb.diptych.v1, so the generated
import lines are rewritten once here. Also runs `buf lint`.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "contracts" / "pb"
BIN = Path(sys.executable).parent


def generate(into: Path) -> None:
    """Write the generated package below `into`, with imports that name it by its full path."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}"]
    command += [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    subprocess.run([*command, *map(str, protos)], check=True)
    for path in [*into.rglob("*.py"), *into.rglob("*.pyi")]:
        text = re.sub(r"^(from|import) diptych\.v1\b", r"\1 contracts.pb.diptych.v1", path.read_text(), flags=re.M)
        path.write_text(text.replace("diptych.v1.", "contracts.pb.diptych.v1.") if path.suffix == ".pyi" else text)
    for path in into.rglob("*.pyi"):
        path.write_text(path.read_text().replace("contracts.pb.contracts.pb.", "contracts.pb."))
    for package in (into, into / "diptych", into / "diptych" / "v1"):
        (package / "__init__.py").write_text('"""Generated from proto/ by tools/gen_proto.py; not edited by hand."""\n')


def differences(fresh: Path) -> list[str]:
    """Names of generated files that differ from, or are missing in, the committed package."""
    names = {p.relative_to(fresh) for p in fresh.rglob("*.py*") if p.is_file()}
    names |= {p.relative_to(TARGET) for p in TARGET.rglob("*.py*") if p.suffix in (".py", ".pyi")}
    return sorted(
        str(n)
        for n in names
        if not (fresh / n).exists()
        or not (TARGET / n).exists()
        or not filecmp.cmp(fresh / n, TARGET / n, shallow=False)
    )


def main() -> int:
    """Generate, or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if contracts/pb is out of date")
    check = parser.parse_args().check
    subprocess.run([str(BIN / "buf"), "lint"], check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            stale = differences(fresh)
            print("contracts/pb is up to date" if not stale else f"out of date, run `make proto`: {', '.join(stale)}")
            return 1 if stale else 0
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
