"""LightGBM's boosters as a forest of the core.

A decision asks several boosters about a handful of rows. ``Booster.predict`` spends about a hundred
microseconds on each call, and milliseconds where its threads find the cores busy; a forest answers
one call for all boosters and rows together, and needs no LightGBM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sfs_ext import Forest, ForestMissing, ForestNodeKind, forest_node_dtype

if TYPE_CHECKING:
    from lightgbm import Booster

Json = dict[str, Any]
Node = tuple[float, int, int, int, int, int, int, int, bool]

# What the trees sum up to is the prediction, as it is not with poisson, binary or a custom one.
PLAIN_OBJECTIVES = {"regression", "regression_l1", "huber", "fair", "quantile", "mape"}

MISSING = {"None": ForestMissing.NONE, "Zero": ForestMissing.ZERO, "NaN": ForestMissing.NAN}

UNKNOWN: Node = (0.0, 0, 0, 0, 0, 0, -1, 0, False)


@dataclass(frozen=True, eq=False)
class Trees:
    """What a forest is made of, as arrays that can be kept."""

    nodes: NDArray[np.void]
    """forest_node_dtype"""
    roots: NDArray[np.int32]
    output_trees: NDArray[np.int32]
    category_words: NDArray[np.uint32]

    @classmethod
    def of(cls, boosters: Sequence[Booster]) -> Trees:
        """An output for each, which is what ``booster.predict`` says of a float64 array:
        categories are the numbers that the booster was trained on, not values of a data frame. Up
        to the best iteration, if early stopping has found one.

        ValueError for what a sum of constant leaves cannot say: several classes, averaged or
        linear trees, an objective that transforms its sum."""
        trees, counts = _Builder(), []
        for booster in boosters:
            model = booster.dump_model()
            check_supported(model)
            for tree in model["tree_info"]:
                trees.add(tree)
            counts.append(len(model["tree_info"]))
        return trees.arrays(counts)

    def forest(self, features: int) -> Forest:
        """ValueError for arrays that are none, and for trees of more than 64 leaves."""
        return Forest(self.nodes, self.roots, features, self.output_trees, self.category_words)


def check_supported(model: Json) -> None:
    trees = model["num_tree_per_iteration"]
    if model["num_class"] != 1 or trees != 1:
        raise ValueError(f"forest: {trees} trees per iteration (multiclass) are not supported")
    if model["average_output"]:
        raise ValueError("forest: average_output (boosting rf) is not supported")
    objective = model.get("objective", "custom")
    if objective not in PLAIN_OBJECTIVES:
        raise ValueError(f"forest: objective {objective!r} is not supported")


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[int] = []
        self.words: list[int] = []
        self.first_word: dict[tuple[int, ...], int] = {}
        """Of each set: splits on the same one are evaluated together."""

    def add(self, tree: Json) -> None:
        root = len(self.nodes)
        self.roots.append(root)
        self.nodes.append(UNKNOWN)
        pending = [(tree["tree_structure"], root)]
        while pending:
            node, place = pending.pop()
            if "leaf_value" in node:
                self.nodes[place] = leaf(node, tree["tree_index"])
                continue
            left, right = len(self.nodes), len(self.nodes) + 1
            self.nodes[place] = self.split(node, left, right)
            self.nodes += [UNKNOWN, UNKNOWN]
            pending += [(node["left_child"], left), (node["right_child"], right)]

    def split(self, node: Json, left: int, right: int) -> Node:
        missing, feature = MISSING[node["missing_type"]], node["split_feature"]
        default_left = node["default_left"]
        if node["decision_type"] == "<=":
            kind, threshold = ForestNodeKind.NUMERICAL, threshold_of(node)
            return (threshold, left, right, feature, 0, 0, kind, missing, default_left)
        if node["decision_type"] != "==":
            raise ValueError(f"forest: decision type {node['decision_type']!r} is not supported")
        words = words_of(int(category) for category in node["threshold"].split("||"))
        if words not in self.first_word:
            self.first_word[words] = len(self.words)
            self.words += words
        first, count = self.first_word[words], len(words)
        kind = ForestNodeKind.CATEGORICAL
        return (0.0, left, right, feature, first, count, kind, missing, default_left)

    def arrays(self, output_trees: Sequence[int]) -> Trees:
        nodes = np.zeros(len(self.nodes), forest_node_dtype)  # so are the gaps between its fields
        nodes[:] = self.nodes
        return Trees(
            nodes=nodes,
            roots=np.array(self.roots, np.int32),
            output_trees=np.array(output_trees, np.int32),
            category_words=np.array(self.words, np.uint32),
        )


def leaf(node: Json, tree: int) -> Node:
    if "leaf_const" in node:
        raise ValueError(f"forest: tree {tree} is linear (linear_tree), which is not supported")
    return (node["leaf_value"], 0, 0, 0, 0, 0, ForestNodeKind.LEAF, ForestMissing.NONE, False)


def threshold_of(node: Json) -> float:
    """Where only missing values go right it is infinite, which a dump cannot say: 1e300."""
    threshold = float(node["threshold"])
    return math.copysign(math.inf, threshold) if abs(threshold) >= 1e300 else threshold


def words_of(categories: Iterable[int]) -> tuple[int, ...]:
    """A bit for each, in as few words of 32 as there must be."""
    bits = 0
    for category in categories:
        bits |= 1 << category
    return tuple(bits >> 32 * word & 0xFFFFFFFF for word in range(-(-bits.bit_length() // 32)))
