"""Options: what they mean, and what is wrong with those that mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compile_fsdp.passes.costs import cost_model
from compile_fsdp.passes.facts import GroupFacts
from compile_fsdp.passes.policy import Policy, parse_bytes, parse_policy

MIB = 1 << 20
GIB = 1 << 30


def group(label: str, size: int = MIB) -> GroupFacts:
    return GroupFacts(f"0/{label}/0", label, size, 2 * size, state_bytes=size)


def test_nothing_needs_to_be_said() -> None:
    assert parse_policy({}) == Policy()
    assert parse_policy({"cost_model": None, "merge_below": None}) == Policy()
    assert parse_policy({}, "cuda").costs == cost_model("h100")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        ("70GiB", 70 * GIB),
        ("70 gib", 70 * GIB),
        ("1.5MiB", 3 * MIB // 2),
        ("2GB", 2 * 10**9),
        ("7", 7),
        ("0", 0),
    ],
)
def test_bytes(value: object, expected: int) -> None:
    assert parse_bytes("memory_budget", value) == expected


@pytest.mark.parametrize("value", ["70 GiBs", "GiB", "-1", -1, True, None, [], "1e9", "70%"])
def test_what_is_no_number_of_bytes(value: object) -> None:
    with pytest.raises(ValueError, match=r"option 'merge_below': expected a number of bytes"):
        parse_bytes("merge_below", value)


def test_a_fraction_of_the_device() -> None:
    policy = parse_policy({"memory_budget": 0.5, "cost_model": "h200"})
    assert policy.memory_budget == 141 * GIB // 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prefetch": -1}, r"'prefetch': expected 'auto' or a number of groups, 0 or more; got -1"),
    ({"prefetch": "1"}, r"'prefetch': expected 'auto'"),
    ({"memory_budget": "lots"}, r"'memory_budget': expected 'peak', 'unlimited', bytes such as"),
    ({"memory_budget": 1.5}, r"'memory_budget': expected a fraction .* in \(0, 1\].* got 1.5"),
    ({"memory_budget": 0.0}, r"'memory_budget': expected a fraction"),
    ({"memory_budget": True}, r"'memory_budget': expected"),
    ({"memory_budget": 0.5}, r"'memory_budget': 0.5 is a fraction .* 'cpu\+gloo' does not know"),
    ({"reshard_after_forward": "never"}, r"'reshard_after_forward': expected 'auto', a bool"),
    ({"reshard_after_forward": {"a": 1}}, r"'reshard_after_forward': expected patterns .* got"),
    ({"reshard_after_forward": {1: True}}, r"'reshard_after_forward': expected patterns"),
    ({"merge_below": "small"}, r"'merge_below': expected a number of bytes"),
    ({"activation_bytes": "1GiB"}, r"activation_bytes is part of a memory_budget in bytes"),
    ({"equal_shapes": 1}, r"'equal_shapes': expected a bool; got 1"),
    ({"cost_model": "h1000"}, r"'cost_model': .*unknown device 'h1000'; did you mean 'h100'"),
    ({"cost_model": 3}, r"'cost_model': expected a name"),
    (
        {"memory_budget": "unlimited", "reshard_after_forward": True},
        r"memory_budget='unlimited' keeps every group .*reshard_after_forward=True none",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(row[0]) for row in BAD])
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(options)


def test_the_last_pattern_that_matches_decides() -> None:
    policy = parse_policy({"reshard_after_forward": {"blocks.*": True, "blocks.[01]": False}})
    answers = {label: policy.reshards(group(label)) for label in ("blocks.0", "blocks.2", "root")}
    assert answers == {"blocks.0": False, "blocks.2": True, "root": None}
    assert policy.reshards(group("blocks.1[2]")) is False, "all groups of a module"


def test_a_pattern_for_a_module_that_is_not_there() -> None:
    policy = parse_policy({"reshard_after_forward": {"layers.*": False}})
    with pytest.raises(ValueError, match=r"no sharded module matches 'layers.\*'.* blocks.0, root"):
        policy.check_groups(["root", "blocks.0", "blocks.0[1]"])
    policy.check_groups(["layers.3"])


def test_a_budget_below_what_one_group_needs() -> None:
    groups = {each.name: each for each in (group("a"), group("big", 4 * MIB))}
    with pytest.raises(ValueError, match=r"16.0 MiB is less than the 17.0 MiB .* of 'big'"):
        parse_policy({"memory_budget": "16MiB"}).check_budget(groups)
    parse_policy({"memory_budget": "17MiB"}).check_budget(groups)
    Policy().check_budget(groups)


def test_a_policy_is_plain_data() -> None:
    """It is a part of cache keys by its text, so equal policies have equal texts."""
    one = parse_policy({"reshard_after_forward": {"a": True}, "cost_model": "b200"})
    two = parse_policy({"reshard_after_forward": {"a": True}, "cost_model": "b200+ib800"})
    assert one == two and repr(one) == repr(two) and hash(one) == hash(two)
    faster = replace(two.costs, ranks_per_node=72)
    assert repr(replace(two, costs=faster)) != repr(two)
