"""The ``kvrelay`` command.

Commands are loaded when they are named. So the help of one command does not import another, and a host without torch can run the
gateway. :mod:`kvrelay.launcher.commands` lists those that have settings. Expected errors end as one line on stderr. The exit code
is 2 for a wrong setting, 1 for other failures.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click

import kvrelay
from kvrelay.common.errors import KvrelayError, SettingsError
from kvrelay.launcher.commands import COMMANDS, CommandEntry
from kvrelay.launcher.options import Options


class KvrelayGroup(click.Group):
    """Loads a command's settings only when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which a newcomer needs them."""
        return [*COMMANDS, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, with options generated from its settings."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        entry = COMMANDS[cmd_name]
        return _settings_command(cmd_name, entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the summaries without loading any command."""
        with formatter.section("Commands"):
            tools = [(name, command.get_short_help_str(limit=120)) for name, command in self.commands.items()]
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()] + tools)


@click.group(cls=KvrelayGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(kvrelay.__version__, prog_name="kvrelay")
def cli() -> None:
    """kvrelay serves large language models with prefill and decode on separate pools of workers.

    Start with `kvrelay local`. Every option of local, gateway, prefill-worker, decode-worker, verify and bench can also be
    given as a variable (--max-num-seqs is KVRELAY_MAX_NUM_SEQS) or in a TOML file (--config). A flag wins over a variable,
    a variable over the file.
    """


@cli.command("fetch")
@click.argument("model", default="demo")
def fetch(model: str) -> None:
    """Download or convert a model, and print its directory.

    MODEL is a directory, a GGUF file, a Hugging Face id, or 'demo', the default.
    """
    resolve_model: Callable[[str], Any] = _load("kvrelay.launcher.models:resolve_model")
    click.echo(resolve_model(model))


@cli.command("check-model")
@click.argument("model", default="demo")
@click.option("--gpu", type=click.Choice(["a10", "a100-40gb", "a100", "b200", "h100", "h200", "l4", "l40s", "t4"]),
              help="a GPU that the model is to fit")  # fmt: skip
@click.option("--memory-gib", type=click.FloatRange(0, min_open=True), help="memory of the GPU, instead of its name")
@click.option("--tensor-parallel", "num_ranks", type=click.IntRange(1, 64), default=1, show_default=True,
              help="ranks of a worker, or of each stage, with such a GPU each")  # fmt: skip
@click.option("--pipeline-parallel", "num_stages", type=click.IntRange(1, 64), default=1, show_default=True,
              help="stages of a worker")  # fmt: skip
@click.option("--backend", type=click.Choice(["auto", "native", "transformers"]), default="auto", show_default=True,
              help="as of a worker")  # fmt: skip
@click.option("--speculation", type=click.Choice(["draft-model", "head", "mtp"]), help="as of a decode worker")
@click.option("--draft-model", help="the model, or the head, that guesses on the first GPU; a head is fetched")
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def check_model(
    model: str,
    gpu: str | None,
    memory_gib: float | None,
    num_ranks: int,
    num_stages: int,
    backend: str,
    speculation: str | None,
    draft_model: str | None,
    as_json: bool,
) -> int:
    """Tell whether and how a model would run, what it needs, or why it is refused.

    MODEL is a directory, a Hugging Face id or 'demo'. Of an id only configuration and tokenizer are fetched: no weights.
    Where there is memory for it, logits are compared with transformers', with random weights if its own are not here.
    Exit code 0 if it runs, 1 if it is refused or does not fit, 2 if there is nothing to look at.
    """
    if gpu is not None and memory_gib is not None:
        raise click.UsageError("--gpu and --memory-gib say the same: give one of them")
    if (speculation in (None, "mtp")) != (draft_model is None):
        raise click.UsageError(
            "--speculation and --draft-model need each other: give both, or neither; mtp needs no model"
        )
    drafting = None if speculation is None else (speculation, draft_model)
    run: Callable[..., int] = _load("kvrelay.launcher.check_model:run")
    return run(
        model,
        gpu=gpu,
        memory_gib=memory_gib,
        ranks=(num_ranks, num_stages),
        backend=backend,
        drafting=drafting,
        as_json=as_json,
    )


@cli.command("keys")
@click.argument("directory", type=click.Path(path_type=Path))
def keys(directory: Path) -> None:
    """Make the keys by which gateways and workers know each other: ROLE.key and ROLE.pem in DIRECTORY."""
    make_keys: Callable[[Path], list[Path]] = _load("kvrelay.wire.security.keys:make_keys")
    for path in make_keys(directory):
        click.echo(path)


@cli.command("api-key")
@click.argument("name")
@click.option("--operator", is_flag=True, help="may also look at /console, workers and everybody's requests")
def api_key(name: str, operator: bool) -> None:
    """Make an API key, and the line that a gateway's --api-keys file has of it."""
    line_of: Callable[[str, str], str] = _load("kvrelay.gateway.http.api_keys:line_of")
    key = f"kvr-{secrets.token_urlsafe(32)}"
    line = line_of(name, key)
    click.echo(f"key, for its owner only: {key}", err=True)
    click.echo(f"{line} operator=1" if operator else line)


@cli.command("top")
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--api-key",
    envvar="KVRELAY_API_KEY",
    help="an operator's key, where a gateway asks for keys; better as KVRELAY_API_KEY: others on this machine see flags",
)
def top(url: str, api_key: str | None) -> int:
    """Show what the gateway at URL (default: http://127.0.0.1:8000) and its workers do just now, until Ctrl-C.

    Where there is no terminal, it prints one picture and ends. An authority of your own: SSL_CERT_FILE=ca.crt.
    """
    show: Callable[[str, str | None, Any], int] = _load("kvrelay.launcher.top:run")
    return show(url, api_key, _load("rich.console:Console")())


@cli.command("watermark")
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@click.option(
    "--model", default="demo", envvar="KVRELAY_MODEL", show_default=True, help="whose tokenizer made the text"
)
@click.option(
    "--gamma",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="part of the vocabulary that was raised",
)
def watermark(file: IO[str], model: str, gamma: float) -> None:
    """Tell whether a text carries a watermark, from FILE or from what is piped in."""
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file.name} is not UTF-8: {error}", param_hint="FILE") from error
    report: Callable[[str, str, float], list[str]] = _load("kvrelay.launcher.watermark:report")
    click.echo("\n".join(report(text, model, gamma)))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the ``kvrelay`` script; exits the process."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = cli.main(args=arguments, prog_name="kvrelay", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except KvrelayError as error:
        click.echo(f"kvrelay: {error}", err=True)
        return 2 if isinstance(error, SettingsError) else 1
    except ModuleNotFoundError as error:
        # A missing kvrelay module is a bug: show its trace. For another missing package, an extra was not installed.
        if error.name is None or error.name.split(".")[0] == "kvrelay":
            raise
        click.echo(
            f"kvrelay: this command needs the package {error.name!r}, which is not installed; install "
            "'kvrelay[gateway]' for gateways, 'kvrelay[worker]' for workers, 'kvrelay[bench]' for bench, 'kvrelay[local]' "
            "for everything else",
            err=True,
        )
        return 1
    return result if isinstance(result, int) else 0


def _settings_command(name: str, entry: CommandEntry) -> click.Command:
    options = _options(entry)

    def callback(**flags: Any) -> int:
        if click.get_current_context().invoked_subcommand is not None:
            return 0  # click runs the subcommand next
        settings: Any = options.load(flags, os.environ, _all_variables)
        runner: Callable[[Any], int] = _load(entry.run)
        return runner(settings)

    parameters = options.parameters(entry.common)
    epilog = None
    if entry.common:
        parameters.append(_help_all_option(name, entry))
        num_more = len(options.infos) - len(entry.common)
        epilog = f"kvrelay {name} --help-all lists {num_more} more options, and the variable of each."
    arguments: dict[str, Any] = {
        "callback": callback,
        "params": parameters,
        "help": f"{entry.summary}\n\n{entry.details}",
        "short_help": entry.summary,
        "epilog": epilog,
    }
    if not entry.subcommands:
        return click.Command(name, **arguments)
    subcommands: list[click.Command] = [_load(path) for path in entry.subcommands]
    return click.Group(
        name, invoke_without_command=True, commands=subcommands, subcommand_metavar="[COMMAND …]", **arguments
    )


def _help_all_option(name: str, entry: CommandEntry) -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            click.echo(_settings_command(name, replace(entry, common=())).get_help(ctx))
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )


def _options(entry: CommandEntry) -> Options[Any]:
    declared = _load(entry.settings)
    return declared if isinstance(declared, Options) else Options.of(declared)


def _all_variables() -> set[str]:
    """The environment variables of all commands."""
    return {info.variable for entry in COMMANDS.values() for info in _options(entry).infos}


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
