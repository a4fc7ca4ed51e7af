"""The flags for conversations arrive at the router, also through `diptych up`."""

import pytest

from cli.cluster import router_argv
from cli.commands.router import router, router_config
from cli.config import ClusterConfig, DoorOptions
from cli.ports import keep_port
from contracts.errors import ConfigError
from router.config import ChatConfig
from router.openai.chat import ChatRules
from router.text.model_card import load_model_card
from tests.integration.router_harness import TINY


@pytest.mark.parametrize("chat", [ChatConfig(), ChatConfig("hermes", True), ChatConfig("none", False)])
def test_up_tells_its_router(chat):
    http, grpc = keep_port("127.0.0.1", 0, "--http-port"), keep_port("127.0.0.1", 0, "--grpc-port")
    try:
        config = ClusterConfig(model_dir=TINY, model_name="tiny", door=DoorOptions(chat=chat))
        argv = router_argv(config, http, grpc)
    finally:
        http.release()
        grpc.release()
    arguments = list(argv[argv.index("--model") :])
    assert router_config(router.make_context("router", arguments).params).chat == chat


def test_a_parser_that_there_is_not_is_named():
    with pytest.raises(ConfigError, match=r"tool_call_parser: got 'gorilla', must be one of auto, none, hermes"):
        ChatRules(load_model_card(TINY, "tiny"), ChatConfig("gorilla"))
