"""The control plane starts without torch, and our package names resolve to our files."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from tree import PACKAGES, ROOT, sources

TORCH_FREE = (
    "router",
    "contracts",
    "dashboard",
    "diptych_client",
    "observability",
    "rpc",
    "registry",
    "worker",
    "kv_transfer",
    "cli",
    "bench",
    "offline",
    "engine/scheduling",
    "engine/kv",
)


# A program of its own that only bench/gpu.sh starts: it measures torch and Triton on a device.
WITH_TORCH = ROOT / "bench" / "gpu"


def modules(folder: str) -> list[str]:
    ours = [p for p in sources() if p.is_relative_to(ROOT / folder) and not p.is_relative_to(WITH_TORCH)]
    found = [p.relative_to(ROOT) for p in ours]
    names = [".".join(p.with_suffix("").parts) for p in found]
    return sorted(n.removesuffix(".__init__") for n in names if not n.endswith("__main__"))


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_importing_it_loads_no_torch(folder):
    imports = f"for m in {json.dumps(modules(folder))}: importlib.import_module(m)"
    code = f"import sys, importlib\n{imports}\nprint('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("package", PACKAGES)
def test_our_packages_resolve_inside_the_repo(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.startswith(str(ROOT))


def test_the_distribution_named_kernels_is_not_installed():
    with pytest.raises(PackageNotFoundError):
        distribution("kernels")


def test_kernels_package_is_a_bare_docstring():
    text = (ROOT / "kernels" / "__init__.py").read_text()
    assert "import" not in text.split('"""')[-1]
    assert "__version__" not in text


def test_proto_folder_would_not_shadow_a_package():
    assert not (ROOT / "proto" / "__init__.py").exists()
