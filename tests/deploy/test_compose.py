"""compose.yaml and the Dockerfile as files: what `make test-compose` shows on a real engine, kept here for what a file can say."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from cli.main import ROOT as COMMANDS

ROOT = Path(__file__).resolve().parents[2]
COMPOSE, GPU = ((ROOT / name).read_text() for name in ("compose.yaml", "compose.gpu.yaml"))
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
ONCE = ("secrets", "model")
OURS = (*ONCE, "router", "prefill", "decode")


def filled(text: str, **settings: str) -> dict:
    """As Compose reads it: settings, else defaults; $$ is a $."""
    text = VARIABLE.sub(lambda found: settings.get(found[1], found[2] or ""), text.replace("$$", "\0"))
    return yaml.safe_load(text.replace("\0", "$"))


FILE = filled(COMPOSE)
SERVICES = FILE["services"]
every = pytest.mark.parametrize("name", SERVICES)


def command(name: str, file: dict = FILE) -> list[str]:
    given = file["services"][name]["command"]
    return shlex.split(given) if isinstance(given, str) else given


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_what_there_is():
    assert set(SERVICES) == {*OURS, "redis", "prometheus", "grafana"}


@every
def test_a_container_may_as_little_as_it_can(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert not {"privileged", "pid", "ipc", "container_name"} & service.keys()  # a fixed name cannot be scaled
    assert {"cpus", "memory", "pids"} == service["deploy"]["resources"]["limits"].keys()
    assert [place.split(":")[0] for place in service["tmpfs"]] == ["/tmp"]


@every
def test_a_service_says_when_it_is_well_and_comes_back(name):
    service = SERVICES[name]
    if name in ONCE:
        assert service["restart"] == "no" and "healthcheck" not in service
    else:
        assert service["restart"] == "unless-stopped"
        assert {"test", "interval", "timeout", "retries", "start_period"} == service["healthcheck"].keys()


@every
def test_ports_are_published_on_loopback_unless_somebody_says_otherwise(name):
    ports = SERVICES[name].get("ports", [])
    assert bool(ports) == (name in ("router", "prometheus", "grafana"))
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    elsewhere = filled(COMPOSE, PUBLISH_ADDRESS="0.0.0.0")["services"][name].get("ports", [])
    assert all(port.startswith("0.0.0.0:") == (name == "router") for port in elsewhere)
    watched = filled(COMPOSE, WATCH_ADDRESS="0.0.0.0")["services"][name].get("ports", [])
    assert all(port.startswith("0.0.0.0:") == (name != "router") for port in watched)


def test_workers_and_redis_are_where_there_is_no_way_out():
    assert FILE["networks"]["cluster"] == {"internal": True}
    for name in ("prefill", "decode", "redis"):
        assert SERVICES[name]["networks"] == ["cluster"]
    # Prometheus finds a router once: they share one network, in which its name has one address.
    shared = set(SERVICES["router"]["networks"]) & set(SERVICES["prometheus"]["networks"])
    assert shared == {"cluster"}


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_a_drain_ends_before_docker_kills(name):
    grace_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= float(after(command(name), "--drain-timeout")) + 5


def parsed(words: list[str], served: Path) -> dict[str, object]:
    """What our command line makes of them, with the model in the folder `served`."""
    place, context = COMMANDS, None
    while True:
        found = place.get_command(context, words[0])
        words = words[1:]
        if not hasattr(found, "get_command"):
            break
        place = found
    return found.make_context("it", [{"/models/served": str(served)}.get(word, word) for word in words]).params


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_with_a_gpu_does_what_one_without_does_and_no_more(name, tmp_path):
    given = parsed(
        command(name, filled(GPU, PREFILL_FLAGS="--max-num-seqs 7", DECODE_FLAGS="--max-num-seqs 7")), tmp_path
    )
    plain = parsed(command(name), tmp_path)
    assert {key: value for key, value in given.items() if plain[key] != value} == {
        "device": "cuda",
        "connector": "nixl",
        "max_num_seqs": 7,
        "kv_memory": None,  # what the GPU has left
        "threads": None,
    }
    service = filled(GPU)["services"][name]
    (place,) = service["tmpfs"]  # beside /tmp, which nothing may be run from
    assert (
        place.startswith("/triton:")
        and place.endswith(",exec")
        and service["environment"]["TRITON_CACHE_DIR"] == "/triton"
    )


@pytest.mark.parametrize("name", ["router", "prefill", "decode", "model"])
@pytest.mark.parametrize("more", ["", "--log-level debug"])
def test_each_command_is_one_that_the_cli_takes(name, more, tmp_path, monkeypatch):
    flags = f"{name.upper()}_FLAGS"
    words = command(name, filled(COMPOSE, **({flags: more} if more else {})))
    given = parsed(words, tmp_path)
    if more and name != "model":
        assert given["log_level"] == "debug"


def test_what_waits_for_what():
    done, well = {"condition": "service_completed_successfully"}, {"condition": "service_healthy"}
    assert SERVICES["model"]["depends_on"] == {"secrets": done}
    assert SERVICES["redis"]["depends_on"] == {"secrets": done}
    for name in ("router", "prefill", "decode"):
        assert SERVICES[name]["depends_on"] == {"model": done, "redis": well}
    assert SERVICES["grafana"]["depends_on"] == {"prometheus": well}


def test_ports_are_those_that_prometheus_and_health_checks_ask():
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus-dns.yml").read_text())["scrape_configs"]
    asked = {sd["names"][0]: sd["port"] for job in scraped for sd in job["dns_sd_configs"]}
    told = {name: int(after(command(name), "--metrics-port")) for name in ("prefill", "decode")}
    assert asked == told | {"router": int(after(command("router"), "--http-port"))}
    for name in ("prefill", "decode"):
        assert SERVICES[name]["healthcheck"]["test"][-1] == f"127.0.0.1:{after(command(name), '--port')}"


def test_no_secret_is_in_a_file():
    for text in (COMPOSE, GPU, (ROOT / ".env.example").read_text()):
        for name, value in re.findall(r"(\w*(?:PASSWORD|SECRET|TOKEN|KEY)\w*)[:=] *\"?([^\"\n]*)", text):
            assert value in ("", "${GRAFANA_ADMIN_PASSWORD:-}"), name
    for name in ("router", "prefill", "decode"):
        assert after(command(name), "--cluster-secret-file") == "/secrets/cluster"
        assert after(command(name), "--registry-password-file") == "/secrets/redis"
    writes = [name for name, service in SERVICES.items() if "secrets:/secrets" in service.get("volumes", [])]
    assert writes == ["secrets"]


def test_the_example_names_every_setting_with_its_default():
    example = re.findall(r"^#?(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.M)
    there = {name for name, _ in VARIABLE.findall(COMPOSE + GPU)} | {"HF_TOKEN", "DIPTYCH_KERNELS"}
    assert {name for name, _ in example} == there
    base = dict(VARIABLE.findall(COMPOSE))
    changes = {"ROUTER_FLAGS", "DECODE_FLAGS", "GRAFANA_LOGIN", "GRAFANA_NO_LOGIN"}  # shown as one would set them
    assert not [name for name, said in example if name in base.keys() - changes and base[name] != said]


def test_the_gpu_file_gives_each_pool_a_device_and_torchs_cuda_build():
    gpu = filled(GPU)["services"]
    devices = [gpu[pool]["deploy"]["resources"]["reservations"]["devices"][0] for pool in ("prefill", "decode")]
    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]
    assert all(device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] for device in devices)
    assert {gpu[name]["image"] for name in OURS} == {"diptych:0.1.0-cuda"}
    assert gpu["model"]["build"]["args"] == {"TORCH": "cuda", "TORCH_INDEX": "", "EXTRAS": "otel gpu nixl"}
    assert {"otel", "gpu", "nixl"} <= PROJECT["project"]["optional-dependencies"].keys()
    assert SERVICES["model"]["build"]["args"]["TORCH"] == "cpu"


def test_the_image_is_of_this_version_and_of_these_packages():
    version = PROJECT["project"]["version"]
    assert re.search(r"^ARG VERSION=(.+)$", DOCKERFILE, re.M)[1] == version
    assert SERVICES["model"]["build"]["args"]["VERSION"] == version
    assert {SERVICES[name]["image"] for name in OURS} == {f"diptych:{version}"}
    packages = {word.removesuffix("*") for word in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    sent = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert sent == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_dependencies_come_before_the_code_and_no_tools_are_in_the_last_stage():
    first, wheel, last = DOCKERFILE.split("\nFROM ")[1:]
    assert "COPY . " not in first and "COPY . " in wheel
    assert "-c constraints.txt" in first and "-c constraints.txt" in wheel
    tools = re.compile(r"apt|gcc|build-essential|setuptools")
    found = [line for line in last.splitlines() if tools.search(line)]
    assert [line.startswith('RUN [ "$TORCH" != cuda ] || ') for line in found] == [
        True
    ]  # Triton needs a compiler where it runs
    assert re.search(r"^USER 10001:10001$", last, re.M)
    assert "setuptools==" in (ROOT / "constraints.txt").read_text()


def started(tmp_path: Path, process: str) -> subprocess.Popen[str]:
    """A service's entry point as Docker runs it, with this Python text in place of `diptych`."""
    (shell, flag, script, _) = SERVICES["decode"]["entrypoint"]
    (tmp_path / "process.py").write_text(process)
    words = [shell, flag, script, sys.executable, str(tmp_path / "process.py"), "decode", "--threads", "1"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.parametrize("code", [0, 1, 3, 70])
def test_a_process_that_ends_is_ended_and_started_again(tmp_path, code):
    process = started(tmp_path, f"import sys; print(sys.argv[1:], flush=True); sys.exit({code})")
    said, _ = process.communicate()
    assert process.returncode == code and said == "['decode', '--threads', '1']\n"


def test_flags_that_are_refused_are_refused_once(tmp_path):
    process = started(tmp_path, "import sys; sys.exit(2)")
    assert "not started again with these flags" in process.stdout.readline()
    assert process.poll() is None  # Docker has nothing to start again
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


def test_a_drain_is_waited_for(tmp_path):
    held = "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\nprint('up', flush=True)\n"
    waits = "signal.sigwait({signal.SIGTERM})\nprint('drained', flush=True)\nsys.exit(5)\n"
    process = started(tmp_path, held + waits)
    assert process.stdout.readline() == "up\n"
    process.terminate()  # the shell alone, as Docker's init does
    said, _ = process.communicate()
    assert said == "drained\n" and process.returncode == 5


def test_a_stop_that_comes_before_the_process_is_there_ends_it_all():
    """As process 1 a shell without a trap would not hear it: Docker would kill what has not been drained, after its grace."""
    shell, flag, script, _ = SERVICES["decode"]["entrypoint"]
    trap, start = script.splitlines()[:2]
    assert "&" in start
    asked = subprocess.run([shell, flag, f"{trap}\nkill -TERM $$\n{start}", "true"], check=False)
    assert asked.returncode == 143  # nothing was started


@pytest.mark.parametrize("text", [COMPOSE, GPU], ids=["CPU", "GPU"])
def test_what_both_pools_have_comes_before_what_one_has(text, tmp_path):
    file = filled(text, WORKER_FLAGS="--quantization int8 --max-model-len 512", DECODE_FLAGS="--max-model-len 256")
    prefill, decode = (parsed(command(name, file), tmp_path) for name in ("prefill", "decode"))
    assert prefill["quantization"] == decode["quantization"] == "int8"
    assert (prefill["max_model_len"], decode["max_model_len"]) == (512, 256)
    assert all(SERVICES[name]["environment"] == ["DIPTYCH_KERNELS"] for name in ("prefill", "decode"))
