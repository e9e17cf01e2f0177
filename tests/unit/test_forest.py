"""Forests say what LightGBM's boosters do, whatever the trees split on and the rows lack."""

from __future__ import annotations

import itertools
from typing import Any

import lightgbm
import numpy as np
import pytest

from app.prediction.forest import Trees
from sfs_ext import Forest, ForestMissing, ForestNodeKind, forest_node_dtype

FEATURES = 8
CATEGORICAL = [0, 1]
OBJECTIVES = ["regression", "regression_l1", "huber", "fair", "quantile", "mape"]
ZERO_THRESHOLD = float(np.float32(1e-35))

# Below, on and beyond what tells zeros and categories apart.
ODD_VALUES = np.array(
    [
        np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-36, -1e-36, ZERO_THRESHOLD, -ZERO_THRESHOLD,
        np.nextafter(ZERO_THRESHOLD, 1), -np.nextafter(ZERO_THRESHOLD, 1), -0.5, -1.0, -7.0, 0.9,
        31.9, 32.0, 39.0, 40.0, 63.0, 64.0, 1e6, 2.0**31 - 1, 2.0**31, 2.0**32, 1e300, -1e300,
    ]
)  # fmt: skip


def rows_of(random: np.random.Generator, count: int) -> np.ndarray:
    """Two categorical features, one of few categories and one of many; zeros and gaps in all."""
    rows = random.normal(size=(count, FEATURES))
    rows[:, 0] = random.integers(0, 4, count)
    rows[:, 1] = random.integers(0, 90, count)
    rows[random.random(rows.shape) < 0.1] = 0.0
    rows[random.random(rows.shape) < 0.1] = np.nan
    return rows


def asked_for(random: np.random.Generator, count: int = 500) -> np.ndarray:
    """Such rows, and what no booster has seen."""
    rows = rows_of(random, count)
    odd = random.random(rows.shape) < 0.2
    rows[odd] = random.choice(ODD_VALUES, odd.sum())
    return rows


def booster_of(
    random: np.random.Generator, count: int = 600, trees: int = 30, **settings: Any
) -> lightgbm.Booster:
    rows = rows_of(random, count)
    known = np.nan_to_num(rows)
    labels = known[:, 0] * known[:, 2] + known[:, 1] % 3 + np.isnan(rows[:, 3]) + known[:, 4] ** 2
    settings |= {"verbose": -1, "num_threads": 1, "min_data_per_group": 5, "cat_smooth": 1}
    data = lightgbm.Dataset(rows, labels + 1.0, categorical_feature=CATEGORICAL)
    return lightgbm.train(settings, data, trees)


def forest_of(*boosters: lightgbm.Booster) -> Forest:
    return Trees.of(boosters).forest(boosters[0].num_feature())


def check_equal(booster: lightgbm.Booster, rows: np.ndarray) -> None:
    predicted = forest_of(booster).evaluate(rows)
    assert predicted.shape == (len(rows), 1)
    np.testing.assert_allclose(predicted[:, 0], booster.predict(rows, num_threads=1), rtol=1e-12)


def splits_of(booster: lightgbm.Booster) -> set[tuple[str, str, bool]]:
    """Decision type, missing type and default way of all."""
    found, pending = set(), [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    while pending:
        node = pending.pop()
        if "left_child" in node:
            found.add((node["decision_type"], node["missing_type"], node["default_left"]))
            pending += [node["left_child"], node["right_child"]]
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_predictions_are_the_boosters(objective: str) -> None:
    random = np.random.default_rng(OBJECTIVES.index(objective))
    booster = booster_of(random, objective=objective)
    assert {kind for kind, _, _ in splits_of(booster)} == {"<=", "=="}
    check_equal(booster, asked_for(random))


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({}, "NaN"), ({"zero_as_missing": True}, "Zero"), ({"use_missing": False}, "None")],
)
def test_missing_values_go_the_boosters_way(settings: dict[str, bool], missing: str) -> None:
    random = np.random.default_rng(10)
    booster = booster_of(random, trees=60, objective="huber", **settings)
    numerical = {(kind, way) for decision, kind, way in splits_of(booster) if decision == "<="}
    assert (missing, True) in numerical
    assert (missing, False) in numerical or missing == "None"
    check_equal(booster, asked_for(random))


@pytest.mark.parametrize("seed", range(25))
def test_random_settings(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    booster = booster_of(
        random,
        count=int(random.choice([30, 100, 1000])),
        trees=int(random.integers(1, 40)),
        objective=str(random.choice(OBJECTIVES)),
        boosting=str(random.choice(["gbdt", "dart"])),
        num_leaves=int(random.choice([2, 5, 31, 64])),
        min_data_in_leaf=int(random.choice([1, 20])),
        max_bin=int(random.choice([3, 20, 255])),
        max_cat_to_onehot=int(random.choice([1, 4, 100])),
        use_missing=bool(random.random() < 0.7),
        zero_as_missing=bool(random.random() < 0.3),
        extra_trees=bool(random.random() < 0.3),
        learning_rate=float(random.choice([0.05, 1.0])),
    )
    check_equal(booster, asked_for(random))


def test_too_few_rows_to_split() -> None:
    random = np.random.default_rng(20)
    booster = booster_of(random, count=15, objective="huber")
    assert splits_of(booster) == set()
    check_equal(booster, asked_for(random))


def leafy_booster(leaves: int) -> lightgbm.Booster:
    """Of trees of so many leaves."""
    rows = np.arange(200.0)[:, None]
    labels = np.exp(rows[:, 0] / 30)
    settings = {"verbose": -1, "num_leaves": leaves, "min_data_in_leaf": 1, "max_bin": 1000}
    settings |= {"min_data_in_bin": 1, "min_sum_hessian_in_leaf": 0.0, "num_threads": 1}
    return lightgbm.train(settings, lightgbm.Dataset(rows, labels), 3)


def test_trees_of_as_many_leaves_as_may_be() -> None:
    check_equal(leafy_booster(64), np.linspace(-1, 201, 500)[:, None])


def test_trees_of_too_many_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match="tree 0 has 65 leaves, more than 64"):
        forest_of(leafy_booster(65))


def test_trees_of_single_leaves() -> None:
    nodes = np.zeros(3, forest_node_dtype)
    nodes["kind"], nodes["value"] = ForestNodeKind.LEAF, [1.0, 2.0, 4.0]
    roots, output_trees = np.arange(3, dtype=np.int32), np.array([2, 0, 1], np.int32)
    forest = Forest(nodes, roots, 2, output_trees)
    rows = np.array([[0.0, np.nan], [np.inf, 1.0]])
    assert forest.evaluate(rows).tolist() == [[3.0, 0.0, 4.0]] * 2


@pytest.mark.parametrize("settings", [{}, {"zero_as_missing": True}, {"use_missing": False}])
def test_rows_that_agree_on_some_columns(settings: dict[str, bool]) -> None:
    """On each combination of them, as if each row were asked for alone."""
    random = np.random.default_rng(70)
    booster = booster_of(random, objective="huber", **settings)
    forest = forest_of(booster)
    for differing in itertools.product([False, True], repeat=FEATURES):
        rows = np.where(differing, asked_for(random, 3), asked_for(random, 1))
        check_equal(booster, rows)
        alone = [forest.evaluate(row[None])[0] for row in rows]
        assert np.array_equal(forest.evaluate(rows), alone)


def test_the_best_iteration_is_what_counts() -> None:
    booster = booster_of(np.random.default_rng(30), objective="huber")
    booster.best_iteration = 7
    check_equal(booster, asked_for(np.random.default_rng(31)))


def test_a_loaded_booster_is_the_same() -> None:
    random = np.random.default_rng(40)
    booster = booster_of(random, objective="quantile", alpha=0.9)
    rows = asked_for(random)
    loaded = lightgbm.Booster(model_str=booster.model_to_string())
    both = forest_of(booster, loaded).evaluate(rows)
    assert np.array_equal(both[:, 0], both[:, 1])
    check_equal(loaded, rows)


def test_several_boosters_at_once() -> None:
    random = np.random.default_rng(50)
    boosters = [booster_of(random, objective=objective) for objective in OBJECTIVES]
    forests = [forest_of(booster) for booster in boosters]
    whole = forest_of(*boosters)
    assert whole.outputs == len(boosters)
    for count in (0, 1, 3, 20):
        rows = asked_for(random, count)
        alone = [forest.evaluate(rows)[:, 0] for forest in forests]
        assert np.array_equal(whole.evaluate(rows), np.transpose(alone))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"objective": "binary"}, "'binary sigmoid:1'"),
        ({"objective": "cross_entropy"}, "'cross_entropy'"),
        ({"objective": "poisson"}, "'poisson'"),
        ({"objective": "gamma"}, "'gamma'"),
        ({"objective": "tweedie"}, "'tweedie'"),
        ({"objective": "regression", "reg_sqrt": True}, "'regression sqrt'"),
        ({"objective": "multiclass", "num_class": 3}, "multiclass"),
        ({"objective": "regression", "linear_tree": True}, "linear_tree"),
        (
            {"objective": "huber", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5},
            "average_output",
        ),
        ({"objective": lambda scores, data: (scores, np.ones_like(scores))}, "'custom'"),
    ],
)  # fmt: skip
def test_what_is_not_a_sum_of_leaves_is_refused(settings: dict[str, Any], named: str) -> None:
    random = np.random.default_rng(60)
    data = lightgbm.Dataset(random.normal(size=(100, 3)), random.integers(0, 2, 100) + 0.0)
    if settings["objective"] == "gamma":
        data = lightgbm.Dataset(data.data, data.label + 1)
    booster = lightgbm.train({"verbose": -1, "num_threads": 1} | settings, data, 3)
    with pytest.raises(ValueError, match=named):
        forest_of(booster)


def stump() -> np.ndarray:
    nodes = np.zeros(3, forest_node_dtype)
    nodes["kind"] = [ForestNodeKind.NUMERICAL, ForestNodeKind.LEAF, ForestNodeKind.LEAF]
    nodes["value"] = [0.5, 10.0, 20.0]
    nodes["missing"] = ForestMissing.NAN
    nodes["left"][0], nodes["right"][0] = 1, 2
    return nodes


ROOTS = np.zeros(1, np.int32)
ONE = np.ones(1, np.int32)


def test_arrays_make_a_forest() -> None:
    forest = Forest(stump(), ROOTS, 2, ONE)
    assert (forest.features, forest.outputs) == (2, 1)
    rows = np.array([[0.5, 9.0], [0.6, 9.0], [np.nan, 9.0]])
    assert forest.evaluate(rows).tolist() == [[10.0], [20.0], [20.0]]
    strided = np.repeat(rows, 2, axis=1)[:, ::2]
    assert forest.evaluate(strided)[:, 0].tolist() == [10.0, 20.0, 20.0]


def test_equal_boosters_make_equal_bytes() -> None:
    """Between a node's fields there is room, which a file must not have by chance."""
    one, other = (
        Trees.of([booster_of(np.random.default_rng(5), objective="huber")]) for _ in range(2)
    )
    assert one.nodes.tobytes() == other.nodes.tobytes()
    assert one.nodes.nbytes == 32 * len(one.nodes)


def test_equal_sets_of_categories_are_kept_once() -> None:
    booster = booster_of(np.random.default_rng(6), objective="huber")
    once, twice = Trees.of([booster]), Trees.of([booster, booster])
    assert len(once.category_words) > 0
    assert np.array_equal(once.category_words, twice.category_words)


def test_nodes_that_are_not_sound_are_named() -> None:
    nodes = stump()
    nodes["right"][0] = 0
    with pytest.raises(ValueError, match="tree 0, node 0: child 0 is not behind it"):
        Forest(nodes, ROOTS, 2, ONE)
    nodes = stump()
    nodes["value"][2] = np.inf
    with pytest.raises(ValueError, match="tree 0, node 2: its output is not finite"):
        Forest(nodes, ROOTS, 2, ONE)


@pytest.mark.parametrize(
    ("output_trees", "why"),
    [
        ([], "no output has the last 1 trees"),
        ([0, 0], "no output has the last 1 trees"),
        ([1, 1], "output 1 of 1 trees; 0 are left"),
        ([-1, 2], "output 0 of -1 trees; 1 are left"),
        ([2**31 - 1], "output 0 of 2147483647 trees; 1 are left"),
    ],
)
def test_trees_are_of_one_output_each(output_trees: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Forest(stump(), ROOTS, 2, np.array(output_trees, np.int32))


def test_wrong_shapes_are_named() -> None:
    forest = Forest(stump(), ROOTS, 2, ONE)
    for shape in [(3, 3), (2,), (1, 3, 2), ()]:
        with pytest.raises(ValueError, match=r"rows must have shape \(rows, 2\), not \("):
            forest.evaluate(np.zeros(shape))
    with pytest.raises(ValueError, match="roots must have 1 dimension, not 2"):
        Forest(stump(), np.zeros((1, 1), np.int32), 2, ONE)
    with pytest.raises(ValueError, match="features must be positive"):
        Forest(stump(), ROOTS, 0, ONE)
