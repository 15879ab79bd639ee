"""`spill bench workload`: statistics of a workload, without running it."""

from __future__ import annotations

import json

import click

from spillover.bench.workloads.workload_options import WorkloadOptions
from spillover.cli.bench.measuring import make_console
from spillover.cli.bench.workload_options import ask_server, open_tokenizer, workload_options
from spillover.errors import SpilloverError


@click.command()
@click.option("--base-url", default=None, metavar="URL",
              help="Server whose tokenizer and context length to use; it gets no other requests.")
@click.option("--max-model-len", type=int, default=None, help="Maximum length of prompt plus output in tokens, if "
                                                              "there is no server.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@workload_options()
def workload(workload: WorkloadOptions, base_url: str | None, max_model_len: int | None, as_json: bool) -> None:
    """Show lengths, prefix sharing and working set of a workload.

    Text prompts and conversations are tokenised with --tokenizer or by the server at --base-url; otherwise their
    lengths are estimated from their characters.

    \b
    Examples:
      spill bench workload --dataset-name generated-shared-prefix
      spill bench workload --dataset-name multi-turn --multi-turn-num-turns 8
      spill bench workload --dataset-name mooncake --dataset-path trace.jsonl --trace-limit 1000
    """
    from spillover.bench.serving.served_model import ServedModel
    from spillover.bench.workloads.make_workload import make_workload

    if base_url is not None and max_model_len is not None:
        raise SpilloverError("the server at --base-url reports its longest request: leave --max-model-len out")
    if base_url is not None:
        served = ask_server(workload, base_url)
    else:
        served = ServedModel("none", max_model_len, open_tokenizer(workload.tokenizer))
    stats = make_workload(workload, served).stats()
    if as_json:
        click.echo(json.dumps({"options": workload.as_dict(), **stats.as_dict()}, indent=2))
    else:
        make_console().print(stats.table(), highlight=False)
