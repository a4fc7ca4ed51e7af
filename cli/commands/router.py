"""`diptych router`: one router process, from flags to `router.serve`. Does not know what a router does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

import click

from cli.commands import flags
from cli.commands.admissionflags import ADMISSION_OPTIONS, AdmissionFlags, admission_config, limits_config
from cli.commands.chatflags import CHAT_OPTIONS, ChatFlags, chat_config
from cli.commands.dashboardflags import DashboardFlags, slo_config, slo_option
from cli.commands.doorflags import DOOR_OPTIONS, DoorFlags, cluster_secret, doors
from cli.commands.policyflags import POLICY_OPTIONS, PolicyFlags, policy_config
from cli.commands.registryflags import REGISTRY_OPTIONS, RegistryFlags, redis_config
from cli.commands.tracingflags import TracingFlags, otlp_option, traces
from cli.commands.wayflags import WAY_OPTIONS, WayFlags, disaggregation_config
from cli.options import SectionedCommand, apply
from engine.models.store import model_name
from router.config import CanaryConfig, HttpConfig, RouterConfig
from rpc.server import ServerConfig


class RouterFlags(
    AdmissionFlags, ChatFlags, DashboardFlags, DoorFlags, PolicyFlags, RegistryFlags, TracingFlags, WayFlags
):
    """What click hands over, checked by the options below."""

    model: Path
    served_name: str | None
    host: str
    http_port: int
    grpc_port: int
    advertise: str
    canary_interval: float
    drain_timeout: float
    exit_with: int | None
    log_level: str
    log_prompts: bool


OPTIONS = (
    flags.model_dir_option,
    flags.served_name_option,
    flags.host_option("Where to listen; 0.0.0.0 is everywhere."),
    flags.http_port_option,
    flags.grpc_port_option("gRPC API, and where workers announce themselves; 0 takes a free port."),
    flags.advertise_option,
    *DOOR_OPTIONS,
    *REGISTRY_OPTIONS,
    *POLICY_OPTIONS,
    flags.canary_interval_option,
    *WAY_OPTIONS,
    *CHAT_OPTIONS,
    *ADMISSION_OPTIONS,
    flags.drain_timeout_option,
    otlp_option,
    slo_option,
    flags.exit_with_option,
    flags.service_log_level_option,
    flags.log_prompts_option,
)


def router_config(given: RouterFlags) -> RouterConfig:
    """The router that these flags describe."""
    opened = doors(given, given["host"])
    return RouterConfig(
        model_dir=given["model"],
        model_name=given["served_name"] or model_name(given["model"]),
        http=HttpConfig(host=given["host"], port=given["http_port"], max_body_bytes=given["max_body"], tls=opened.http),
        grpc=ServerConfig(
            host=given["host"],
            port=given["grpc_port"],
            advertise=given["advertise"],
            max_request_bytes=given["max_body"],
            tls=opened.grpc,
        ),
        access=replace(opened.access, log_prompts=given["log_prompts"], secret=cluster_secret(given)),
        chat=chat_config(given),
        admission=admission_config(given),
        limits=limits_config(given),
        policies=policy_config(given),
        redis=redis_config(given),
        canary=CanaryConfig(interval_s=given["canary_interval"]),
        disaggregation=disaggregation_config(given),
        tracing=traces(given),
        slo=slo_config(given),
        request_timeout_s=given["request_timeout"],
        drain_timeout_s=given["drain_timeout"],
    )


@click.command("router", cls=SectionedCommand)
@click.pass_context
def router(ctx: click.Context, /, **given: Unpack[RouterFlags]) -> None:
    """Run one router: it takes requests over OpenAI HTTP and gRPC and drives workers that announce themselves to it.

    It reads only the tokenizer and configuration files of the model directory. `diptych up` starts one for you.
    """
    from router.main import serve

    config = router_config(given)
    code = flags.run_service(
        "router", given["log_level"], given["exit_with"], lambda: serve(config), log_prompts=given["log_prompts"]
    )
    ctx.exit(code)


apply(OPTIONS, router)
