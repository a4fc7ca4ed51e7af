"""Flags of `vllm bench serve` that are called otherwise here: whoever gives one is told ours. Does not measure."""

from __future__ import annotations

import click

from cli.options import SectionedCommand

_SHAPE = {"input-len": "--input-len", "output-len": "--output-len", "prefix-len": "--prefix-len"}
OURS = {
    **{f"--random-{name}": ours for name, ours in _SHAPE.items()},
    "--random-range-ratio": "--range-ratio",
    "--prefix-repetition-prefix-len": "--prefix-len with --dataset-name shared-prefix",
    "--prefix-repetition-suffix-len": "--input-len with --dataset-name shared-prefix",
    "--prefix-repetition-num-prefixes": "--num-prefixes with --dataset-name shared-prefix",
    "--prefix-repetition-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--host": "--base-url http://HOST:PORT, or --address HOST:PORT of gRPC",
    "--port": "--base-url http://HOST:PORT, or --address HOST:PORT of gRPC",
    "--endpoint": "--backend: openai asks /v1/completions, openai-chat /v1/chat/completions",
    "--endpoint-type": "--backend: openai or openai-chat",
    "--served-model-name": "--model",
    "--save-result": "--result-dir DIR",
    "--result-filename": "--result-dir DIR and --label NAME",
    "--percentile-metrics": "nothing to choose: TTFT, TPOT, ITL and E2EL are all said",
    "--ignore-eos": "so unless --no-ignore-eos is given",
    "--temperature": "always 0: answers are greedy",
    "--ramp-up-strategy": "--request-rate R,R,…: each rate is a load of its own",
}
"""By vLLM's name: what to write instead."""


class ServeCommand(SectionedCommand):
    """A command that knows vLLM's names for its flags, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """click's. Raises UsageError that says what to write for a flag of vLLM's."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = OURS.get(error.option_name)
            if ours is None:
                raise
            raise click.UsageError(f"{error.option_name}: here it is {ours}", ctx) from error
