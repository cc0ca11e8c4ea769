"""The migration guide's launch of NxD Inference, migrated as it is typed, serves a tiny model in CPU mode."""

import subprocess
from pathlib import Path

from tests.migration.published import FOLDER
from tests.server.harness import BIN, clean_environment, free_port, start

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
NEEDS_A_PERSON = 3
SHARED = "x" * 200
"""A prompt of several blocks."""


def test_server_of_the_guides_first_launch(tiny: Path, cache: Path, tmp_path: Path) -> None:
    """Also two rows of the guide's table: continuous batching and prefix caching work without any setting."""
    old, new = tmp_path / "old.sh", tmp_path / "new.sh"
    old.write_text((FOLDER / "guide-first-example.sh").read_text().replace(MODEL, str(tiny)))
    migrate = [BIN / "vllm-neuron", "migrate", old, "--only-supported", "--write", new]
    done = subprocess.run(migrate, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == NEEDS_A_PERSON, done.stderr
    assert "tensor parallelism" in done.stderr
    assert done.stdout == new.read_text()

    port = free_port()
    server = start(["bash", "-c", f"{new.read_text().rstrip()} --port {port}"], port, tmp_path, cache, {})
    try:
        server.wait_ready()
        ask = server.client.with_options(timeout=60).completions.create
        slow = ask(
            model=str(tiny),
            prompt=SHARED,
            max_tokens=3500,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(slow)
        quick = ask(model=str(tiny), prompt=SHARED, max_tokens=4, temperature=0)
        assert quick.usage.completion_tokens == 4
        assert server.metric("vllm:num_requests_running") == 1, "the first request has ended before the second"
        slow.close()
        assert server.metric("vllm:prefix_cache_hits_total") > 0
    except BaseException:
        server.kill_all()
        raise
    server.stop()
