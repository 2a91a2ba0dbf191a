"""JSON for every reader: no NaN, no Infinity."""

import json
import math

import numpy as np
import pytest

from jaxrl.store.strict_json import dumps, plain


def test_what_is_not_finite_is_null_at_every_depth():
    value = {
        "a": math.nan,
        "b": [math.inf, {"c": (-math.inf, 1.5)}],
        "d": np.array([[1.0, np.nan]], np.float32),
        "e": np.float32("inf"),
        "f": np.int64(3),
        "g": True,
        "h": None,
        "i": "NaN",
    }

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(dumps(value), parse_constant=refuse)
    expected = {"a": None, "b": [None, {"c": [None, 1.5]}], "d": [[1.0, None]], "e": None, "f": 3}
    assert found == expected | {"g": True, "h": None, "i": "NaN"}
    assert plain(value["d"]) == [[1.0, None]]


def test_what_json_has_no_word_for_is_refused():
    with pytest.raises(TypeError):
        dumps({"a": object()})
