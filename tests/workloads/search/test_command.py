"""The command that a search prints to train its plan."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import header_of

from harness.command_line import parse_all
from harness.domain.prediction import STRATEGY_FILE
from harness.measure.store import Run
from harness.workloads.common.contract import config_json
from harness.workloads.planning.config import SearchConfig, search_cases
from harness.workloads.search.workload import search_text
from harness.workloads.train.cases import train_cases
from harness.workloads.train.plan import search_config_of


def command(results, config):
    """The words of the command that is printed after a search on two ranks."""
    (case,) = search_cases(config, 2)
    header = header_of(["node0"] * 2, workload="search", config=config_json(case), status="ok")
    path = results / header.run_id
    path.mkdir(parents=True)
    (path / STRATEGY_FILE).write_text("{}")
    *_, line = search_text([Run(path=path, header=header, ranks=[])]).splitlines()
    before, _, words = line.partition("./entry.sh ")
    assert before == "train it on 2 ranks, started as this search, with: "
    return case, shlex.split(words)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, []),
        ({"model": "gpt2"}, []),
        ({"model": "gpt2", "n_layers": 2, "width": 96}, ["--n-layers", "2", "--width", "96"]),
        ({"model": "bert_base", "head": "span"}, ["--head", "span"]),
        ({"model": "llama", "n_experts": 4, "vocabulary_size": 50},
         ["--vocabulary-size", "50", "--n-experts", "4"]),
        ({"model": "dlrm", "dlrm_table_rows": (9,) * 8}, ["--dlrm-table-rows", *["9"] * 8]),
        ({"model": "lenet", "image_size": 32, "n_classes": 3, "dtype": "bf16"},
         ["--image-size", "32", "--n-classes", "3", "--dtype", "bf16"]),
        ({"model": "vgg16", "compile": True, "ema": 0.9}, ["--compile", "--ema", "0.9"]),
        ({"model": "nets:small", "sequence_length": 9}, ["--sequence-length", "9"]),
    ],
)  # fmt: skip
def test_it_names_the_flags_that_were_given_and_trains_what_was_searched(tmp_path, flags, told):
    config = replace(SearchConfig(), batch_size=8, **flags)
    asked, words = command(tmp_path, config)
    assert words[:3] == ["train", "--model", config.model]
    assert words[3 : words.index("--batch-size")] == told
    ((_, config, options),) = parse_all(words)
    assert options.results == tmp_path
    (case,) = train_cases(config, 2)
    assert (case.n_ranks, case.batch) == (2, 8)
    assert replace(search_config_of(case), n_ranks=2) == asked


def test_it_leaves_the_usual_directory_of_results_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, words = command(Path("results").absolute(), replace(SearchConfig(), model="lenet"))
    assert "--results" not in words
