"""Each documented limit, violated once, is caught in strict mode: the message names instruction, rule and line."""

from pathlib import Path

import nki
import nki.isa as nisa
import nki.language as nl
import pytest

from vllm_neuron.kernels.simulator import Violation

from . import limits_of_engines, limits_of_memory
from .limits import CASES, Case, filled, sb

assert limits_of_engines and limits_of_memory, "importing them fills CASES"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel.__name__)
def test_violated_limit_is_caught(case: Case) -> None:
    with pytest.raises(Violation) as raised:
        nki.simulate(case.kernel, target=case.target)()
    violation = raised.value
    assert violation.instruction == case.instruction
    assert case.rule in violation.rule
    assert violation.line.startswith(str(Path(__file__).parent))


def test_registers_have_no_python_value() -> None:
    def kernel() -> None:
        nisa.memset(sb((8, 4))[:, 0 : nisa.register_alloc(2)], 0.0)

    with pytest.raises((TypeError, Violation)):
        nki.simulate(kernel)()


def test_tensors_are_no_conditions() -> None:
    def kernel() -> None:
        if sb((8, 4)):
            sb((8, 4))

    with pytest.raises(TypeError, match="condition"):
        nki.simulate(kernel)()


def test_a_message_names_instruction_rule_shapes_and_line() -> None:
    def kernel() -> None:
        nisa.tensor_tensor(sb((8, 4)), sb((8, 4)), sb((8, 5)), nl.add)

    with pytest.raises(Violation) as raised:
        nki.simulate(kernel)()
    line = kernel.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        "tensor_tensor: data1 has 8 partitions of 4, data2 has 8 of 5\n"
        "  operands: dst=float32 (8, 4) in sbuf, data1=float32 (8, 4) in sbuf, data2=float32 (8, 5) in sbuf\n"
        f"  at {__file__}:{line}"
    )


def test_cores_that_take_different_paths_deadlock() -> None:
    def kernel() -> None:
        shared = nl.ndarray((8, 4), nl.float32, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(shared, (0, 1))

    with pytest.raises(Violation, match="the other core did not come to this core_barrier"):
        nki.simulate(kernel)[2]()


def test_compatible_mode_counts_what_it_lets_pass() -> None:
    def kernel() -> None:
        nisa.tensor_tensor(sb((8, 4)), filled((8, 4)), filled((8, 4)), nl.add)

    run = nki.simulate(kernel, strict=False).run()
    assert run.notes == {"tensor_tensor: data1 and data2 are both in psum: only one may be": 1}
