from pathlib import Path

import pytest
import uvicorn
import zmq

from vllm_neuron.plugin.shutdown import GRACE_SECONDS, bound_graceful_shutdown, end_when_interrupted_in_warm_up


def test_an_interrupt_while_the_engine_starts_is_not_swallowed(tmp_path: Path) -> None:
    from vllm.v1.engine import utils

    end_when_interrupted_in_warm_up()
    end_when_interrupted_in_warm_up()
    with pytest.raises(KeyboardInterrupt), utils.zmq_socket_ctx(f"ipc://{tmp_path}/s", zmq.ROUTER, bind=True) as opened:
        raise KeyboardInterrupt
    assert opened.closed
    with utils.zmq_socket_ctx(f"ipc://{tmp_path}/s", zmq.ROUTER, bind=True) as opened:
        assert opened.getsockopt(zmq.TYPE) == zmq.ROUTER
    assert opened.closed


@pytest.mark.parametrize(("asked", "seconds"), [({}, GRACE_SECONDS), ({"timeout_graceful_shutdown": 60}, 60)])
def test_open_requests_are_waited_for_only_so_long(asked: dict[str, int], seconds: int) -> None:
    bound_graceful_shutdown()
    assert uvicorn.Config("app", **asked).timeout_graceful_shutdown == seconds
