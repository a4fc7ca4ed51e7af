"""The small parts of the command: sizes, ports, prompts from files, the demo's sums and comparisons."""

import io
import math
import socket

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.cluster import LocalCluster, in_a_row, router_argv, worker_argv
from cli.commands.admissionflags import admission_config, limits_config
from cli.commands.decode import decode_config
from cli.commands.doctor import examine
from cli.commands.policyflags import policy_config
from cli.commands.prefill import prefill_config
from cli.config import ClusterConfig, DoorOptions, WorkerOptions, default_threads
from cli.demo.asking import Answer
from cli.demo.questions import QUESTIONS
from cli.demo.report import differences, percentile
from cli.demo.screen import LineScreen, PanelScreen
from cli.doctor.finding import Level
from cli.main import ROOT
from cli.options import ADDRESS, ADVERTISE, SIZE
from cli.ports import keep_port
from cli.prompts import from_file
from contracts.errors import ConfigError
from engine.placement.topology import read_topology
from kv_transfer.config import Integrity
from router.config import AdmissionConfig, LimitsConfig, PolicyConfig


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("512MiB", 512 * 2**20), ("2 GiB", 2 * 2**30), ("1.5kb", 1500), ("0.5KiB", 512), ("7B", 7)],
)
def test_sizes(text, num_bytes):
    assert SIZE.convert(text, None, None) == num_bytes


@given(st.text(max_size=12))
def test_a_size_is_a_positive_number_or_a_complaint(text):
    try:
        assert SIZE.convert(text, None, None) >= 1
    except click.BadParameter as error:
        assert repr(text) in error.message


@pytest.mark.parametrize("text", ["h:1", "[::1]:50051", "10.0.0.1:65535"])
def test_addresses(text):
    assert ADDRESS.convert(text, None, None) == text


@pytest.mark.parametrize("text", ["", "h", ":1", "h:", "h:0", "h:65536", "::1:5", "h:x", "h:-1"])
def test_no_addresses(text):
    with pytest.raises(click.BadParameter):
        ADDRESS.convert(text, None, None)


def test_a_kept_port_can_be_listened_on_beside_and_is_given_back():
    kept = keep_port("127.0.0.1", 0, "--http-port")
    for _ in range(2):  # as by a child, and by the child that follows it
        with socket.socket() as child:
            child.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            child.bind(("127.0.0.1", kept.port))
            child.listen()
    kept.release()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", kept.port))


def test_a_busy_port_is_refused_by_its_option():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port: {port} is in use"):
            keep_port("127.0.0.1", port, "--grpc-port")


def test_prompts_from_files(tmp_path):
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert from_file(text, chat=False) == ["one", "two"]
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    plain, conversation = from_file(lines, chat=False)
    assert plain == "one"
    assert conversation.messages[0].content == "two"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.txt", b"", "no prompts"),
        ("p.txt", b"a\n\xff\n", "not UTF-8 at byte 2"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 1}\n', "p.jsonl:2"),
        ("p.jsonl", b'{"promt": "a"}\n', "promt"),
        ("p.jsonl", b"{}\n", 'either "prompt" or "messages"'),
        ("p.jsonl", b"hello\n", "p.jsonl:1"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        from_file(path, chat=False)
    assert complaint in caught.value.message
    assert "--file" in caught.value.message


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_covers_its_share(values, share):
    value = percentile(values, share)
    assert value in values
    assert sum(v <= value for v in values) >= share * len(values) - 1e-6


def test_the_percentile_of_nothing_is_not_a_number():
    assert math.isnan(percentile([], 0.5))


def answer(*token_ids):
    return Answer(QUESTIONS[0], "", token_ids, 1, 0.0, (), None)


def test_differences_name_the_first_place():
    ours = [answer(1, 2, 3), answer(1, 2), answer(7)]
    theirs = [answer(1, 2, 3), answer(1, 3), answer(7, 8)]
    second, third = differences(ours, theirs)
    assert second == "question 2: token 1 is 2 disaggregated and 3 colocated"
    assert third == "question 3: token 1 is the end disaggregated and 8 colocated"


DOOR = DoorOptions(
    admission=AdmissionConfig(3, 4, 5000, 2.5),
    limits=LimitsConfig(6, 7000),
    max_body_bytes=1000,
    request_timeout_s=20.0,
)


def test_threads_are_divided_over_workers():
    assert default_threads(1) == read_topology().num_threads
    assert default_threads(10_000) == 1


def test_children_are_started_with_flags_that_their_commands_know(tmp_path):
    config = ClusterConfig(
        model_dir=tmp_path,
        model_name="m",
        policies=PolicyConfig("round_robin", "prefix_aware"),
        canary_interval_s=2.5,
        door=DOOR,
        workers=WorkerOptions(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4),
    )
    port = keep_port("127.0.0.1", 0, "--http-port")
    try:
        lines = [router_argv(config, port, port)]
        lines += [worker_argv(config, kind, f"{kind}-0", port, "127.0.0.1:1") for kind in ("prefill", "decode")]
        for line in lines:
            command = line[line.index("cli") + 1]
            known = ROOT.get_command(None, command)
            context = known.make_context(
                command, list(line[line.index("cli") + 2 :])
            )  # raises for what it does not know
            if command == "router":
                assert context.params["canary_interval"] == 2.5
                assert admission_config(context.params) == DOOR.admission
                assert limits_config(context.params) == DOOR.limits
                assert context.params["max_body"] == DOOR.max_body_bytes
                assert context.params["request_timeout"] == DOOR.request_timeout_s
                assert policy_config(context.params) == config.policies
    finally:
        port.release()


def test_workers_metrics_have_the_ports_that_follow_the_first():
    assert in_a_row(9101, 3) == [9101, 9102, 9103] and in_a_row(0, 2) == [0, 0] and in_a_row(65535, 1) == [65535]
    with pytest.raises(ConfigError, match="--worker-metrics-ports: 2 workers from 65535 on"):
        in_a_row(65535, 2)


def test_no_two_ports_of_a_cluster_are_one(tmp_path):
    port = keep_port("127.0.0.1", 0, "--x")
    port.release()
    config = ClusterConfig(
        model_dir=tmp_path, model_name="m", http_port=0, grpc_port=0, metrics_ports=(port.port, port.port)
    )
    with pytest.raises(ConfigError, match=f"--worker-metrics-ports: {port.port} is another port of this cluster"):
        LocalCluster(config, None).start()


@pytest.mark.parametrize("integrity", list(Integrity))
def test_both_pools_are_as_strict_as_the_cluster_was_told(tmp_path, integrity):
    config = ClusterConfig(
        model_dir=tmp_path, model_name="m", workers=WorkerOptions(connector="tcp", integrity=integrity.value)
    )
    port = keep_port("127.0.0.1", 0, "--http-port")
    try:
        given = {}
        for kind in ("prefill", "decode"):
            line = worker_argv(config, kind, f"{kind}-0", port, "127.0.0.1:1")
            command = ROOT.get_command(None, kind)
            given[kind] = command.make_context(kind, list(line[line.index("cli") + 2 :])).params
    finally:
        port.release()
    assert prefill_config(given["prefill"]).run.sender.integrity is integrity
    assert decode_config(given["decode"]).answers.receiver.integrity is integrity


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ([], PolicyConfig()),
        (["--policy", "power_of_two"], PolicyConfig("power_of_two", "power_of_two")),
        (["--policy", "power_of_two", "--decode-policy", "round_robin"], PolicyConfig("power_of_two", "round_robin")),
        (["--prefill-policy", "prefix_aware"], PolicyConfig("prefix_aware", PolicyConfig().decode)),
    ],
)
def test_a_pools_own_policy_comes_before_the_one_of_both(tmp_path, flags, chosen):
    for command in ("router", "up"):
        context = ROOT.get_command(None, command).make_context(command, ["--model", str(tmp_path), *flags])
        assert policy_config(context.params) == chosen


def test_a_check_of_the_doctor_that_fails_is_a_finding(monkeypatch):
    def check_the_moon():
        raise OSError("too far")
        yield

    monkeypatch.setattr("cli.commands.doctor.CHECKS", (check_the_moon,))
    (finding,) = examine()
    assert finding.level is Level.BROKEN
    assert finding.subject == "the moon"
    assert "too far" in finding.fact


def test_an_answer_that_has_ended_is_shown_while_others_go_on():
    shown = io.StringIO()
    with LineScreen(QUESTIONS, Console(file=shown, width=100)) as screen:
        screen.writer(0)("Paris")
        assert "[1] Paris" not in shown.getvalue()
        screen.writer(0)("\n")
        assert "[1] Paris" in shown.getvalue()
    assert shown.getvalue().count("[1] Paris") == 1


def test_a_panel_ends_with_its_last_word():
    shown = io.StringIO()
    console = Console(file=shown, width=60, height=40)
    with PanelScreen(QUESTIONS[:1], console) as screen:
        screen.writer(0)("Paris\n")
    assert [line.strip("│ ") for line in shown.getvalue().splitlines()[-2:-1]] == ["Paris"]


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_a_service_on_its_own_says_that_it_is_ready(name):
    (level,) = [param for param in ROOT.get_command(None, name).params if param.name == "log_level"]
    assert level.default == "info"


@pytest.mark.parametrize(
    "address", ["", "host", "a.b-c.d", "10.0.0.1", "host:80", "::1", "[::1]", "[::1]:80", "fe80::1:2"]
)
def test_addresses_to_advertise(address):
    assert ADVERTISE.convert(address, None, None) == address


@pytest.mark.parametrize(
    "address", [" ", "a b", "host:", "host:0", "host:65536", "host:x", ":80", "http://host", "a:b:c"]
)
def test_addresses_that_nobody_can_reach(address):
    with pytest.raises(click.BadParameter, match="HOST"):
        ADVERTISE.convert(address, None, None)
