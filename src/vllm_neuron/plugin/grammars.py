"""vLLM's grammars, without the ways in which a single request can end the engine.

vLLM's front end checks each constraint and names the back end that can do it. The engine then compiles all constraints
with the back end of the first request, and an error of any compilation ends it. Here each request gets the back end
that was named for it, and one whose grammar cannot be compiled is the only one to fail.
"""

import logging
from collections import deque
from collections.abc import Collection, Mapping
from importlib import import_module
from threading import Lock
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

logger = logging.getLogger(__name__)

BACK_ENDS: Mapping[str, tuple[str, str]] = {
    "xgrammar": ("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend"),
    "guidance": ("vllm.v1.structured_output.backend_guidance", "GuidanceBackend"),
    "outlines": ("vllm.v1.structured_output.backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("vllm.v1.structured_output.backend_lm_format_enforcer", "LMFormatEnforcerBackend"),
}
"""Module and class of each back end that vLLM's front end may name."""


class Grammars:
    """Compiles the grammars of a manager from now on.

    Args:
        manager: vLLM's; it calls from several threads.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._back_ends: dict[str, StructuredOutputBackend] = {}
        self._lock = Lock()
        self._failed: deque[Request] = deque()
        manager._create_grammar = self._compile  # type: ignore[method-assign,assignment]

    def take_failed(self, known: Collection[str]) -> list[Request]:
        """Requests whose grammar has failed since the last call.

        Args:
            known: ids of the requests that the scheduler has: one that it is yet to be given comes with a later call.
        """
        failed: list[Request] = []
        early: list[Request] = []
        while self._failed:
            request = self._failed.popleft()
            (failed if request.request_id in known else early).append(request)
        self._failed.extend(request for request in early if not request.is_finished())
        return failed

    def _compile(self, request: Request) -> StructuredOutputGrammar | None:
        """A request's grammar; None if there is none, which to vLLM's scheduler means not yet."""
        assert request.structured_output_request is not None
        kind, text = request.structured_output_request.structured_output_key
        try:
            return self._back_end(request.structured_output_request.params._backend).compile_grammar(kind, text)
        except Exception as error:
            logger.warning("The %s of request %s is no grammar: %s", kind.name, request.request_id, error)
            self._failed.append(request)
            return None

    def _back_end(self, name: str | None) -> StructuredOutputBackend:
        if name is None or name not in BACK_ENDS:
            raise ValueError(f"{name} is no back end for structured outputs")
        with self._lock:
            if name not in self._back_ends:
                self._back_ends[name] = self._make(name)
            return self._back_ends[name]

    def _make(self, name: str) -> StructuredOutputBackend:
        module, kind = BACK_ENDS[name]
        cls: Any = getattr(import_module(module), kind)
        if isinstance(self._manager.backend, cls):
            return self._manager.backend
        config = self._manager.vllm_config
        return cls(config, tokenizer=self._manager.tokenizer, vocab_size=config.model_config.get_vocab_size())
