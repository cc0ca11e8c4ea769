"""What is said of two keys that differ."""

from vllm_neuron.compilation.explain import differences, nearest
from vllm_neuron.compilation.store import Manifest

PARTS = {
    "graph": "a" * 64,
    "arguments": [f"weights['{i}']: bfloat16[8, 8] stride [8, 1]" for i in range(10)],
    "target": "trn2",
    "versions": {"neuronx-cc": "2.21", "torch": "2.9.1"},
}


def manifest(name: str, **changes: object) -> Manifest:
    return Manifest(name, "LlamaForCausalLM", name, {**PARTS, **changes}, 1, "", 1.0)


def test_equal_parts_do_not_differ() -> None:
    assert differences(PARTS, dict(PARTS)) == []


def test_each_difference_is_a_line_with_both_values() -> None:
    other = {**PARTS, "graph": "b" * 64, "target": "trn3", "versions": {"neuronx-cc": "2.22", "torch": "2.9.1"}}
    assert differences(PARTS, other) == [
        "graph: aaaaaaaaaaaa here, bbbbbbbbbbbb there",
        "target: trn2 here, trn3 there",
        "versions.neuronx-cc: 2.21 here, 2.22 there",
    ]


def test_of_many_arguments_a_few_are_shown() -> None:
    lines = differences(PARTS, {**PARTS, "arguments": PARTS["arguments"][:-1]})
    assert lines == ["arguments: weights['9']: bfloat16[8, 8] stride [8, 1] only here"]
    lines = differences(PARTS, {**PARTS, "arguments": []})
    assert len(lines) == 4
    assert lines[-1] == "arguments: 7 more differ"


def test_the_nearest_has_the_same_name_and_the_fewest_differences() -> None:
    far = manifest("decode_b1", target="trn3", graph="b" * 64)
    near = manifest("decode_b1", target="trn3")
    another = manifest("decode_b2")
    assert nearest(PARTS, "decode_b1", [far, another, near]) == (near, ["target: trn2 here, trn3 there"])
    assert nearest(PARTS, "prefill", [far, another]) == (another, [])
    assert nearest(PARTS, "decode_b1", []) is None
