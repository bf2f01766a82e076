"""The groups of the variables, and the refused groupings."""

import json

import pytest

from tfdpclip.clipping import LayerwiseClip, as_rule, make_groups
from tfdpclip.clipping.groups import by_group, layer_of

NAMES = ["embed/table:0", "d1/kernel:0", "d1/bias:0", "d2/kernel:0", "d2/bias:0"]
BARE = tuple(name[:-2] for name in NAMES)


def assignment(groups, names=NAMES):
    return make_groups(groups, names).assignment


@pytest.mark.parametrize("groups", [None, "layer"])
def test_one_group_per_layer(groups):
    found = make_groups(groups, NAMES)
    assert found.names == ("embed", "d1", "d2")
    assert found.assignment == (0, 1, 1, 2, 2)
    assert found.members == BARE
    assert len(found) == 3
    assert found.as_mapping()["d1"] == ["d1/kernel", "d1/bias"]


def test_a_variable_without_a_layer_is_a_group_of_its_own():
    assert make_groups(None, ["w:0", "v:0", "d/w:0"]).names == ("w", "v", "d")


def test_the_layer_is_all_of_the_name_but_the_last_part():
    assert layer_of("a/b/kernel:0") == "a/b"
    assert layer_of("kernel") == "kernel"


def test_one_group_per_variable_also_where_names_repeat():
    assert assignment("variable") == (0, 1, 2, 3, 4)
    twice = make_groups("variable", ["d/w:0", "d/w:0", "d/w:0"])
    assert twice.assignment == (0, 1, 2)
    assert len(set(twice.names)) == 3


@pytest.mark.parametrize(
    "groups, expected",
    [
        (["embed", ".*"], (0, 1, 1, 1, 1)),
        ([".*"], (0, 0, 0, 0, 0)),
        (["d1/kernel", "d1/bias", ".*"], (2, 0, 1, 2, 2)),
        (["bias$", "kernel$", "embed"], (2, 1, 0, 1, 0)),
        ([["embed", "d2"], "d1"], (0, 1, 1, 0, 0)),
        (["^d", "embed"], (1, 0, 0, 0, 0)),
        (("d[12]", "embed"), (1, 0, 0, 0, 0)),
        ({"rest": ".*/bias", "big": ["embed", "kernel"]}, (1, 1, 0, 1, 0)),
        (lambda name: name.split("/")[1], (0, 1, 2, 1, 2)),
        (lambda name: len(name) > 9, (0, 1, 1, 1, 1)),
    ],
)
def test_groups_by_pattern_mapping_and_function(groups, expected):
    found = LayerwiseClip(1.0, groups=groups).bind(NAMES).layout
    by_first = {}
    names = [by_first.setdefault(g, len(by_first)) for g in found.assignment]
    first = {}
    assert names == [first.setdefault(g, len(first)) for g in expected]
    assert set(found.assignment) == set(range(len(found)))


def test_a_mapping_keeps_its_order_and_names():
    found = make_groups({"b": "d2", "a": ".*"}, NAMES)
    assert found.names == ("b", "a")
    assert found.assignment == (1, 1, 1, 0, 0)


@pytest.mark.parametrize("key", [0, ""])
def test_a_mapping_may_have_a_key_that_is_false(key):
    assert len(make_groups({key: "d1", "b": ".*"}, NAMES)) == 2


def test_a_layer_is_found_by_its_name_before_patterns_are_tried():
    names = ["d/kernel", "d_1/kernel", "d_10/kernel"]
    assert assignment(["d", "d_1", "d_10"], names) == (0, 1, 2)


def test_the_first_pattern_that_matches_wins():
    found = make_groups(["d1/kernel", "d1", ".*"], NAMES)
    assert found.as_mapping() == {
        ".*": ["embed/table", "d2/kernel", "d2/bias"],
        "d1/kernel": ["d1/kernel"],
        "d1": ["d1/bias"],
    }


@pytest.mark.parametrize(
    "groups, text",
    [
        (4, "groups must be None"),
        (True, "groups must be None"),
        (2.0, "groups must be None"),
        ([], "groups must be None"),
        ({}, "groups must be None"),
        ([1], "groups must be None"),
        ([[1]], "groups must be None"),
        ({"a": 2}, "groups must be None"),
        ("dense", r"groups=\['dense', '\.\*'\]"),
        (["("], "groups has '\\(', which is no regular expression"),
        ({"a": ["ok", "["]}, "groups has '\\[', which is no regular expression"),
    ],
)
def test_what_cannot_be_groups_is_refused_at_once(groups, text):
    with pytest.raises(ValueError, match=text):
        LayerwiseClip(1.0, groups=groups)


@pytest.mark.parametrize(
    "groups, text",
    [
        (["nothing", ".*"], "groups has 'nothing', which matches no variable"),
        ({"a": "nothing", "b": ".*"}, "groups has 'nothing', which matches no"),
        (["d1"], "groups leaves out embed/table, d2/kernel, d2/bias"),
        ({"a": "d1"}, "groups leaves out embed/table"),
        ([".*", "d1"], "groups has 'd1', but all of its variables belong to groups"),
    ],
)
def test_groups_that_do_not_fit_the_variables_are_refused(groups, text):
    with pytest.raises(ValueError, match=text):
        make_groups(groups, NAMES)
    with pytest.raises(ValueError, match=text):
        LayerwiseClip(1.0, groups=groups).bind(NAMES)


def test_no_variables_are_no_groups():
    with pytest.raises(ValueError, match="no variables"):
        make_groups(None, [])


def test_numbers_by_group_and_by_layer():
    groups = make_groups({"one": ["embed", "d1"], "two": "d2"}, NAMES)
    assert by_group("norms", {"one": 3, "two": 4}, groups) == [3.0, 4.0]
    joined = by_group("norms", {"embed": 3.0, "d1": 4.0, "d2": 1.0}, groups)
    assert joined == [5.0, 1.0]
    with pytest.raises(ValueError, match="norms must be one number per group"):
        by_group("norms", [1, 2], groups)
    with pytest.raises(ValueError, match="norms says nothing about group 'two'"):
        by_group("norms", {"one": 1.0}, groups)
    with pytest.raises(ValueError, match=r"norms\['one'\]"):
        by_group("norms", {"one": float("nan"), "two": 1.0}, groups)


SAVED = {
    "none": None,
    "variable": "variable",
    "list": ["embed", [".*kernel", "bias"]],
    "tuple": ("embed", ("d1", "d2")),
    "mapping": {"a": "embed", "b": ("d1", "d2")},
}


@pytest.mark.parametrize("groups", SAVED.values(), ids=SAVED)
def test_groups_come_back_from_json(groups):
    rule = LayerwiseClip(1.0, groups=groups)
    for one in (rule, rule.bind(NAMES)):
        config = {"class_name": "LayerwiseClip", "config": one.get_config()}
        again = as_rule(json.loads(json.dumps(config)))
        assert again.bind(NAMES).assignment == rule.bind(NAMES).assignment
        # A ledger compares the rule's words, and Python its equality.
        assert again == one and hash(again) == hash(one)
        assert str(again) == str(one)


def test_a_pattern_with_flags_keeps_its_meaning():
    rule = LayerwiseClip(1.0, groups=["(?i)EMBED", ".*"])
    config = json.loads(json.dumps(rule.get_config()))
    again = LayerwiseClip(**config)
    assert again.bind(NAMES).assignment == (0, 1, 1, 1, 1)


def test_a_function_is_saved_as_the_groups_it_made():
    rule = LayerwiseClip(1.0, groups=lambda name: "kernel" in name)
    with pytest.raises(ValueError, match="groups is a function"):
        rule.get_config()
    bound = rule.bind(NAMES)
    again = LayerwiseClip(**json.loads(json.dumps(bound.get_config()))).bind(NAMES)
    assert again.layout == bound.layout
    assert again == bound
    assert str(again) == str(bound)


def test_rules_with_a_function_can_be_compared_before_they_are_bound():
    def first(name):
        return name[0]

    rule = LayerwiseClip(1.0, groups=first)
    assert rule == LayerwiseClip(1.0, groups=first)
    assert rule != LayerwiseClip(1.0)
    assert hash(rule) == hash(LayerwiseClip(1.0, groups=first))


def test_binding_again_goes_by_the_new_names():
    rule = LayerwiseClip(1.0).bind(["a/w", "b/w"])
    assert rule.bind(["x/w"]).layout.names == ("x",)
    assert rule.layout.names == ("a", "b")


def test_a_rule_that_is_not_bound_says_so():
    rule = LayerwiseClip(1.0)
    with pytest.raises(ValueError, match="LayerwiseClip does not know the variables"):
        rule.layout  # noqa: B018
    with pytest.raises(ValueError, match="LayerwiseClip does not know the variables"):
        rule.initial_state()
