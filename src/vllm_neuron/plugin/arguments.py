"""vLLM's own parser, asked about arguments without starting anything."""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class ArgumentsError(ValueError):
    """vLLM's parser does not take these arguments. The message is the parser's."""


def quiet_vllm() -> None:
    """Standard output is for a command's result: what vLLM logs goes to standard error, and only from WARNING on."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@cache
def _parser() -> "FlexibleArgumentParser":
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ArgumentsError(f"{message} (flags are those of vllm serve)")

    parser = make_arg_parser(Parser(add_help=False))
    parser.set_defaults(model=None)
    return parser


@contextmanager
def cpu_mode() -> Iterator[None]:
    """Lets vLLM find a platform on any machine, without which it makes no parser. For processes that only parse."""
    before = os.environ.copy()
    os.environ["VLLM_NEURON_CPU_MODE"] = "1"
    os.environ.pop("VLLM_NEURON_CPU_COMPILE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def known_flags() -> frozenset[str]:
    """Every spelling of every flag of `vllm serve`."""
    return frozenset(_parser()._option_string_actions)


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """The arguments as `vllm serve` reads them; those that only concern its HTTP server are read too.

    `model` of the result is None if no model is named: vLLM would take one of its own choice.

    Raises:
        ArgumentsError: a flag is unknown, or a value is not of its flag's type.
    """
    try:
        args: Namespace = _parser().parse_args(list(arguments))
    except ArgumentsError:
        raise
    except Exception as error:
        # A --config file that is not there or not YAML, and whatever else vLLM's parser stumbles over.
        raise ArgumentsError(str(error) or repr(error)) from error
    args.model = args.model_tag or args.model
    return args
