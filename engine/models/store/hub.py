"""Models of the Hugging Face hub, through huggingface_hub: its cache, its resume, its tokens and endpoint settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from contracts.errors import ModelLoadError

# What serving reads. Weights in other formats (PyTorch pickles, GGUF, ONNX) stay where they are.
ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


def fetch_from_hub(repo_id: str, cache_dir: Path | None, progress: Callable[[str], None]) -> Path:
    """The local snapshot of `repo_id`, downloaded as far as it is missing. ModelLoadError says why it cannot be had.

    `cache_dir` None is the hub's own cache, so that a model another tool has fetched is not fetched again.
    """
    progress(f"asking the Hugging Face hub for {repo_id}")
    try:
        folder = snapshot_download(repo_id, allow_patterns=list(ALLOW_PATTERNS), cache_dir=cache_dir)
    except GatedRepoError as error:
        raise ModelLoadError(f"{repo_id}: the hub wants its terms accepted, or a token in HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{repo_id}: the hub knows no such model, or it is private") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{repo_id}: the hub cannot be reached and the model is not in the cache: {_reason(error)}"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"{repo_id}: not a hub id: {_reason(error)}") from error
    except Exception as error:  # the client's transport library, and with it its errors, differs between versions
        raise ModelLoadError(f"{repo_id}: the download failed: {type(error).__name__}: {_reason(error)}") from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """The first line of what the client says; the rest is advice for its own callers."""
    return (str(error).splitlines() or ["no reason given"])[0].removeprefix("Got: ")
