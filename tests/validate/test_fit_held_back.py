"""Errors held back of rows that were replayed: intervals of models never seen, and where each error goes."""

import numpy as np
import pytest

from hwmodels.measured import read
from sim.bench.published.rows import layout_of, rows_of
from sim.validation.files import row_groups
from sim.validation.fit_held_back import held_pair, inside_unseen, ratios_of, state
from tests.validate.test_choices import HEADER, LLAMA


def test_a_model_never_seen_is_judged_by_the_rows_of_the_others():
    models = [name for name in "abc" for _ in range(40)]
    ratios = np.tile(np.linspace(-0.1, 0.1, 40), 3)
    assert inside_unseen(models, ratios) >= 0.85
    # One model that no other is like: none of its rows are inside.
    ratios[80:] += 0.5
    assert inside_unseen(models, ratios) <= 0.67


def test_layouts_are_as_rows_are_replayed_and_errors_held_back_are_put_on_their_rows(tmp_path):
    deepseek = "deepseek-ai/DeepSeek-R1,b200_sxm,trtllm,1.2,fp8,fp8,fp8,agg,1024,128,4,4,1,1,8,1,8,200,20,,x\n"
    path = tmp_path / "e2e_silicon_agg.csv"
    path.write_text(HEADER + LLAMA + deepseek + LLAMA.replace("Llama-3.1-70B", "Llama-9"))
    measurement = read(path)
    rows = rows_of(measurement)
    assert [layout_of(row) for row in rows] == [("TP2", 2), ("DP8 EP8", 8), ("", 0)]
    assert row_groups(measurement, rows)["gpus"].tolist() == [2, 8, 0]
    lines = {"vllm": [{"tpot_model": "1.5", "ttft_model": "2"}, {"tpot_model": "1", "ttft_model": "1"}]}
    tpot, ttft = held_pair(measurement, {name: ([], each) for name, each in lines.items()}, "models")
    assert tpot.predicted == pytest.approx([0.015, np.nan, 0.01], nan_ok=True)
    assert ttft.predicted == pytest.approx([0.18, np.nan, 0.09], nan_ok=True)


def test_the_errors_in_words_are_put_into_the_file_of_a_stack(tmp_path):
    path = tmp_path / "overheads.toml"
    path.write_text('graph = true\nheld_back = "Old: 9 %. The recorded run: 1 %"\n[terms]\n')
    state(path, "New: 8 %")
    assert path.read_text() == 'graph = true\nheld_back = "New: 8 %. The recorded run: 1 %"\n[terms]\n'


def test_errors_of_other_rows_are_refused(tmp_path):
    (tmp_path / "e2e_silicon_agg.csv").write_text(HEADER + LLAMA)
    errors = tmp_path / "errors.csv"
    fields = {"stack": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "system": "b200_sxm"}
    fields |= {"isl": "1024.0", "osl": "128.0", "concurrency": "4.0", "tp_size": "2.0"}
    for concurrency in ("4.0", "8.0"):
        line = {**fields, "concurrency": concurrency}
        errors.write_text(f"{','.join(line)}\n{','.join(line.values())}\n")
        if concurrency == "4.0":
            (points, _) = ratios_of(tmp_path, [errors])["vllm"]
            assert len(points) == 1
        else:
            with pytest.raises(ValueError, match="not those of the rows"):
                ratios_of(tmp_path, [errors])
