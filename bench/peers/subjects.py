"""Who takes part: each engine, by which Python it runs, and in which precisions it is asked; and who is not installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.peers.forms import ROOT, Forms
from bench.progress import Say

PRECISIONS = ("bf16", "int8", "int4")
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
OURS = "diptych"
# What every engine's process has: nothing fetched; vLLM's engine in its own process, on the cores that all have.
SETTINGS = (
    "HF_HUB_OFFLINE=1",
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=ERROR",
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One of the table below; `package` is what must be installed in the environment of `python`."""

    name: str
    module: str
    python: Path
    package: str
    precisions: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether its environment has it."""
        return self.package == "" or any(self.python.parents[1].glob(f"lib/python3*/site-packages/{self.package}"))


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine with a model in one precision: a process to start."""

    engine: str
    precision: str
    command: tuple[str, ...]

    @property
    def label(self) -> str:
        """How the report calls it."""
        return f"{self.engine} {self.precision}"


ENGINES = (
    Engine(OURS, "bench.peers.of_ours", Path(sys.executable), "", PRECISIONS),
    Engine("OpenVINO GenAI", "bench.peers.of_openvino", PEERS_PYTHON, "openvino_genai", PRECISIONS),
    Engine("vLLM", "bench.peers.of_vllm", VLLM_PYTHON, "vllm", ("bf16",)),
    Engine("llama.cpp", "bench.peers.of_llamacpp", PEERS_PYTHON, "llama_cpp", PRECISIONS),
    Engine("transformers", "bench.peers.of_transformers", Path(sys.executable), "transformers", ("bf16",)),
)


def missing() -> list[str]:
    """Names of engines whose environment does not have them."""
    return [engine.name for engine in ENGINES if not engine.installed]


def subjects(folder: Path, forms: Forms, threads: int, say: Say) -> list[Subject]:
    """All that can be started on the checkpoint in `folder`, their forms made."""
    found = []
    for engine in ENGINES:
        if not engine.installed:
            continue
        for precision in engine.precisions:
            model = folder
            if engine.name == "llama.cpp":
                model = forms.gguf(precision, say)
            elif engine.name == "OpenVINO GenAI":
                model = forms.openvino(precision, say)
            words = (
                "env",
                f"OMP_NUM_THREADS={threads}",
                *SETTINGS,
                str(engine.python),
                "-m",
                engine.module,
                str(model),
                str(threads),
            )
            found.append(Subject(engine.name, precision, (*words, *((precision,) if engine.name == OURS else ()))))
    return found
