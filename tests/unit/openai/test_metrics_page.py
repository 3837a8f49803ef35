"""The page of metrics on the endpoint's port: histograms of families of counters, everything else as it is."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from minisgl_backend.openai.metrics import with_histograms

PAGE = """# HELP nv_inference_count Inferences
# TYPE nv_inference_count counter
nv_inference_count{model="a",version="1"} 3
# HELP nv_first_response_ms Of Triton itself
# TYPE nv_first_response_ms histogram
nv_first_response_ms_count{model="a"} 1
nv_first_response_ms_sum{model="a"} 5
nv_first_response_ms_bucket{model="a",le="100"} 1
nv_first_response_ms_bucket{model="a",le="+Inf"} 1
# HELP minisgl_x_seconds_bucket Between x
# TYPE minisgl_x_seconds_bucket counter
minisgl_x_seconds_bucket{le="+Inf"} 9.000000
minisgl_x_seconds_bucket{le="10"} 4.000000
minisgl_x_seconds_bucket{le="2.5"} 5.000000
minisgl_x_seconds_bucket{le="0.05"} 1.000000
# HELP minisgl_x_seconds_count Between x
# TYPE minisgl_x_seconds_count counter
minisgl_x_seconds_count 8.000000
# HELP minisgl_x_seconds_sum Between x
# TYPE minisgl_x_seconds_sum counter
minisgl_x_seconds_sum 12.500000
# HELP minisgl_engine_up 1 while it answers
# TYPE minisgl_engine_up gauge
minisgl_engine_up 1.000000
# HELP minisgl_lines_count Lines
# TYPE minisgl_lines_count counter
minisgl_lines_count 2
"""


def test_families_of_counters_become_one_histogram() -> None:
    text = with_histograms(PAGE)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = families["minisgl_x_seconds"]
    assert (found.type, found.documentation) == ("histogram", "Between x")
    values = [(sample.name.rpartition("_")[2], sample.labels.get("le"), sample.value) for sample in found.samples]
    # 10 was written before 2.5 was counted up to 5: a bucket holds what smaller ones do.
    buckets = [("bucket", "0.05", 1), ("bucket", "2.5", 5), ("bucket", "10", 5), ("bucket", "+Inf", 9)]
    assert values == [*buckets, ("sum", None, 12.5), ("count", None, 9)]
    assert not any(name.startswith("minisgl_x_seconds_") for name in families)


def test_everything_else_stays() -> None:
    text = with_histograms(PAGE)
    lines = [line for line in PAGE.splitlines() if "minisgl_x" not in line]
    assert sorted(line for line in text.splitlines() if "minisgl_x" not in line) == sorted(lines)
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families["nv_first_response_ms"] == "histogram"
    assert families["minisgl_engine_up"] == "gauge"
    assert "minisgl_lines_count" in text, "no histogram without buckets"
    assert with_histograms("") == ""


def test_other_labels_keep_their_buckets_apart() -> None:
    page = "".join(
        f"# TYPE a_{part} counter\n"
        + "".join(
            f'a_{part}{{le="{bound}",core="{core}"}} {core}\n'
            if part == "bucket"
            else f'a_{part}{{core="{core}"}} {core}\n'
            for core in (0, 1)
            for bound in (("+Inf", "1") if part == "bucket" else ("",))
        )
        for part in ("bucket", "count", "sum")
    )
    (found,) = text_string_to_metric_families(with_histograms(page))
    assert found.type == "histogram"
    bounds = [(s.labels["core"], float(s.labels["le"])) for s in found.samples if s.name == "a_bucket"]
    assert bounds == [("0", 1.0), ("0", math.inf), ("1", 1.0), ("1", math.inf)]
    assert [s.value for s in found.samples if s.name in ("a_sum", "a_count")] == [0, 0, 1, 1]
