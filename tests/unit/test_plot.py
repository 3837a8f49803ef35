"""The picture of docs/performance.md: drawn from the committed results, readable, the same each time."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.comparison import PEERS, Comparison

RESULTS = sorted(PEERS.parent.glob("h200-*.json"))  # of one GPU, which is what the picture shows


def texts_of(svg: Path) -> set[str]:
    return {(element.text or "").strip() for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}


def everything_measured(folder: Path) -> Path:
    """Results in which every figure with a floor exists, for every model."""
    floors = json.loads(PEERS.read_text())["floors"]
    figures = {name: 0.7 * value for floor in floors for name, value in floor["figures"].items()}
    sampling = {
        f"sampling_{option}_{count}_tok_s": 1234 * count for option in plot.SAMPLING_LABELS for count in (1, 64)
    }
    path = folder / "all.json"
    path.write_text(json.dumps({"machine": {"gpu": "GPU"}, "all": {**figures, **sampling, "q06_cold_start_s": 18.0}}))
    return path


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out.svg"
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install -e '\.\[bench\]'"):
        plot.main([str(RESULTS[-1]), "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": {"gpu": "GPU"}}'])
def test_what_are_no_results_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"results\.json (cannot be read|holds no)"):
        Comparison.read(path)


def test_peers_and_floors_name_their_source_and_machine() -> None:
    known = json.loads(PEERS.read_text())
    prefixes = {model["prefix"] for model in known["models"]}
    for entry in [*known["peers"], *known["floors"]]:
        assert entry["source"]
        assert entry["machine"]
        assert {name.split("_")[0] for name in entry["figures"]} <= {*prefixes, "sampling"}


@pytest.mark.parametrize("results", RESULTS, ids=lambda path: path.stem)
def test_committed_results_become_the_same_picture_twice(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    plot.main([str(results), "--out", str(first)])
    plot.main([str(results), "--out", str(second)])
    assert first.read_bytes() == second.read_bytes()
    figures = json.loads(results.read_text()).get("q06", {})  # a file may hold some parts alone
    offline = {f"{figures[name]:,}" for name in ("q06_offline_tok_s",) if name in figures}
    assert {"this project", "Mini-SGLang", "hardware limit", *offline} <= texts_of(first)


@pytest.mark.parametrize("everything", [False, True], ids=["committed", "every model"])
def test_no_text_touches_another_or_leaves_the_picture(everything: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = plot.make_figure(Comparison.read(everything_measured(tmp_path) if everything else RESULTS[-1]))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text, text.get_window_extent(canvas.get_renderer())) for text in _visible_texts(figure)]
    assert len(boxes) > 20
    for index, (text, box) in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, f"{text} leaves the picture"
        for other, other_box in boxes[index + 1 :]:
            across = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            up = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            assert across <= 0 or up <= 1, f"{text.get_text()!r} lies on {other.get_text()!r}"


def test_a_part_alone_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"q14": {"q14_bs1_ms": 7.5, "q14_bs8_ms": 8.1}}))
    plot.main([str(path), "--out", str(tmp_path / "out.svg")])
    assert "Qwen3-14B: decode step (ms)" in texts_of(tmp_path / "out.svg")


def _visible_texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
